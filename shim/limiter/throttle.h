/* Compute limits: who may launch when, and what it is charged. docs/compute.md has the law.
 *
 * A state machine: clock, device, shared memory and peers are given to it, it has no globals and
 * never waits, so that the very same code runs in virtual time (tests/limiter). All times are
 * wall nanoseconds of one clock that all containers share; all work is device nanoseconds.
 *
 * The caller, per launch of one context:
 *
 *     if (!gs_throttle_try(t, s, f))                  a few instructions, no clock
 *         while ((until = gs_throttle_slow(t, s, f)))  one thread at a time (the caller's lock)
 *             wait until `until`, or until limits change
 *     the real launch
 *     gs_throttle_went(s)                             no lock; if it asked
 *     if (s->mark) gs_throttle_launched(t)            under that lock
 *
 * gs_throttle_sync_begin before the program's own blocking calls, gs_throttle_sync_end after.
 */
#ifndef GPUSHARE_THROTTLE_H
#define GPUSHARE_THROTTLE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "include/gpushare_abi.h" /* struct gs_bucket, gs_page, gs_activity, gs_run */

/* ---- what is given -------------------------------------------------------------------- */

enum gs_throttle_mode {
    GS_THROTTLE_HARD,
    GS_THROTTLE_SOFT,      /* what others leave idle is free */
    GS_THROTTLE_UNLIMITED, /* never waits, publishes */
};

struct gs_throttle_limit {
    uint32_t ppm; /* of the device, 1..1000000 */
    uint32_t weight, priority;
    enum gs_throttle_mode mode;
};

/* Of the device, in millionths: others than hard ones also have what is idle. */
static inline uint32_t gs_throttle_may_have(const struct gs_throttle_limit *granted) {
    return granted->mode == GS_THROTTLE_HARD ? granted->ppm : 1000000;
}

struct gs_peer {
    const struct gs_activity *activity; /* a copy; its text is not trusted */
    uint32_t container;                 /* by where it was found, not by what it says */
    struct gs_throttle_limit granted;   /* as the host says */
};

struct gs_throttle_env {
    void *arg;
    uint64_t (*now)(void *arg);
    /* Record a timing event behind what `stream` has, or in one of our own (GS_LOOKS); its number,
     * or -1. Never while capturing. */
    int (*mark)(void *arg, uint32_t stream);
    /* True when the event is done, with its stamp. Each is asked until true, then never again. */
    bool (*done)(void *arg, int event, uint64_t *stamp_ns);
    /* Copies of the other contexts' pages on this device; at most `max`. */
    unsigned (*peers)(void *arg, struct gs_peer *out, unsigned max);
    /* Nothing is in this stream, whatever it is. */
    bool (*idle)(void *arg, uint32_t stream);
    /* What all other containers on this device were granted, whether they say anything or not. */
    uint32_t (*others_ppm)(void *arg);
};

#define GS_LOOKS UINT32_MAX

/* ---- one process's context ------------------------------------------------------------ */

/* What a launch of a function with a grid, or of a graph, is expected to take. */
struct gs_predictor {
    _Atomic int64_t ns; /* GS_UNKNOWN before the first was measured */
    uint32_t noted;     /* the segment that has it in its list */
    uint32_t samples;
    int64_t single_ns; /* one that was looked at alone */
    bool probing;
    float moment[2];    /* weighted, of taken/expected and of its square */
    int64_t longest_ns; /* of one launch, lately: trust.c */
    uint64_t longest_at_ns;
    uint32_t seen; /* launches that were timed */
};
#define GS_UNKNOWN (INT64_MAX / 4)

struct gs_throttle_stream {
    uint32_t id;
    bool mark;                 /* call gs_throttle_launched after this launch */
    bool dirty;                /* has launches of the open segment */
    _Atomic int64_t work_ns;   /* expected, launched since the last marker */
    _Atomic uint32_t underway; /* launches that were let through and are not in it yet */
    uint64_t skipped_ns;       /* so it is not marked, since then */
    bool waited;               /* for somebody else, since its last marker */
    struct gs_throttle_stream *next_dirty;
};

/* What another container said that it had of the device, in excess of what it was granted. */
struct gs_claim {
    uint64_t at_ns;
    int64_t excess_ns;
    bool lies; /* not listened to until that is 0 */
};

#define GS_SEGMENTS 32u
#define GS_STREAMS 16u /* marked one by one in a segment */
#define GS_FUNCTIONS 8u

/* The launches between two rounds of markers. */
struct gs_segment {
    int start_event; /* -1: the device was busy with this context before */
    uint64_t start_ns, end_ns;
    int event[GS_STREAMS];
    uint32_t n_events, n_marked, n_functions, launches;
    struct gs_predictor *function[GS_FUNCTIONS];
    int64_t expected_ns[GS_FUNCTIONS]; /* of one launch of each */
    int64_t work_ns, hint_ns;
    uint64_t opened_ns, marked_ns; /* host time */
    bool clean;                    /* the device had work of ours from start to end */
    bool single; /* one launch, marked before and after when the device was idle */
    bool probe;  /* its only function was unknown */
    bool blind;  /* a capture was open meanwhile */
    bool waited; /* its stream did before it, up to start_event */
    bool idle;   /* nothing was in its stream, so it waited for nobody of its own */
    bool many;   /* launches in several streams, else: */
    uint32_t stream;
    uint64_t recorded_ns; /* host time when all of its markers were; 0: there is one */
    uint64_t before_ns;   /* the end of the segment before */
    bool sighted;         /* probe.c saw all of it, and that: */
    uint32_t turns;       /* it was interrupted so often */
    int64_t away_ns;      /* for so long */
};

struct gs_throttle {
    /* What each launch looks at; at the start, so that its address needs no register of its own. */
    _Atomic int64_t allowance_ns; /* expected work that is paid for and not launched */
    _Atomic uint32_t turn;        /* another one when streams were marked, never 0 */

    const struct gs_throttle_env *env;
    struct gs_throttle_limit limit; /* may change at any time, through gs_throttle_set_limit */
    struct gs_bucket *bucket;
    struct gs_page *page;
    uint32_t container;
    uint32_t switch_ns; /* what it takes to switch contexts: as told, then as all have found */
    uint32_t told_switch_ns;
    uint32_t found_ns; /* by this one, in so many looks */
    uint32_t finds;
    int32_t odd;
    uint32_t slice_ns;
    uint32_t marker_ns; /* device time of one event */
    bool capturing;     /* nothing is recorded or queried */

    struct gs_throttle_stream *dirty;
    struct gs_segment open;                 /* being launched; marked at the next slow path */
    struct gs_segment segment[GS_SEGMENTS]; /* marked: [charged, marked) */
    uint32_t charged, finished, marked;     /* counters; finished: all events are done */
    uint32_t number;                        /* of the open segment, never 0 */
    int64_t in_flight_ns;                   /* expected, not known to be done */
    uint64_t covered_ns;                    /* device time up to here belongs to a segment */
    uint64_t busy_from_ns, told_until_ns;
    uint32_t rate_ppm;   /* what the limit means now */
    uint32_t others_ppm; /* granted to other containers */
    uint32_t contexts;   /* with work on the device, this one too; as last seen */
    struct gs_claim claim[GS_MAX_PEERS];
    uint64_t given_at_ns, heard_ns; /* claims.c */
    int64_t given_ns;
    int64_t since_hidden_ns;       /* charged since somebody was here who says nothing */
    uint32_t hidden;               /* of launches on an idle device, those that found it busy */
    uint64_t slice_from_ns;        /* a slice of its own began here */
    int64_t surplus_ns;            /* charged in excess of busy / contexts, bounded */
    int64_t known_ns;              /* in excess of what was expected */
    uint32_t straddled;            /* segments in a row that others interrupted */
    uint32_t sparse;               /* launches that will be marked one by one */
    uint32_t markers;              /* of the last segment */
    int64_t ignore_ns, backoff_ns; /* time in doubt until the next look, and after it */
    bool doubtful;                 /* the last segment may have been idle inside */
    uint32_t random;
    int64_t looked_ns[2]; /* of those: what they took, what was expected */
    uint64_t waiting_since_ns;
    int look_event;                      /* on its way, or -1; probe.c */
    uint64_t look_ns, sign_ns, sight_ns; /* recorded; the last sign of us; since when without gap */
    uint64_t late_ns;                    /* when the last late look was done */
    uint32_t tied;    /* of the late ones, those that were done with work of ours */
    bool tiny;        /* launches in many streams, so short that the device waits for the next */
    uint32_t alert;   /* so many more, one soon after the other */
    uint64_t told_ns; /* until then others were told whose it was */
};

void gs_throttle_init(struct gs_throttle *t, const struct gs_throttle_env *env,
                      struct gs_bucket *bucket, struct gs_page *page, uint32_t container);
/* A process of this container died; what it said last. What it had on the device then is charged,
 * from what it knew until it was found, and no more than it said. */
void gs_throttle_inherit(struct gs_throttle *t, const struct gs_activity *a, uint64_t now);
void gs_predictor_init(struct gs_predictor *f);
/* 0: go ahead, else the time to ask again. */
uint64_t gs_throttle_slow(struct gs_throttle *t, struct gs_throttle_stream *s,
                          struct gs_predictor *f);
void gs_throttle_launched(struct gs_throttle *t);
/* Before that: the device refused the launch. */
void gs_throttle_refused(struct gs_throttle *t, struct gs_predictor *f);
/* It is in its stream, or was refused. Until then, or for 5 ms, nobody marks that stream: the
 * marker would be in front of it. A stream that was forgotten meanwhile has none. */
static inline void gs_throttle_went(struct gs_throttle_stream *s) {
    uint32_t n = atomic_load(&s->underway);
    while (n && !atomic_compare_exchange_weak(&s->underway, &n, n - 1))
        ;
}
/* What comes next in the stream waits for something that is no work of this context, for as long as
 * it takes: a function of the host, a value, another context. */
void gs_throttle_waits(struct gs_throttle *t, struct gs_throttle_stream *s);
void gs_throttle_sync_begin(struct gs_throttle *t);
void gs_throttle_sync_end(struct gs_throttle *t);

/* Whether the open segment counts the launches of `f` in `s`. It does until `t->turn` changes:
 * who has asked under the caller's lock compares that from then on. */
static inline bool gs_throttle_counts(const struct gs_throttle *t,
                                      const struct gs_throttle_stream *s,
                                      const struct gs_predictor *f) {
    return s->dirty && f->noted == t->number;
}

/* Whether a launch is within what is paid for; unknown functions never are. */
static inline bool gs_throttle_covers(int64_t had_ns, int64_t ns) {
    return __builtin_expect(had_ns >= ns, 1);
}
static inline int64_t gs_throttle_allowance(const struct gs_throttle *t) {
    return atomic_load_explicit(&t->allowance_ns, memory_order_relaxed);
}
static inline int64_t gs_throttle_expects(const struct gs_predictor *f) {
    return atomic_load_explicit(&f->ns, memory_order_relaxed);
}

/* What is left is compared with 0, not what was there with `ns`: on x86-64 that is a flag of the
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

/* Goes ahead on what is paid for. compute.h does the same with what a thread remembers. */
static inline bool gs_throttle_try(struct gs_throttle *t, struct gs_throttle_stream *s,
                                   struct gs_predictor *f) {
    int64_t ns = gs_throttle_expects(f);
    return gs_throttle_counts(t, s, f) && gs_throttle_covers(gs_throttle_allowance(t), ns) &&
           gs_throttle_pay(t, s, ns);
}

#endif
