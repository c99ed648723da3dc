/* Turns: of the containers that have memory on the host, one at a time has it on the device, in
 * what the host keeps free of shares for that. So a working set goes over the bus once in a turn,
 * not with each kernel that reads it.
 *
 * There is nobody to hand a turn out: each container says in its page whether it has it, until
 * when, and since when it wants it (struct gs_turn), and reads what the others say. Who wants it
 * says so, and takes it when nobody has it and nobody has waited longer. It says that it has it,
 * then looks again: of two that take it at once at least one sees the other, and gives it back.
 *
 * What others say is believed no longer than a turn is, and a holder that neither launches nor
 * waits for the device has it no more. So one that was killed, or sleeps, holds nobody up, and its
 * memory on the device can be driven out by the driver. One that lies is waited for as long as all
 * others could take: then the launch goes ahead, and reads over the bus, and whoever stood in its
 * way is not believed for a while, by none of the launches that follow. */
#include "accounting/compute_parts.h"
#include "oversubscription.h"

#define LOOK (1 * MS)    /* between looks at what others say, at least */
#define WANTED (50 * MS) /* who waits says so again within this time */
#define LONGEST (2000 * MS)
#define DOUBTED 32u /* turns for which one that lied is not believed */
#define MIB (UINT64_C(1) << 20)

_Atomic uint32_t gs_slice_held;                      /* this process had a turn on any device */
static _Atomic uint64_t brought_for[GS_MAX_DEVICES]; /* the turn in which it did, and one */
static _Atomic uint64_t brought[GS_MAX_DEVICES];     /* by this process, in bytes */
static _Atomic uint64_t doubted_until_ns[GS_MAX_DEVICES][GS_MAX_PEERS];

static uint64_t length_ns(void) {
    const struct gs_view *view = gs_region();
    uint64_t ns = UINT64_C(1000) * __atomic_load_n(&view->limits->turn_us, __ATOMIC_RELAXED);
    return ns < LONGEST ? ns : LONGEST;
}

/* Not used for so long, it is over: a small part of it, since it costs more to move memory. */
static uint64_t idle_ns(uint64_t length) {
    return length / 20 > 5 * MS ? length / 20 : 5 * MS;
}

static uint64_t room_bytes(int dev) {
    return gs_region()->limits->device[dev].turn_mib * MIB;
}

bool gs_turns(int dev) {
    return gs_virtual_lives() && dev >= 0 && gs_virtual_has(dev) && length_ns() &&
           room_bytes(dev) && gs_activity_slice(dev);
}

/* The processes of a container have a turn together, and any of them may take the next one while
 * another still thinks of the last. So what is said of a turn has its number in its low bits. */
#define NUMBER UINT64_C(1023)

static uint64_t number_of(const struct gs_turn *t) {
    return atomic_load(&t->held_until_ns) & NUMBER;
}

/* By all processes, in the turn of that number. */
static uint64_t brought_in(uint64_t said, uint64_t number) {
    return (said & NUMBER) == number ? said & ~NUMBER : 0;
}

/* ---- what is said ---------------------------------------------------------------------------- */

static bool is_held(const struct gs_turn *t, uint64_t now, uint64_t length) {
    uint64_t until = atomic_load(&t->held_until_ns);
    return until > now && until <= now + length;
}

struct look {
    uint64_t now, length, ticket;
    int dev;
    uint32_t number;
    bool held, earlier;              /* by others; `earlier`: wanted before our ticket */
    uint64_t again_ns;               /* when it may be over */
    unsigned others;                 /* that have it or want it */
    uint8_t before_us[GS_MAX_PEERS]; /* who: NOT_YET, BEFORE, HOLDS */
};
enum { NOT_YET, BEFORE, HOLDS };

/* 0: it has none, else when to look again. Over, but not sent home yet: it has a moment for that.
 */
static uint64_t held_for(const struct gs_turn *t, uint64_t now, uint64_t length) {
    uint64_t until = atomic_load(&t->held_until_ns), idle = idle_ns(length);
    uint64_t idle_at = atomic_load(&t->used_ns) + idle;
    if (until <= NUMBER || until > now + length || idle_at <= now)
        return 0;
    if (until > now)
        return min64(until, idle_at);
    bool there = atomic_load(&t->brought_bytes) > NUMBER;
    return there && until + idle > now ? min64(until + idle, idle_at) : 0;
}

static void look_at(const struct gs_turn *t, uint32_t number, void *arg) {
    struct look *l = arg;
    uint64_t over = held_for(t, l->now, l->length), ticket = atomic_load(&t->wants_from_ns);
    uint64_t wants_until = atomic_load(&t->wants_until_ns);
    bool holds = over != 0;
    bool wants = ticket && wants_until > l->now && wants_until <= l->now + 2 * WANTED;
    bool earlier = wants && (ticket < l->ticket || (ticket == l->ticket && number < l->number));
    if (atomic_load_explicit(&doubted_until_ns[l->dev][number], memory_order_relaxed) > l->now)
        return;
    if (holds)
        l->again_ns = l->held ? min64(l->again_ns, over) : over;
    l->held |= holds;
    l->earlier |= earlier;
    l->others += holds || wants;
    l->before_us[number] = holds ? HOLDS : earlier ? BEFORE : NOT_YET;
}

static struct look look(int dev, uint64_t ticket) {
    struct look l = {.now = gs_compute_now(), .length = length_ns(), .ticket = ticket, .dev = dev};
    l.number = gs_region()->limits->device[dev].page;
    gs_activity_slices(dev, look_at, &l);
    return l;
}

/* ---- having it ------------------------------------------------------------------------------- */

/* That turn, unless it is not the last one any more. */
static void end(struct gs_turn *own, uint64_t until) {
    atomic_compare_exchange_strong(&own->held_until_ns, &until, until & NUMBER);
}

static bool take(int dev, struct gs_turn *own, uint64_t now, uint64_t length) {
    uint64_t before = atomic_load(&own->held_until_ns);
    if (is_held(own, now, length)) /* another thread, or process, of ours was first */
        return true;
    uint64_t until = ((now + length) & ~NUMBER) | ((before + 1) & NUMBER);
    atomic_store(&own->used_ns, now);
    if (!atomic_compare_exchange_strong(&own->held_until_ns, &before, until))
        return is_held(own, now, length);
    atomic_store(&own->held_from_ns, now);
    atomic_thread_fence(memory_order_seq_cst);
    if (look(dev, now).held) {
        end(own, until);
        return false;
    }
    atomic_store(&own->wants_from_ns, 0);
    return true;
}

static uint64_t generation(void) {
    return __atomic_load_n(&gs_region()->limits->generation, __ATOMIC_ACQUIRE);
}

/* Each of those before us had time for its turn: who has it now, or only wants it, lied, or was
 * kept from it by one that did. */
static void doubt(const struct look *seen) {
    for (uint32_t i = 0; i < GS_MAX_PEERS; i++)
        if (seen->before_us[i] == (seen->held ? HOLDS : BEFORE))
            atomic_store(&doubted_until_ns[seen->dev][i], seen->now + DOUBTED * seen->length);
}

/* False: it did not come to us in the time in which it should have. */
static bool wait_for_it(int dev, struct gs_turn *own) {
    uint64_t since = gs_compute_now(), none = 0;
    unsigned others = 0;
    atomic_compare_exchange_strong(&own->wants_from_ns, &none, since);
    for (;;) {
        uint64_t now = gs_compute_now(), length = length_ns();
        uint64_t ticket = atomic_load(&own->wants_from_ns);
        ticket = ticket ? ticket : since;
        atomic_store(&own->wants_until_ns, now + WANTED);
        atomic_thread_fence(memory_order_seq_cst);
        struct look seen = look(dev, ticket);
        if (!length || is_held(own, now, length))
            return true;
        if (!seen.held && !seen.earlier && take(dev, own, now, length))
            return true;
        others = seen.others > others ? seen.others : others;
        if (now > since + (others + 1) * (length + idle_ns(length))) {
            doubt(&seen);
            return false;
        }
        uint64_t again = seen.held ? seen.again_ns : now;
        gs_compute_wait(again > now + LOOK ? again : now + LOOK, generation());
    }
}

/* Of what is kept free, for one allocation. Others may bring theirs at the same time: what they had
 * room for is theirs. */
static uint64_t room_for(int dev, uint64_t bytes) {
    struct gs_turn *own = gs_activity_slice(dev);
    uint64_t most = room_bytes(dev), seen = atomic_load(&own->brought_bytes), took, said;
    do {
        uint64_t number = number_of(own), used = brought_in(seen, number);
        took = used < most ? (most - used) & ~NUMBER : 0;
        took = took < bytes ? took : bytes;
        said = (used + gs_round_up(took, NUMBER + 1)) | number;
    } while (!atomic_compare_exchange_strong(&own->brought_bytes, &seen, said));
    atomic_fetch_add(&brought[dev], gs_round_up(took, NUMBER + 1));
    return took;
}

static void send_home(const struct gs_here *here, CUstream stream) {
    struct gs_turn *own = gs_activity_slice(here->dev);
    uint64_t turn = atomic_exchange(&brought_for[here->dev], 0), said, left;
    if (!turn)
        return;
    uint64_t bytes = atomic_exchange(&brought[here->dev], 0),
             seen = atomic_load(&own->brought_bytes);
    gs_virtual_move(here, stream, NULL);
    do {
        left = brought_in(seen, turn - 1);
        said = (left > bytes ? left - bytes : 0) | (seen & NUMBER);
    } while ((seen & NUMBER) == turn - 1 &&
             !atomic_compare_exchange_strong(&own->brought_bytes, &seen, said));
}

static void bring(const struct gs_here *here, CUstream stream, struct gs_turn *own) {
    uint64_t turn = number_of(own) + 1, before = atomic_load(&brought_for[here->dev]);
    if (before == turn)
        return;
    if (before) /* it slept all through the end of that turn: what it has there is not counted here
                 */
        send_home(here, stream);
    uint64_t none = 0;
    if (!atomic_compare_exchange_strong(&brought_for[here->dev], &none, turn))
        return; /* another thread does */
    atomic_store(&gs_slice_held, 1);
    gs_virtual_move(here, stream, room_for);
}

/* At its end it is ours again where nobody wants it. */
static bool goes_on(int dev, struct gs_turn *own, uint64_t now, uint64_t length) {
    uint64_t until = atomic_load(&own->held_until_ns);
    if (until <= NUMBER || look(dev, now).others)
        return false;
    uint64_t held = atomic_load(&own->used_ns),
             more = ((now + length) & ~NUMBER) | (until & NUMBER);
    return now < held + idle_ns(length) + length &&
           atomic_compare_exchange_strong(&own->held_until_ns, &until, more);
}

/* Still ours: one that was not used for a while may be somebody else's by now. */
static bool is_ours(int dev, struct gs_turn *own, uint64_t now, uint64_t length) {
    uint64_t used = atomic_load(&own->used_ns);
    if (!is_held(own, now, length) || used + idle_ns(length) <= now)
        return false;
    atomic_store(&own->used_ns, now);
    atomic_thread_fence(memory_order_seq_cst);
    return now < used + idle_ns(length) / 2 || !look(dev, now).held;
}

void gs_slice_admit(const struct gs_here *here, CUstream stream) {
    struct gs_turn *own = gs_activity_slice(here->dev);
    uint64_t until = atomic_load(&own->held_until_ns), now = gs_compute_now(), length = length_ns();
    bool ours = is_ours(here->dev, own, now, length) || goes_on(here->dev, own, now, length);
    if (!ours) {
        send_home(here, stream);
        /* Others of ours may have theirs there yet: then it is over in a moment (held_for). */
        if (until > now || !brought_in(atomic_load(&own->brought_bytes), until & NUMBER))
            end(own, until);
        ours = wait_for_it(here->dev, own);
    }
    if (!ours)
        return;
    atomic_store(&own->used_ns, gs_compute_now());
    bring(here, stream, own);
}

void gs_slice_waits(bool begins) {
    for (int dev = 0; dev < (int)GS_MAX_DEVICES; dev++) {
        struct gs_turn *own = atomic_load(&brought_for[dev]) ? gs_activity_slice(dev) : NULL;
        if (own)
            atomic_store(&own->used_ns, begins ? gs_compute_now() + LONGEST : gs_compute_now());
    }
}
