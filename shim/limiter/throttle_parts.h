/* Declarations that the files of the rate limiter share: each calls only files that stand above it
 * here. bucket.c pays; trust.c expects; activity.c, probe.c and wait.c measure; split.c, peers.c
 * and claims.c attribute; turn.c, charge.c and done.c charge; throttle.c admits. */
#ifndef GPUSHARE_THROTTLE_PARTS_H
#define GPUSHARE_THROTTLE_PARTS_H

#include <stddef.h>

#include "throttle.h"

#define US UINT64_C(1000)
#define MS (1000 * US)

#define QUANTUM (500 * (int64_t)US) /* advance payment, and the work between two markers */
#define LONG_QUANTUM (4 * QUANTUM)
#define WINDOW (4 * (int64_t)MS) /* expected work in flight: two slices */
#define BURST (20 * MS)          /* largest credit of a container that was idle */
#define DEBT (10000 * MS)        /* a container is never locked out for longer */
#define POLL (200 * US)          /* between two checks of a waiting launch */
#define TINY (10 * (int64_t)US)  /* launches that take less: the device waits for the host */
#define STUCK (100 * MS)         /* nothing completes for so long: possibly a deadlock */
#define DEFER (6 * MS)           /* a charge waits so long for the reports of peers */
#define PROBE (2 * MS) /* further unknown launches wait for an unknown launch that takes longer */
#define ORPHAN (1000 * MS)          /* charge for an unknown launch of a process that died */
#define TAIL (100 * (int64_t)US)    /* alone on the device, no marker before a sync on less work */
#define EXTEND (8 * MS)             /* activity is published again so long before it expires */
#define SPARSE 16u                  /* launches that are marked one by one */
#define DOUBTFUL (64 * (int64_t)MS) /* doubtful time until launches are marked one by one again */
#define LATELY (100 * MS)           /* containers that worked since then take turns */
#define LEAST ((int64_t)US)         /* minimum expected duration of a launch */
#define ON_ITS_WAY (5 * MS) /* maximum time from a launch's admission until it is in its stream */
#define MAX_PEERS 64u
#define FINDS 32u              /* measurements until a switch cost is relied on */
#define SURE_FINDS 256u        /* until here all measurements have the same weight */
#define CUT_EDGE (120 * US)    /* a preemption is known to half the time between two probes */
#define MOST_SWITCH (500 * US) /* a longer wait was more, unless switches take half as long */
#define EDGE (20 * US)         /* maximum clock difference between containers; less than a switch */

/* Store a variable that launch/admit.c also reads without the lock. */
#define SHOW(word, value) __atomic_store_n(&(word), (value), __ATOMIC_RELAXED)

/* run_ns of a run that was preempted: the context had the device throughout, and more work. */
#define GS_CUT_OFF UINT64_MAX

static inline uint64_t max64(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

static inline uint64_t min64(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static inline const struct gs_run *nth_newest(const struct gs_activity *a, uint32_t i) {
    return &a->run[(a->last + GS_RUNS - i) % GS_RUNS];
}

/* Within this time no other context can have run for a slice. */
static inline uint64_t whole(const struct gs_throttle *t) {
    return (uint64_t)t->slice_ns * 7 / 10;
}

/* ---- bucket.c: what is paid and saved ----------------------------------------------------------
 */

/* Correct the advance payment by `device_ns`; a debt is never longer than DEBT. */
void gs_bucket_adjust(struct gs_throttle *t, int64_t device_ns, uint64_t now);
/* Pay for `device_ns`, with credit of `burst` at most. Return 0, or the time when it can be paid;
 * with `anyway`, pay at once and make a debt. */
uint64_t gs_bucket_pay(struct gs_throttle *t, int64_t device_ns, uint64_t burst, uint64_t now,
                       bool anyway);
/* Reduce the remaining allowance to `most_ns`, and refund the rest. */
void gs_bucket_give_back(struct gs_throttle *t, int64_t most_ns, uint64_t now);

/* ---- trust.c: how far expectations are relied on -----------------------------------------------
 */

/* Return whether a recent launch took so much longer than `ns` that each launch is measured. */
bool gs_throttle_is_daring(const struct gs_predictor *f, int64_t ns, uint64_t now);
/* Return how many launches of `f` may run without a marker. */
uint32_t gs_throttle_unmarked(const struct gs_predictor *f);
/* Return the part of `quantum` that may be in flight without a marker; at least `ns`. */
int64_t gs_throttle_most(const struct gs_predictor *f, int64_t ns, int64_t quantum, uint64_t now);
/* Return the advance payment for a launch of `f` and the launches after it that get no marker.
 * While the device may have idle times the amount is random, so that a program cannot predict which
 * launch is measured. */
int64_t gs_throttle_quantum(struct gs_throttle *t, const struct gs_predictor *f, int64_t ns,
                            uint64_t now);
/* Return the advance payment for a launch of an unknown function. */
int64_t gs_throttle_unknown(const struct gs_throttle *t);
/* Count measured launches, however reliable their measurement is. */
void gs_throttle_seen(const struct gs_segment *segment);
/* The launches took `took_ns` each on average; `sure`: at least so long. */
void gs_throttle_timed(struct gs_predictor *f, int64_t took_ns, bool sure, uint64_t at);

/* Return the expected duration of an interval that was preempted: longer intervals are preempted
 * more often. */
int64_t gs_throttle_when_hit(const struct gs_segment *segment, int64_t work_ns);
/* Return whether all launches of `f` take about the same time. */
bool gs_throttle_even(const struct gs_predictor *f);
/* Learn from an interval that took `own` how much durations vary. Preempted intervals count as
 * well, since these are the longer ones, but with less weight: their time is an estimate. */
void gs_throttle_spread(struct gs_segment *segment, int64_t own, float weight);

/* ---- activity.c: what is known and published ---------------------------------------------------
 */

/* Return whether the device has begun the interval. */
bool gs_throttle_started(struct gs_throttle *t, struct gs_segment *segment);
/* Return whether the interval has begun and all of its markers have completed. */
bool gs_throttle_events_done(struct gs_throttle *t, struct gs_segment *segment);
/* Publish this context's activity to its peers; `run`, if not NULL, has completed. */
void gs_throttle_publish(struct gs_throttle *t, const struct gs_run *run, uint64_t now);

/* ---- probe.c: probe events ---------------------------------------------------------------------
 */

/* Return when the next probe event is due at the latest; UINT64_MAX: none is worth its cost. */
uint64_t gs_throttle_next_probe(const struct gs_throttle *t, uint64_t now);
void gs_throttle_probe(struct gs_throttle *t, uint64_t now);
/* Evaluate the pending probe event. */
void gs_throttle_probed(struct gs_throttle *t, uint64_t now);
/* An interval has completed: decide whether probe events covered it. */
void gs_throttle_sighted(struct gs_throttle *t, struct gs_segment *segment);

/* ---- wait.c: streams that wait for something else ----------------------------------------------
 */

/* Called before the first unfinished interval completes: decide whether the wait in front of it was
 * idle time. */
void gs_throttle_waited(struct gs_throttle *t, struct gs_segment *segment);

/* ---- split.c: which context used a period ------------------------------------------------------
 */

/* Return whether work of this duration can run for a slice without a timestamp. */
bool gs_throttle_lasts(const struct gs_throttle *t, int64_t length_ns);
/* Return the part of a context that was on the device at `start` and at `end`. `length` is the
 * duration of its work when alone; `fresh`: the context was idle before. */
int64_t gs_throttle_split(const struct gs_throttle *t, const struct gs_peer *peer, unsigned n,
                          uint64_t start, uint64_t end, int64_t length, bool fresh);

/* ---- peers.c: what the peers did in a period ---------------------------------------------------
 */

struct company {
    uint64_t before_ns; /* last timestamp of a peer before the start */
    uint32_t contexts;  /* contexts of peers that had work in the period */
    uint32_t container; /* of that timestamp */
    bool over;          /* the context of that timestamp had no more work then */
    bool cut;           /* it was preempted then */
    bool ran;           /* a peer's context is known to have run */
    bool inside;        /* a peer was on the device within the period */
    bool outranked;     /* another container with the same or a higher priority */
    bool wait;          /* peers had work and have not published its time yet */
};

struct company gs_throttle_company(const struct gs_throttle *t, const struct gs_peer *peer,
                                   unsigned n, uint64_t start, uint64_t end);
/* Compute the rate that the limit gives now, and count the contexts with work. */
void gs_throttle_survey(struct gs_throttle *t, const struct gs_peer *peer, unsigned n,
                        uint64_t now);

/* ---- claims.c: peers cannot have used more than their grants -----------------------------------
 */

/* Compare what all peers report of the time up to `to` with what the host granted. */
void gs_throttle_hear(struct gs_throttle *t, const struct gs_peer *peer, unsigned n, uint64_t to);
/* A hand-over from this container seems to have taken `took_ns`. Clocks differ by EDGE at most, so
 * what is negative for one switch is not long for another, unless its timestamps are invented. */
void gs_throttle_scatter(struct gs_throttle *t, uint32_t container, int64_t took_ns);
/* Copy the peers that do not report more than they can have used. */
unsigned gs_throttle_credible(const struct gs_throttle *t, const struct gs_peer *peer, unsigned n,
                              struct gs_peer *out);

/* ---- turn.c: who may launch now ----------------------------------------------------------------
 */

/* Return 0 if a launch of `ns` may go, for which `pay` is paid, else when to ask again. `own`:
 * within the container's turn, so that it is paid although the bucket may lack some of it. */
uint64_t gs_turn_admit(struct gs_throttle *t, int64_t ns, int64_t pay, uint64_t now, bool *own);
/* An interval is charged `own`. */
void gs_turn_charged(struct gs_throttle *t, const struct gs_segment *segment, int64_t own);
/* All work of this context has completed. */
void gs_turn_rests(struct gs_throttle *t, uint64_t now);
/* Return how much expected work may be in flight: less while bursts of other containers wait for
 * it. */
int64_t gs_turn_window(const struct gs_throttle *t, uint64_t now);
/* Return the time that the container saves credit for, for its turns; 0: it takes none. */
uint64_t gs_turn_burst(const struct gs_throttle *t);

/* ---- charge.c: how much an interval costs ------------------------------------------------------
 */

/* Return the own time to publish as soon as an interval has completed. */
uint64_t gs_throttle_first_guess(const struct gs_throttle *t, const struct gs_segment *segment);
/* Return false if peers have not published yet what they did. */
bool gs_throttle_charge(struct gs_throttle *t, struct gs_segment *segment,
                        const struct gs_peer *peer, unsigned n, uint64_t now);

/* ---- done.c: completed intervals ---------------------------------------------------------------
 */

/* Detect completed intervals, and charge the ones that can be judged. */
void gs_throttle_poll(struct gs_throttle *t, uint64_t now);

#endif
