/* The law of docs/compute.md: who may go. What has finished is in done.c, what it is
 * charged in charge.c, what others say they did in peers.c. */
#include <string.h>

#include "throttle_parts.h"

/* ---- the bucket ------------------------------------------------------------------------ */

#define MOST_WALL 1e18 /* 30 years: hours of a millionth of the device are more than fits */
static int64_t wall(const struct gs_throttle *t, int64_t device_ns) {
    double ns = (double)device_ns * 1e6 / t->rate_ppm;
    return (int64_t)(ns > MOST_WALL ? MOST_WALL : ns < -MOST_WALL ? -MOST_WALL : ns);
}

/* Add to the arrival time what was wrong with the payment; never a debt longer than DEBT. */
void gs_throttle_adjust(struct gs_throttle *t, int64_t device_ns, uint64_t now) {
    uint64_t tat = atomic_load(&t->bucket->tat_ns), next;
    int64_t by = wall(t, device_ns);
    do {
        next = by < 0 && tat < (uint64_t)-by ? 0 : tat + (uint64_t)by;
        next = min64(next, now + DEBT);
    } while (!atomic_compare_exchange_weak(&t->bucket->tat_ns, &tat, next));
}

/* Pay for `device_ns`. 0, or the time when it can be paid; `anyway` makes a debt. */
static uint64_t take(struct gs_throttle *t, int64_t device_ns, int64_t longest_ns, uint64_t now,
                     bool anyway) {
    uint64_t tat = atomic_load(&t->bucket->tat_ns), next;
    uint64_t burst = BURST + 2 * (uint64_t)longest_ns;
    do {
        /* Later is nonsense, written by the container itself. */
        uint64_t from = tat > now + DEBT ? now : tat;
        if (from > now && !anyway)
            return from;
        next = max64(from, now > burst ? now - burst : 0) + (uint64_t)wall(t, device_ns);
        next = min64(next, now + DEBT);
    } while (!atomic_compare_exchange_weak(&t->bucket->tat_ns, &tat, next));
    return 0;
}

/* ---- launches -------------------------------------------------------------------------- */

static void renew(struct gs_throttle *t) {
    memset(&t->open, 0, sizeof(t->open));
    t->open.start_event = -1;
    t->number = t->number + 1 ? t->number + 1 : 1;
}

/* No launch counts any more without asking. */
static void next_turn(struct gs_throttle *t) {
    uint32_t next = atomic_load(&t->turn) + 1;
    atomic_store(&t->turn, next ? next : 1);
}

static bool has_room(const struct gs_throttle *t) {
    return t->marked - t->charged < GS_SEGMENTS - 2;
}

/* A launch is on its way into the stream: a marker would be in front of it. One that takes longer
 * is stuck in the driver, or its thread has ended in there. */
static bool is_underway(struct gs_throttle_stream *s, uint64_t now) {
    if (!atomic_load(&s->underway))
        return false;
    if (!s->skipped_ns)
        s->skipped_ns = now;
    if (now - s->skipped_ns < ON_ITS_WAY)
        return true;
    atomic_store(&s->underway, 0);
    return false;
}

/* Of at most GS_STREAMS streams; the others are left, and those with a launch that is not in them
 * yet. False: nothing could be recorded, so that the next marker is to say what the launches took.
 */
static bool mark_some(struct gs_throttle *t, uint64_t now) {
    struct gs_segment *open = &t->open;
    struct gs_throttle_stream **at = &t->dirty, *s;
    bool underway = false;
    next_turn(t);
    while ((s = *at) && open->n_events < GS_STREAMS) {
        if (is_underway(s, now)) {
            underway = true;
            at = &s->next_dirty;
            continue;
        }
        s->skipped_ns = 0;
        open->work_ns += atomic_exchange(&s->work_ns, 0);
        int event = t->env->mark(t->env->arg, s->id);
        if (event >= 0)
            open->event[open->n_events++] = event;
        SHOW(*at, s->next_dirty);
        s->dirty = false;
    }
    if (!open->n_events && underway)
        return false;
    if (!open->n_events)
        return open->single = open->probe = false;
    open->marked_ns = now;
    open->recorded_ns = open->n_events > 1 ? t->env->now(t->env->arg) : 0;
    t->markers = open->n_marked = open->n_events;
    t->tiny = open->n_marked > 1 && open->expected_ns[0] < TINY;
    open->clean = open->single && open->start_event >= 0;
    t->segment[t->marked % GS_SEGMENTS] = *open;
    SHOW(t->marked, t->marked + 1);
    t->in_flight_ns += open->work_ns;
    uint64_t opened_ns = open->opened_ns;
    renew(t);
    t->open.launches = t->open.many = t->dirty != NULL;
    t->open.opened_ns = opened_ns;
    return true;
}

/* Without room for another segment the open one goes on. */
static void mark(struct gs_throttle *t, uint64_t now) {
    while (t->open.launches && !t->capturing && has_room(t) && mark_some(t, now))
        ;
}

static void not_single(struct gs_segment *segment) {
    if (segment->single && segment->n_functions)
        segment->function[0]->probing = false;
    segment->single = segment->probe = false;
}

static void note(struct gs_throttle *t, struct gs_throttle_stream *s, struct gs_predictor *f,
                 int64_t ns) {
    not_single(&t->open); /* the first of two that is still on its way */
    t->open.many |= t->open.launches && t->open.stream != s->id;
    t->open.stream = s->id;
    atomic_fetch_add(&s->underway, 1);
    if (!s->dirty) {
        s->dirty = true;
        s->next_dirty = t->dirty;
        SHOW(t->dirty, s);
    }
    if (f->noted != t->number && t->open.n_functions < GS_FUNCTIONS) {
        t->open.expected_ns[t->open.n_functions] = ns;
        t->open.function[t->open.n_functions++] = f;
        f->noted = t->number;
    }
    t->open.launches += t->open.launches < UINT32_MAX;
    t->open.hint_ns += ns;
    atomic_fetch_add(&s->work_ns, ns);
}

/* True when a launch that waits must be let through: it may be what the device waits for. */
static bool stuck(struct gs_throttle *t, uint32_t stream, uint64_t now, uint64_t *until) {
    uint64_t admitted = atomic_load(&t->bucket->admitted_ns);
    uint64_t since = max64(max64(atomic_load(&t->bucket->done_ns), admitted), t->waiting_since_ns);
    for (uint32_t i = t->finished; i != t->marked; i++) { /* behind that it would wait anyway */
        struct gs_segment *segment = &t->segment[i % GS_SEGMENTS];
        if (segment->single && segment->stream == stream &&
            (t->capturing || !gs_throttle_events_done(t, segment)))
            return false;
    }
    if (t->in_flight_ns <= 0) {
        struct gs_peer peer[MAX_PEERS];
        unsigned n = t->env->peers(t->env->arg, peer, MAX_PEERS), i = 0;
        while (i < n && !(peer[i].container == t->container && peer[i].activity->busy_from_ns &&
                          peer[i].activity->busy_until_ns > now))
            i++;
        if (i == n)
            return false;
    }
    /* Work that is expected to take long is no deadlock; what is in debt has had its part. */
    uint64_t tat = atomic_load(&t->bucket->tat_ns);
    uint64_t patience = STUCK + (uint64_t)t->in_flight_ns * t->contexts * 3 / 2;
    patience = max64(patience, min64(tat > now ? (tat - now) / 4 : 0, 2000 * MS));
    if (now >= since + patience)
        return atomic_compare_exchange_strong(&t->bucket->admitted_ns, &admitted, now);
    *until = min64(*until, since + patience);
    return false;
}

static bool alone(struct gs_throttle *t, uint64_t now) {
    struct gs_peer peer[MAX_PEERS];
    unsigned n = t->env->peers(t->env->arg, peer, MAX_PEERS);
    struct company c = gs_throttle_company(t, peer, n, now - 2 * MS, now);
    return !c.outranked;
}

/* A launch of something unknown is not done soon: the next unknown one waits for what it was. In
 * another stream only for a while, since the one may wait for the other on the device. */
static bool unsure(const struct gs_throttle *t, uint32_t stream, uint64_t now) {
    for (uint32_t i = t->charged; i != t->marked; i++) {
        const struct gs_segment *segment = &t->segment[i % GS_SEGMENTS];
        if (segment->probe && segment->marked_ns + PROBE < now &&
            (segment->stream == stream || now < segment->marked_ns + STUCK / 2))
            return true;
    }
    return false;
}

static uint64_t wait_for(struct gs_throttle *t, uint32_t stream, struct gs_predictor *f, int64_t ns,
                         bool known, int64_t *pay, uint64_t now) {
    uint64_t until = now + POLL;
    int64_t window = known ? gs_throttle_most(f, ns, WINDOW, now) : WINDOW;
    /* While capturing nothing can be seen to finish: what is expected is paid for, no more, and so
     * many launches go as were shown to be short. */
    bool sure = known || (!f->probing && !unsure(t, stream, now));
    bool room = window < WINDOW && t->in_flight_ns > 0
                    ? t->in_flight_ns + *pay <= window
                    : t->in_flight_ns < (ns < WINDOW ? WINDOW : ns + 1);
    bool ready =
        t->capturing ? t->open.launches < gs_throttle_unmarked(f) : has_room(t) && sure && room;
    if (t->limit.mode == GS_THROTTLE_UNLIMITED)
        return 0;
    if (ready)
        until = *pay <= 0 ? 0 : take(t, *pay, ns, now, false);
    if (until == 0)
        return 0;
    if (ready && t->limit.mode == GS_THROTTLE_SOFT && alone(t, now))
        return take(t, *pay, ns, now, true);
    if (!t->waiting_since_ns)
        t->waiting_since_ns = now;
    if (t->in_flight_ns > 0) /* the others wait to hear what it was */
        until = min64(until, now + max64(POLL, (uint64_t)t->in_flight_ns / 2));
    until = min64(until, gs_throttle_next_probe(t, now));
    if (stuck(t, stream, now, &until)) {
        *pay = ns - atomic_load(&t->allowance_ns); /* one launch, and no more */
        return *pay > 0 ? take(t, *pay, ns, now, true) : 0;
    }
    return until;
}

uint64_t gs_throttle_slow(struct gs_throttle *t, struct gs_throttle_stream *s,
                          struct gs_predictor *f) {
    int64_t ns = atomic_load(&f->ns), quantum, pay;
    bool known = ns != GS_UNKNOWN;
    if (!known)
        ns = gs_throttle_unknown(t);
    s->mark = false;
    bool unlimited = t->limit.mode == GS_THROTTLE_UNLIMITED;
    bool blind = t->open.blind || t->capturing;
    if (known && t->open.launches && !s->waited && !blind && atomic_load(&t->allowance_ns) >= ns) {
        if (!unlimited)
            gs_throttle_give_back(t, gs_throttle_most(f, ns, QUANTUM, 0), UINT64_MAX - DEBT);
        atomic_fetch_sub(&t->allowance_ns, ns);
        note(t, s, f, ns);
        return 0;
    }
    uint64_t now = t->env->now(t->env->arg);
    uint32_t marked = t->marked;
    if (!t->capturing) {
        gs_throttle_poll(t, now);
        mark(t, now);
        gs_throttle_probe(t, now);
    }
    bool behind = t->marked == t->finished + 1 && t->marked != marked && t->markers == 1;
    bool daring = known && !unlimited && gs_throttle_is_daring(f, ns, now);
    quantum = gs_throttle_quantum(t, f, ns, now);
    pay = (ns > quantum ? ns : quantum) - atomic_load(&t->allowance_ns);
    if (atomic_load(&t->allowance_ns) >= ns)
        pay = 0;
    uint64_t until = wait_for(t, s->id, f, ns, known, &pay, now);
    if (until)
        return until;
    if (t->waiting_since_ns) {
        atomic_fetch_add(&t->bucket->waited_ns, now - t->waiting_since_ns);
        t->waiting_since_ns = 0;
    }
    bool idle = t->marked == t->finished;
    if ((idle || s->waited) && !t->open.launches && !t->capturing) {
        t->open.idle = t->others_ppm && !s->waited && t->env->idle(t->env->arg, s->id);
        t->open.start_event = t->env->mark(t->env->arg, s->id);
        t->open.waited = s->waited && t->open.start_event >= 0;
        t->busy_from_ns = idle ? now : t->busy_from_ns;
    }
    s->waited = false;
    if (!t->open.launches)
        t->open.opened_ns = now;
    t->open.blind |= t->capturing;
    atomic_fetch_add(&t->allowance_ns, (pay > 0 ? pay : 0) - ns);
    note(t, s, f, ns);
    bool single = t->open.launches == 1 && t->dirty == s && !s->next_dirty && has_room(t);
    bool looked_at = t->sparse && (t->open.start_event >= 0 || (behind && !unlimited));
    if (single && !t->capturing && (!known || daring || looked_at)) {
        s->mark = t->open.single = true;
        t->open.probe = f->probing = !known;
    }
    gs_throttle_publish(t, NULL, now);
    return 0;
}

/* What was to be looked at alone says nothing of its function. Another thread may have marked it.
 */
void gs_throttle_refused(struct gs_throttle *t, struct gs_predictor *f) {
    struct gs_segment *segment = &t->open;
    for (uint32_t i = t->marked;
         i != t->charged && !(segment->single && segment->function[0] == f);)
        segment = &t->segment[--i % GS_SEGMENTS];
    f->probing = false;
    if (!segment->single || segment->function[0] != f)
        return;
    segment->single = segment->probe = false;
    segment->function[0] = NULL;
    segment->n_functions = 0;
}

void gs_throttle_launched(struct gs_throttle *t) {
    mark(t, t->env->now(t->env->arg));
}

void gs_throttle_sync_begin(struct gs_throttle *t) {
    int64_t work = 0;
    for (const struct gs_throttle_stream *s = t->dirty; s; s = s->next_dirty)
        work += atomic_load(&((struct gs_throttle_stream *)s)->work_ns);
    /* What is expected of irregular kernels wanders. */
    if (t->capturing || !work ||
        (t->contexts == 1 && work < (gs_throttle_even(t->open.function[0]) ? TAIL : TAIL / 4)))
        return;
    uint64_t now = t->env->now(t->env->arg);
    mark(t, now);
    gs_throttle_give_back(t, 0, now);
    gs_throttle_publish(t, NULL, now);
}

void gs_throttle_sync_end(struct gs_throttle *t) {
    if (!t->capturing && t->marked != t->finished)
        gs_throttle_poll(t, t->env->now(t->env->arg));
}

void gs_throttle_init(struct gs_throttle *t, const struct gs_throttle_env *env,
                      struct gs_bucket *bucket, struct gs_page *page, uint32_t container) {
    memset(t, 0, sizeof(*t));
    t->env = env;
    t->bucket = bucket;
    t->page = page;
    t->container = container;
    t->look_event = -1;
    t->slice_ns = 2 * (uint32_t)MS;
    t->switch_ns = 125 * (uint32_t)US;
    t->marker_ns = (uint32_t)US;
    t->limit.ppm = t->rate_ppm = 1000000;
    t->contexts = t->random = 1;
    next_turn(t);
    renew(t);
}

void gs_predictor_init(struct gs_predictor *f) {
    memset(f, 0, sizeof(*f));
    atomic_store(&f->ns, GS_UNKNOWN);
    f->moment[0] = f->moment[1] = 1;
}
