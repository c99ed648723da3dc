/* Migration slices: one container at a time has its host memory on the device, in the room that the
 * host keeps free of shares for this. So a working set crosses the bus once per slice, and not with
 * each kernel that reads it.
 *
 * No process hands out slices. In its activity file each container advertises whether it has the
 * slice, until when, and since when it waits for one (struct gs_turn), and it reads what the
 * others advertise. Advertise the wait; take the slice when it is free and no other container has
 * waited longer. After taking it, check again: if two containers take it at once, at least one sees
 * the other and gives it back.
 *
 * An advertised slice is believed for at most the length of a slice, and a container that neither
 * launches nor waits for the device loses it. So a container that was killed or sleeps delays no
 * other, and the driver can evict its memory from the device. If a container makes false claims, a
 * launch waits for as long as all other containers could need. Then it goes ahead and reads over
 * the bus, and all launches of this process ignore the containers that blocked it for a while. */
#include "accounting/compute_parts.h"
#include "oversubscription.h"

#define CHECK_EVERY (1 * MS) /* minimum time between two checks of what others advertise */
#define WANTED (50 * MS)     /* a waiting container renews its advertisement within this time */
#define LONGEST (2000 * MS)
#define DOUBTED 32u /* slices for which a container with a false claim is ignored */
#define MIB (UINT64_C(1) << 20)

_Atomic uint32_t gs_slice_held; /* this process had a slice on some device */
/* The number of the slice in which this process moved memory, plus one. */
static _Atomic uint64_t brought_for[GS_MAX_DEVICES];
static _Atomic uint64_t brought[GS_MAX_DEVICES]; /* bytes that this process moved */
static _Atomic uint64_t doubted_until_ns[GS_MAX_DEVICES][GS_MAX_PEERS];

static uint64_t slice_length_ns(void) {
    const struct gs_view *view = gs_region();
    uint64_t ns = UINT64_C(1000) * __atomic_load_n(&view->limits->turn_us, __ATOMIC_RELAXED);
    return ns < LONGEST ? ns : LONGEST;
}

/* A slice that was not used for so long is over. This is a small part of the slice, since moving
 * memory costs more. */
static uint64_t idle_ns(uint64_t length) {
    return length / 20 > 5 * MS ? length / 20 : 5 * MS;
}

static uint64_t reserved_bytes(int dev) {
    return gs_region()->limits->device[dev].turn_mib * MIB;
}

bool gs_slices_needed(int dev) {
    return gs_virtual_lives() && dev >= 0 && gs_virtual_has(dev) && slice_length_ns() &&
           reserved_bytes(dev) && gs_activity_slice(dev);
}

/* All processes of a container share its slice, and one of them may take the next slice while
 * another still acts on the last one. So the low bits of what is advertised about a slice are its
 * number. */
#define NUMBER UINT64_C(1023)

static uint64_t number_of(const struct gs_turn *t) {
    return atomic_load(&t->held_until_ns) & NUMBER;
}

/* Return the bytes that all processes of the container brought in the slice of that number. */
static uint64_t bytes_of_slice(uint64_t advertised, uint64_t number) {
    return (advertised & NUMBER) == number ? advertised & ~NUMBER : 0;
}

/* ---- what is advertised ---------------------------------------------------------------------- */

static bool is_held(const struct gs_turn *t, uint64_t now, uint64_t length) {
    uint64_t until = atomic_load(&t->held_until_ns);
    return until > now && until <= now + length;
}

struct survey {
    uint64_t now, length, wants_since_ns;
    int dev;
    uint32_t number;
    bool held, earlier; /* of other containers; `earlier`: waited before `wants_since_ns` */
    uint64_t again_ns;  /* when the current slice may be over */
    unsigned others;    /* number that have or want the slice */
    uint8_t before_us[GS_MAX_PEERS]; /* per container: NOT_YET, BEFORE, HOLDS */
};
enum { NOT_YET, BEFORE, HOLDS };

/* Return 0 if the container has no slice, else when to check again. After its end a container has a
 * short time to move its memory back. */
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

static void survey_peer(const struct gs_turn *t, uint32_t number, void *arg) {
    struct survey *l = arg;
    uint64_t over = held_for(t, l->now, l->length), wants_since_ns = atomic_load(&t->wants_from_ns);
    uint64_t wants_until = atomic_load(&t->wants_until_ns);
    bool holds = over != 0;
    bool wants = wants_since_ns && wants_until > l->now && wants_until <= l->now + 2 * WANTED;
    bool earlier = wants && (wants_since_ns < l->wants_since_ns ||
                             (wants_since_ns == l->wants_since_ns && number < l->number));
    if (atomic_load_explicit(&doubted_until_ns[l->dev][number], memory_order_relaxed) > l->now)
        return;
    if (holds)
        l->again_ns = l->held ? min64(l->again_ns, over) : over;
    l->held |= holds;
    l->earlier |= earlier;
    l->others += holds || wants;
    l->before_us[number] = holds ? HOLDS : earlier ? BEFORE : NOT_YET;
}

static struct survey survey_peers(int dev, uint64_t wants_since_ns) {
    struct survey l = {.now = gs_compute_now(),
                       .length = slice_length_ns(),
                       .wants_since_ns = wants_since_ns,
                       .dev = dev};
    l.number = gs_region()->limits->device[dev].page;
    gs_activity_slices(dev, survey_peer, &l);
    return l;
}

/* ---- having the slice ------------------------------------------------------------------------ */

/* End that slice, unless it is no longer the last one. */
static void end_slice(struct gs_turn *own, uint64_t until) {
    atomic_compare_exchange_strong(&own->held_until_ns, &until, until & NUMBER);
}

static bool try_take(int dev, struct gs_turn *own, uint64_t now, uint64_t length) {
    uint64_t before = atomic_load(&own->held_until_ns);
    if (is_held(own, now, length)) /* another thread or process of this container was first */
        return true;
    uint64_t until = ((now + length) & ~NUMBER) | ((before + 1) & NUMBER);
    atomic_store(&own->used_ns, now);
    if (!atomic_compare_exchange_strong(&own->held_until_ns, &before, until))
        return is_held(own, now, length);
    atomic_store(&own->held_from_ns, now);
    atomic_thread_fence(memory_order_seq_cst);
    if (survey_peers(dev, now).held) {
        end_slice(own, until);
        return false;
    }
    atomic_store(&own->wants_from_ns, 0);
    return true;
}

static uint64_t generation(void) {
    return __atomic_load_n(&gs_region()->limits->generation, __ATOMIC_ACQUIRE);
}

/* Each container before this one has had time for its slice. A container that has the slice now, or
 * only waits for one, made a false claim or was blocked by one that did. Ignore it for a while. */
static void distrust_blockers(const struct survey *seen) {
    for (uint32_t i = 0; i < GS_MAX_PEERS; i++)
        if (seen->before_us[i] == (seen->held ? HOLDS : BEFORE))
            atomic_store(&doubted_until_ns[seen->dev][i], seen->now + DOUBTED * seen->length);
}

/* Return false if the slice was not free in the time in which it should have been. */
static bool wait_for_slice(int dev, struct gs_turn *own) {
    uint64_t since = gs_compute_now(), none = 0;
    unsigned others = 0;
    atomic_compare_exchange_strong(&own->wants_from_ns, &none, since);
    for (;;) {
        uint64_t now = gs_compute_now(), length = slice_length_ns();
        uint64_t wants_since_ns = atomic_load(&own->wants_from_ns);
        wants_since_ns = wants_since_ns ? wants_since_ns : since;
        atomic_store(&own->wants_until_ns, now + WANTED);
        atomic_thread_fence(memory_order_seq_cst);
        struct survey seen = survey_peers(dev, wants_since_ns);
        if (!length || is_held(own, now, length))
            return true;
        if (!seen.held && !seen.earlier && try_take(dev, own, now, length))
            return true;
        others = seen.others > others ? seen.others : others;
        if (now > since + (others + 1) * (length + idle_ns(length))) {
            distrust_blockers(&seen);
            return false;
        }
        uint64_t again = seen.held ? seen.again_ns : now;
        gs_compute_wait(again > now + CHECK_EVERY ? again : now + CHECK_EVERY, generation());
    }
}

/* Reserve a part of the free room for one allocation. Other processes of the container may reserve
 * theirs at the same time. */
static uint64_t take_room(int dev, uint64_t bytes) {
    struct gs_turn *own = gs_activity_slice(dev);
    uint64_t most = reserved_bytes(dev), seen = atomic_load(&own->brought_bytes), took, advertised;
    do {
        uint64_t number = number_of(own), used = bytes_of_slice(seen, number);
        took = used < most ? (most - used) & ~NUMBER : 0;
        took = took < bytes ? took : bytes;
        advertised = (used + gs_round_up(took, NUMBER + 1)) | number;
    } while (!atomic_compare_exchange_strong(&own->brought_bytes, &seen, advertised));
    atomic_fetch_add(&brought[dev], gs_round_up(took, NUMBER + 1));
    return took;
}

static void move_to_host(const struct gs_here *here, CUstream stream) {
    struct gs_turn *own = gs_activity_slice(here->dev);
    uint64_t number_plus_one = atomic_exchange(&brought_for[here->dev], 0), advertised, left;
    if (!number_plus_one)
        return;
    uint64_t bytes = atomic_exchange(&brought[here->dev], 0),
             seen = atomic_load(&own->brought_bytes);
    gs_virtual_move(here, stream, NULL);
    do {
        left = bytes_of_slice(seen, number_plus_one - 1);
        advertised = (left > bytes ? left - bytes : 0) | (seen & NUMBER);
    } while ((seen & NUMBER) == number_plus_one - 1 &&
             !atomic_compare_exchange_strong(&own->brought_bytes, &seen, advertised));
}

static void move_to_device(const struct gs_here *here, CUstream stream, struct gs_turn *own) {
    uint64_t number_plus_one = number_of(own) + 1, before = atomic_load(&brought_for[here->dev]);
    if (before == number_plus_one)
        return;
    /* The thread slept past the end of that slice: its memory there is not counted in this one. */
    if (before)
        move_to_host(here, stream);
    uint64_t none = 0;
    if (!atomic_compare_exchange_strong(&brought_for[here->dev], &none, number_plus_one))
        return; /* another thread moves it */
    atomic_store(&gs_slice_held, 1);
    gs_virtual_move(here, stream, take_room);
}

/* At its end, continue the slice if no other container wants one. */
static bool extend_slice(int dev, struct gs_turn *own, uint64_t now, uint64_t length) {
    uint64_t until = atomic_load(&own->held_until_ns);
    if (until <= NUMBER || survey_peers(dev, now).others)
        return false;
    uint64_t held = atomic_load(&own->used_ns),
             more = ((now + length) & ~NUMBER) | (until & NUMBER);
    return now < held + idle_ns(length) + length &&
           atomic_compare_exchange_strong(&own->held_until_ns, &until, more);
}

/* Return whether the slice is still this container's. After some time without use another container
 * may have taken it. */
static bool is_still_ours(int dev, struct gs_turn *own, uint64_t now, uint64_t length) {
    uint64_t used = atomic_load(&own->used_ns);
    if (!is_held(own, now, length) || used + idle_ns(length) <= now)
        return false;
    atomic_store(&own->used_ns, now);
    atomic_thread_fence(memory_order_seq_cst);
    return now < used + idle_ns(length) / 2 || !survey_peers(dev, now).held;
}

void gs_slice_admit(const struct gs_here *here, CUstream stream) {
    struct gs_turn *own = gs_activity_slice(here->dev);
    uint64_t until = atomic_load(&own->held_until_ns), now = gs_compute_now(),
             length = slice_length_ns();
    bool ours =
        is_still_ours(here->dev, own, now, length) || extend_slice(here->dev, own, now, length);
    if (!ours) {
        move_to_host(here, stream);
        /* Other processes of this container may still have memory there; the slice then ends
         * shortly after (held_for). */
        if (until > now || !bytes_of_slice(atomic_load(&own->brought_bytes), until & NUMBER))
            end_slice(own, until);
        ours = wait_for_slice(here->dev, own);
    }
    if (!ours)
        return;
    atomic_store(&own->used_ns, gs_compute_now());
    move_to_device(here, stream, own);
}

void gs_slice_waits(bool begins) {
    for (int dev = 0; dev < (int)GS_MAX_DEVICES; dev++) {
        struct gs_turn *own = atomic_load(&brought_for[dev]) ? gs_activity_slice(dev) : NULL;
        if (own)
            atomic_store(&own->used_ns, begins ? gs_compute_now() + LONGEST : gs_compute_now());
    }
}
