/* The rate limiter of docs/internals/limiter.md: decide which launch may go now. done.c detects
 * completed intervals, charge.c charges them, peers.c evaluates the activity of other contexts. */
#include <string.h>

#include "throttle_parts.h"

/* ---- launches -------------------------------------------------------------------------- */

static void renew_open(struct gs_throttle *t) {
    memset(&t->open, 0, sizeof(t->open));
    t->open.start_event = -1;
    t->number = t->number + 1 ? t->number + 1 : 1;
}

/* Start a new epoch: no launch counts any more without taking the slow path. */
static void next_epoch(struct gs_throttle *t) {
    uint32_t next = atomic_load(&t->epoch) + 1;
    atomic_store(&t->epoch, next ? next : 1);
}

static bool has_room(const struct gs_throttle *t) {
    return t->marked - t->charged < GS_SEGMENTS - 2;
}

/* Return whether an admitted launch has not reached its stream yet; a marker would be recorded in
 * front of it. After ON_ITS_WAY the launch is stuck in the driver, or its thread ended in there. */
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

/* Note the time now, just after the start event, and when the driver has the launch. */
static void expect_entry(const struct gs_throttle *t, struct gs_throttle_stream *s) {
    atomic_store(&s->entered_ns, 0);
    atomic_store(&s->launch_ns, t->env->now(t->env->arg));
}

/* If other streams had launches, they may have had work meanwhile. */
static void note_entry(struct gs_segment *open, struct gs_throttle_stream *s) {
    uint64_t launch = atomic_exchange(&s->launch_ns, 0), entered = atomic_load(&s->entered_ns);
    if (!open->many && launch && entered > launch) {
        open->launch_ns = launch;
        open->entered_ns = entered;
    }
}

/* Record markers in at most GS_STREAMS streams. Skip further streams, and streams with an admitted
 * launch that has not reached them. Return false if no marker could be recorded; the launches are
 * then measured by the next marker. */
static bool mark_some(struct gs_throttle *t, uint64_t now) {
    struct gs_segment *open = &t->open;
    struct gs_throttle_stream **at = &t->dirty, *s;
    bool underway = false;
    next_epoch(t);
    while ((s = *at) && open->n_events < GS_STREAMS) {
        if (is_underway(s, now)) {
            underway = true;
            at = &s->next_dirty;
            continue;
        }
        s->skipped_ns = 0;
        note_entry(open, s);
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
    renew_open(t);
    t->open.launches = t->open.many = t->dirty != NULL;
    t->open.opened_ns = opened_ns;
    return true;
}

/* Record markers and close the open interval. Without room for another interval the open one
 * continues. */
static void mark(struct gs_throttle *t, uint64_t now) {
    while (t->open.launches && !t->capturing && has_room(t) && mark_some(t, now))
        ;
}

static void not_single(struct gs_segment *segment) {
    if (segment->single && segment->n_functions)
        segment->function[0]->probing = false;
    segment->single = segment->probe = false;
}

static void note_launch(struct gs_throttle *t, struct gs_throttle_stream *s, struct gs_predictor *f,
                        int64_t ns) {
    not_single(&t->open); /* the first of two launches may still be on its way to its stream */
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

/* Return whether a waiting launch must be admitted because work on the device may be waiting for
 * it. */
static bool must_admit_stuck(struct gs_throttle *t, uint32_t stream, uint64_t now,
                             uint64_t *until) {
    uint64_t admitted = atomic_load(&t->bucket->admitted_ns);
    uint64_t since = max64(max64(atomic_load(&t->bucket->done_ns), admitted), t->waiting_since_ns);
    /* The launch would wait behind this interval anyway. */
    for (uint32_t i = t->finished; i != t->marked; i++) {
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
    /* Work that is expected to take long is no deadlock. A container in debt has already used its
     * part. */
    uint64_t tat = atomic_load(&t->bucket->tat_ns);
    uint64_t patience = STUCK + (uint64_t)t->in_flight_ns * t->contexts * 3 / 2;
    patience = max64(patience, min64(tat > now ? (tat - now) / 4 : 0, 2000 * MS));
    if (now >= since + patience)
        return atomic_compare_exchange_strong(&t->bucket->admitted_ns, &admitted, now);
    *until = min64(*until, since + patience);
    return false;
}

static bool no_peer_outranks(struct gs_throttle *t, uint64_t now) {
    struct gs_peer peer[MAX_PEERS];
    unsigned n = t->env->peers(t->env->arg, peer, MAX_PEERS);
    return !gs_throttle_company(t, peer, n, now - 2 * MS, now).outranked;
}

/* An unknown launch takes longer than PROBE: the next unknown launch waits until its duration is
 * known. A launch in another stream waits only for STUCK / 2, since the first may wait for it on
 * the device. */
static bool unknown_is_slow(const struct gs_throttle *t, uint32_t stream, uint64_t now) {
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
    uint64_t until = now + POLL, burst = max64(BURST + 2 * (uint64_t)ns, gs_turn_burst(t));
    int64_t most = gs_turn_window(t, now);
    int64_t window = known ? gs_throttle_most(f, ns, most, now) : most;
    /* While a capture is open, no launch can be seen to complete. Then pay only for the expected
     * work, and admit only as many launches as the measured ones justify. */
    bool sure = known || (!f->probing && !unknown_is_slow(t, stream, now));
    bool room = window < most && t->in_flight_ns > 0
                    ? t->in_flight_ns + *pay <= window
                    : t->in_flight_ns < (ns < most ? most : ns + 1);
    bool ready =
        t->capturing ? t->open.launches < gs_throttle_unmarked(f) : has_room(t) && sure && room;
    if (t->limit.mode == GS_THROTTLE_UNLIMITED)
        return 0;
    enum gs_why why = sure ? GS_WHY_ROOM : GS_WHY_UNKNOWN;
    if (ready) {
        bool own;
        until = gs_turn_admit(t, ns, *pay, now, &own);
        why = until ? GS_WHY_TURN : GS_WHY_BUCKET;
        if (!until && *pay > 0)
            until = gs_bucket_pay(t, *pay, burst, now, own);
    }
    if (until == 0)
        return 0;
    if (ready && t->limit.mode == GS_THROTTLE_SOFT && no_peer_outranks(t, now))
        return gs_bucket_pay(t, *pay, burst, now, true);
    if (!t->waiting_since_ns)
        t->waiting_since_ns = now;
    t->why = why;
    if (t->in_flight_ns > 0) /* until it is known what that work took */
        until = min64(until, now + max64(POLL, (uint64_t)t->in_flight_ns / 2));
    until = min64(until, gs_throttle_next_probe(t, now));
    if (must_admit_stuck(t, stream, now, &until)) {
        *pay = ns - atomic_load(&t->allowance_ns); /* only this one launch */
        return *pay > 0 ? gs_bucket_pay(t, *pay, burst, now, true) : 0;
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
            gs_bucket_give_back(t, gs_throttle_most(f, ns, t->quantum_ns, 0), UINT64_MAX - DEBT);
        atomic_fetch_sub(&t->allowance_ns, ns);
        note_launch(t, s, f, ns);
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
    bool outlier = known && !unlimited && gs_throttle_is_daring(f, ns, now);
    quantum = gs_throttle_quantum(t, f, ns, now);
    int64_t had = atomic_load(&t->allowance_ns);
    pay = had >= ns ? 0 : (ns > quantum ? ns : quantum) - had;
    uint64_t until = wait_for(t, s->id, f, ns, known, &pay, now);
    if (until)
        return until;
    if (t->waiting_since_ns) {
        atomic_fetch_add(&t->bucket->waited_ns, now - t->waiting_since_ns);
        t->traced_wait_ns += now - t->waiting_since_ns;
        t->waiting_since_ns = 0;
    }
    bool idle = t->marked == t->finished;
    t->burst_ns += pay > 0 ? pay : 0;
    t->burst_until_ns = now + (uint64_t)(t->in_flight_ns + (pay > 0 ? pay : 0));
    if ((idle || s->waited) && !t->open.launches && !t->capturing) {
        t->open.idle = t->others_ppm && !s->waited && t->env->idle(t->env->arg, s->id);
        t->open.start_event = t->env->mark(t->env->arg, s->id);
        t->open.waited = s->waited && t->open.start_event >= 0;
        if (t->open.start_event >= 0)
            expect_entry(t, s);
        t->busy_from_ns = idle ? now : t->busy_from_ns;
    }
    s->waited = false;
    if (!t->open.launches)
        t->open.opened_ns = now;
    t->open.blind |= t->capturing;
    atomic_fetch_add(&t->allowance_ns, (pay > 0 ? pay : 0) - ns);
    note_launch(t, s, f, ns);
    bool single = t->open.launches == 1 && t->dirty == s && !s->next_dirty && has_room(t);
    bool measure_single = t->sparse && (t->open.start_event >= 0 || (behind && !unlimited));
    if (single && !t->capturing && (!known || outlier || measure_single)) {
        s->mark = t->open.single = true;
        if (t->open.start_event < 0)
            expect_entry(t, s);
        t->open.probe = f->probing = !known;
    }
    gs_throttle_publish(t, NULL, now);
    return 0;
}

/* A launch that was marked alone was refused, so its interval measures nothing about its function.
 * Another thread may have closed that interval already. */
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

void gs_throttle_waits(struct gs_throttle *t, struct gs_throttle_stream *s) {
    if (t->limit.mode == GS_THROTTLE_UNLIMITED && t->contexts == 1)
        return;
    if (s->dirty)
        gs_throttle_launched(t);
    s->waited = !s->dirty; /* else the wait is within an interval and counts as busy */
}

void gs_throttle_sync_begin(struct gs_throttle *t) {
    int64_t work = 0;
    for (const struct gs_throttle_stream *s = t->dirty; s; s = s->next_dirty)
        work += atomic_load(&((struct gs_throttle_stream *)s)->work_ns);
    /* The expectation of irregular kernels fluctuates, so mark them earlier. */
    if (t->capturing || !work ||
        (t->contexts == 1 && work < (gs_throttle_even(t->open.function[0]) ? TAIL : TAIL / 4)))
        return;
    uint64_t now = t->env->now(t->env->arg);
    mark(t, now);
    int64_t unused = atomic_load(&t->allowance_ns);
    t->burst_ns -= unused > 0 ? (int64_t)min64((uint64_t)t->burst_ns, (uint64_t)unused) : 0;
    gs_bucket_give_back(t, 0, now);
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
    next_epoch(t);
    renew_open(t);
}

void gs_predictor_init(struct gs_predictor *f) {
    memset(f, 0, sizeof(*f));
    atomic_store(&f->ns, GS_UNKNOWN);
    f->moment[0] = f->moment[1] = 1;
}
