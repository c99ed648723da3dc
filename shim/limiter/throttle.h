/* The rate limiter for compute: when a launch may go, and what it is charged.
 * docs/internals/limiter.md describes the scheme.
 *
 * It is a state machine. Clock, device, shared memory and peers are passed in, it has no globals
 * and never blocks, so the same code runs in virtual time (tests/limiter). All times are wall-clock
 * nanoseconds of one clock that all containers share; all work is in device nanoseconds.
 *
 * The caller, per launch of one context:
 *
 *     if (!gs_remembered_passes(...))                  launch.h: some instructions, no clock
 *         while ((until = gs_throttle_slow(t, s, f)))  one thread at a time (the caller's lock)
 *             wait until `until`, or until limits change
 *     the real launch
 *     gs_throttle_went(s)                             no lock; only after the slow path
 *     if (s->mark) gs_throttle_launched(t)            under the same lock
 *
 * gs_throttle_sync_begin before the program's own blocking calls, gs_throttle_sync_end after.
 */
#ifndef GPUSHARE_THROTTLE_H
#define GPUSHARE_THROTTLE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "include/gpushare_abi.h" /* struct gs_bucket, gs_page, gs_activity, gs_run */

/* ---- input ------------------------------------------------------------------------------ */

enum gs_throttle_mode {
    GS_THROTTLE_HARD,
    GS_THROTTLE_SOFT,      /* may also use what other containers leave idle */
    GS_THROTTLE_UNLIMITED, /* never delayed; only publishes its activity */
};

struct gs_throttle_limit {
    uint32_t ppm; /* millionths of the device, 1..1000000 */
    uint32_t priority;
    enum gs_throttle_mode mode;
};

/* Maximum in millionths of the device. Without a hard limit a container may also use idle time. */
static inline uint32_t gs_throttle_may_have(const struct gs_throttle_limit *granted) {
    return granted->mode == GS_THROTTLE_HARD ? granted->ppm : 1000000;
}

struct gs_peer {
    const struct gs_activity *activity; /* a copy; its content is not trusted */
    uint32_t container;                 /* from the place of its file, not from its content */
    struct gs_throttle_limit granted;   /* from the index, which only the host writes */
};

/* The turn that another container advertises. */
struct gs_turn_of {
    struct gs_compute_turn turn; /* a copy; its content is not trusted */
    uint32_t container;
    struct gs_throttle_limit granted;
};

/* Reasons for which a launch waits. */
enum gs_why { GS_WHY_NOT, GS_WHY_BUCKET, GS_WHY_TURN, GS_WHY_ROOM, GS_WHY_UNKNOWN, GS_WHYS };

/* Why an interval was charged so much: one record for each, in the order of charges. */
struct gs_trace {
    uint64_t start_ns, end_ns, away_ns; /* measured; away: without the device, by probe events */
    int64_t expected_ns, own_ns, switch_ns, charged_ns;
    uint32_t launches, preemptions, others; /* others: contexts with work meanwhile */
    bool single, sure;
    bool in_turn;          /* the last launch was in the own turn */
    uint64_t until_due_ns; /* how far the bucket was from the next launch; 0: it is due */
    uint64_t waited_ns;    /* since the last record, by launches */
    enum gs_why why;       /* why the last of them waited */
};

struct gs_throttle_env {
    void *arg;
    uint64_t (*now)(void *arg);
    /* Record a timing event at the end of `stream`, or in a stream of the shim (GS_LOOKS). Return
     * its number, or -1. Never called while capturing. */
    int (*mark)(void *arg, uint32_t stream);
    /* Return whether the event has completed, with its timestamp. Never called again after true. */
    bool (*done)(void *arg, int event, uint64_t *stamp_ns);
    /* Copy the activity of the other contexts on this device; at most `max`. */
    unsigned (*peers)(void *arg, struct gs_peer *out, unsigned max);
    /* Return whether the stream is empty. */
    bool (*idle)(void *arg, uint32_t stream);
    /* Return the sum of the grants of all other containers on this device, active or not. */
    uint32_t (*others_ppm)(void *arg);
    /* Copy what the other containers on this device advertise about their turns; at most `max`. */
    unsigned (*turns)(void *arg, struct gs_turn_of *out, unsigned max);
    /* NULL, or called for each interval that is charged. */
    void (*trace)(void *arg, const struct gs_trace *trace);
};

#define GS_LOOKS UINT32_MAX

/* ---- one context of one process ----------------------------------------------------------- */

/* The expected duration of a launch: of a function with a grid, or of a graph. */
struct gs_predictor {
    _Atomic int64_t ns; /* GS_UNKNOWN before the first measurement */
    uint32_t noted;     /* number of the interval that lists it */
    uint32_t samples;
    int64_t single_ns; /* of a launch that was measured alone */
    bool probing;
    float moment[2];    /* weighted means of measured/expected and of its square */
    int64_t longest_ns; /* longest recent launch: trust.c */
    uint64_t longest_at_ns;
    uint32_t seen; /* measured launches */
};
#define GS_UNKNOWN (INT64_MAX / 4)

struct gs_throttle_stream {
    uint32_t id;
    bool mark;                 /* call gs_throttle_launched after this launch */
    bool dirty;                /* has launches in the open interval */
    _Atomic int64_t work_ns;   /* expected work launched since the last marker */
    _Atomic uint32_t underway; /* launches that were admitted and are not in the stream yet */
    uint64_t skipped_ns;       /* since when it could not be marked */
    _Atomic uint64_t launch_ns,
        entered_ns; /* of the launch after a start event; 0: no such launch */
    bool waited;    /* it has waited for another context or the host since its last marker */
    struct gs_throttle_stream *next_dirty;
};

/* Device time that another container reported in excess of its grant. */
struct gs_claim {
    uint64_t at_ns;
    int64_t excess_ns;
    int32_t early, late; /* shares of hand-overs from it that took less than nothing, and long */
    bool ignored;        /* until the excess is 0 again */
};

#define GS_SEGMENTS 32u
#define GS_STREAMS 16u /* streams that are marked one by one in an interval */
#define GS_FUNCTIONS 8u

/* An accounting interval: the launches between two rounds of markers. */
struct gs_segment {
    int start_event; /* -1: the device was already busy with this context */
    uint64_t start_ns, end_ns;
    int event[GS_STREAMS];
    uint32_t n_events, n_marked, n_functions, launches;
    struct gs_predictor *function[GS_FUNCTIONS];
    int64_t expected_ns[GS_FUNCTIONS]; /* of one launch of each function */
    int64_t work_ns, hint_ns;
    uint64_t opened_ns, marked_ns;  /* host time */
    uint64_t launch_ns, entered_ns; /* host time before and after its first launch, if noted */
    bool clean;                     /* the device had work of this context from start to end */
    bool single;                    /* one launch on an idle device, marked before and after */
    bool probe;                     /* its only function was unknown */
    bool sure;                      /* the device was busy all the time; known once it is charged */
    bool blind;                     /* a capture was open during the interval */
    bool waited;                    /* its stream waited before it, up to start_event */
    bool idle; /* its stream was empty, so it did not wait for work of this context */
    bool many; /* launches in several streams, else: */
    uint32_t stream;
    uint64_t recorded_ns; /* host time when all markers were recorded; 0: there is one marker */
    uint64_t before_ns;   /* end of the previous interval */
    bool sighted;         /* probe.c covered all of it, and found: */
    uint32_t preemptions;
    int64_t away_ns; /* their total duration */
};

/* Switches differ in whether the context that had the device before still has work. */
enum gs_switch { GS_HANDOVER, GS_PREEMPTION, GS_SWITCHES };

/* The cost of a switch: the mean that all containers measured, `found_ns` of it by this context. */
struct gs_switch_cost {
    uint32_t found_ns, finds, ns;
};

struct gs_throttle {
    /* Read by every launch; first, so that the address needs no register of its own. */
    _Atomic int64_t allowance_ns; /* expected work that is paid and not launched yet */
    _Atomic uint32_t epoch;       /* changes when streams are marked, never 0 */

    const struct gs_throttle_env *env;
    struct gs_throttle_limit limit; /* may change at any time, through gs_throttle_set_limit */
    struct gs_bucket *bucket;
    struct gs_page *page;
    uint32_t container;
    uint32_t switch_ns; /* of each kind of switch, until it is learned: configured */
    struct gs_switch_cost cost[GS_SWITCHES];
    int64_t lag_ns; /* of timestamps of start events behind the host's clock, on average */
    bool lag_known;
    uint32_t early_ns; /* how far timestamps are before the host's clock at most */
    uint32_t slice_ns;
    uint32_t marker_ns; /* device time of one event */
    bool capturing;     /* no event is recorded or queried */

    struct gs_throttle_stream *dirty;
    struct gs_segment open;                 /* current launches; marked at the next slow path */
    struct gs_segment segment[GS_SEGMENTS]; /* marked: [charged, marked) */
    uint32_t charged, finished, marked;     /* counters; finished: all events have completed */
    uint32_t number;                        /* of the open interval, never 0 */
    int64_t quantum_ns;                     /* advance payment, at most */
    int64_t in_flight_ns;                   /* expected work that is not known to have completed */
    uint64_t covered_ns;                    /* device time up to here belongs to an interval */
    uint64_t busy_from_ns, told_until_ns;
    uint32_t rate_ppm;   /* the rate that the limit gives now */
    uint32_t others_ppm; /* granted to other containers */
    uint32_t contexts;   /* with work on the device, including this one, at the last check */
    bool peers_hidden;   /* what some container does cannot be read: `peers` sets it */
    struct gs_claim claim[GS_MAX_PEERS];
    uint64_t heard_ns;             /* claims.c */
    uint64_t slice_from_ns;        /* start of the current slice of this context */
    uint32_t sparse;               /* launches that will be marked one by one */
    uint32_t markers;              /* of the last interval */
    int64_t ignore_ns, backoff_ns; /* doubtful time until the next probe, and after it */
    bool doubtful;                 /* the last interval may have had idle time */
    uint32_t random;
    int64_t looked_ns[2]; /* of doubtful intervals: measured, expected */
    uint64_t waiting_since_ns;
    uint64_t traced_wait_ns; /* waits since the last trace record */
    enum gs_why why;         /* why the last launch waited */
    int look_event;          /* the pending probe event, or -1; probe.c */
    uint64_t look_ns, sign_ns,
        sight_ns;       /* time of the probe; last sign of this context; since when without a gap */
    uint64_t prompt_ns; /* completion of the last probe that was not late */
    uint64_t late_ns;   /* completion of the last late probe */
    uint32_t tied;      /* late probes that completed together with work of this context */
    bool tiny;          /* launches in many streams, so short that the device idles between them */
    uint64_t told_ns;   /* device use is published up to here */

    struct gs_compute_turn *turn;    /* what this container advertises; NULL: it takes no turns */
    uint64_t round_ns;               /* of the turns of all containers; 0: no turns */
    uint32_t rivals;                 /* contexts of others that used the device lately */
    uint32_t siblings;               /* contexts of this container that did, besides this one */
    int64_t burst_ns, burst_mean_ns; /* work since this container rested */
    uint64_t burst_until_ns;         /* when the last of it is expected to be over */
    uint64_t turn_work_until_ns;     /* expected end of all work, without the gap until the next */
    uint64_t turn_launched_ns, stepped_back_ns, free_until_ns, cut_in_at_ns;
    int64_t lost_ns; /* of turns: what the container got less than three quarters of them */
    uint32_t steps_back;
    bool in_turn; /* the last launch was within the own turn */
    uint64_t surveyed_ns, held_until_ns, cuts_until_ns;
    int64_t held_ns; /* by the turns of all others, in excess of what the own limit leaves them */
};

void gs_throttle_init(struct gs_throttle *t, const struct gs_throttle_env *env,
                      struct gs_bucket *bucket, struct gs_page *page, uint32_t container);
/* Charge the device time of a process of this container that died, `a` being its last report: from
 * its last known time until its death was found, and no more than it reported. */
void gs_throttle_inherit(struct gs_throttle *t, const struct gs_activity *a, uint64_t now);
void gs_predictor_init(struct gs_predictor *f);
/* Return 0: launch now; otherwise the time to ask again. */
uint64_t gs_throttle_slow(struct gs_throttle *t, struct gs_throttle_stream *s,
                          struct gs_predictor *f);
void gs_throttle_launched(struct gs_throttle *t);
/* The driver has returned from a launch, at host time `now`; call before gs_throttle_went. Needed
 * only if `s->launch_ns` is not 0. */
static inline void gs_throttle_entered(struct gs_throttle_stream *s, uint64_t now) {
    uint64_t none = 0;
    atomic_compare_exchange_strong(&s->entered_ns, &none, now);
}
/* Called instead of it if the device refused the launch. */
void gs_throttle_refused(struct gs_throttle *t, struct gs_predictor *f);
/* The launch is in its stream, or was refused. Until then, for 5 ms at most, that stream is not
 * marked: the marker would be before the launch. A stream that was forgotten meanwhile has none. */
static inline void gs_throttle_went(struct gs_throttle_stream *s) {
    uint32_t n = atomic_load(&s->underway);
    while (n && !atomic_compare_exchange_weak(&s->underway, &n, n - 1))
        ;
}
/* The next work in the stream waits for something other than work of this context: a host function,
 * a value, another context. */
void gs_throttle_waits(struct gs_throttle *t, struct gs_throttle_stream *s);
void gs_throttle_sync_begin(struct gs_throttle *t);
void gs_throttle_sync_end(struct gs_throttle *t);

/* Return whether the open interval counts the launches of `f` in `s`. It does until `t->turn` (the
 * epoch) changes: a caller that has asked under the lock compares the epoch from then on. */
static inline bool gs_throttle_counts(const struct gs_throttle *t,
                                      const struct gs_throttle_stream *s,
                                      const struct gs_predictor *f) {
    return s->dirty && f->noted == t->number;
}

/* Return whether a launch is paid for; a launch of an unknown function never is. */
static inline bool gs_throttle_covers(int64_t had_ns, int64_t ns) {
    return __builtin_expect(had_ns >= ns, 1);
}
static inline int64_t gs_throttle_allowance(const struct gs_throttle *t) {
    return atomic_load_explicit(&t->allowance_ns, memory_order_relaxed);
}
static inline int64_t gs_throttle_expects(const struct gs_predictor *f) {
    return atomic_load_explicit(&f->ns, memory_order_relaxed);
}

/* Compares the rest with 0, not the allowance with `ns`: on x86-64 that is a flag of the
 * subtraction. */
static inline bool gs_throttle_pay(struct gs_throttle *t, struct gs_throttle_stream *s,
                                   int64_t ns) {
    if (__builtin_expect(
            atomic_fetch_sub_explicit(&t->allowance_ns, ns, memory_order_relaxed) - ns < 0, 0)) {
        atomic_fetch_add_explicit(&t->allowance_ns, ns, memory_order_relaxed);
        return false; /* another thread was first */
    }
    atomic_fetch_add_explicit(&s->work_ns, ns, memory_order_relaxed);
    return true;
}

#endif
