/* What the files of the law share. */
#ifndef GPUSHARE_THROTTLE_PARTS_H
#define GPUSHARE_THROTTLE_PARTS_H

#include <stddef.h>

#include "throttle.h"

#define US UINT64_C(1000)
#define MS (1000 * US)

#define QUANTUM (500 * (int64_t)US) /* paid for at a time, and the distance of markers */
#define WINDOW (4 * (int64_t)MS)    /* expected work in flight: two slices */
#define BURST (20 * MS)             /* credit of one that was idle */
#define DEBT (10000 * MS)           /* a container is never locked out for longer */
#define POLL (200 * US)             /* between two looks of one that waits */
#define TINY (10 * (int64_t)US)     /* launches that take less: the device waits for the host */
#define HIDDEN_ALL 1024u
#define STUCK (100 * MS)            /* nothing completes for so long: a deadlock? */
#define DEFER (6 * MS)              /* a charge waits as long for the others to say what they did */
#define PROBE (2 * MS)              /* an unknown launch that takes longer is waited for */
#define ORPHAN (1000 * MS)          /* an unknown launch of a process that died is charged */
#define TAIL (100 * (int64_t)US)    /* synchronised with less than this, alone: no marker */
#define EXTEND (8 * MS)             /* before it expires, what is published is said again */
#define SURPLUS (32 * (int64_t)MS)  /* less than busy / contexts, for so long */
#define SPARSE 16u                  /* so many launches are marked one by one */
#define DOUBTFUL (64 * (int64_t)MS) /* so long in doubt, until some are marked again */
#define STREAK 16u                  /* interrupted ones in a row, until they are learned from */
#define LEAST ((int64_t)US)         /* no launch is expected to take less */
#define ON_ITS_WAY (5 * MS)         /* a launch may be, from its admission into its stream */
#define MAX_PEERS 64u
#define FINDS 64u              /* looks until a cost of switches is believed */
#define SURE_FINDS 256u        /* looks of which the last one counts no less than the others */
#define MOST_SWITCH (500 * US) /* what took longer was more than a switch */
#define EDGE (20 * US) /* how well clocks of different containers agree; less than a switch */

/* Of words that launch/admit.c also looks at without the lock. */
#define SHOW(word, value) __atomic_store_n(&(word), (value), __ATOMIC_RELAXED)

/* What a run is said to have held that ended with a slice: all of it, and it had more work. */
#define GS_CUT_OFF UINT64_MAX

static inline uint64_t max64(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

static inline uint64_t min64(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

/* In less than this nobody else can have had a slice. */
static inline uint64_t whole(const struct gs_throttle *t) {
    return (uint64_t)t->slice_ns * 7 / 10;
}

/* ---- peers.c: what others did meanwhile ---------------------------------------- */

struct company {
    uint64_t before_ns; /* the last stamp of others before the start */
    uint32_t contexts;  /* of others, with work in between */
    bool claimed;       /* somebody says so, whether he is believed or not */
    bool over;          /* whose stamp it was had no more work then */
    bool ran;           /* somebody is known to have been at work */
    bool inside;        /* somebody was on the device in between */
    bool outranked;     /* somebody else's container, with our priority or more */
    bool wait;          /* they had work, and do not know yet */
};

struct company gs_throttle_company(const struct gs_throttle *t, const struct gs_peer *peer,
                                   unsigned n, uint64_t start, uint64_t end);
/* What the limit means now, and how many contexts have work. */
void gs_throttle_survey(struct gs_throttle *t, const struct gs_peer *peer, unsigned n,
                        uint64_t now);

/* ---- claims.c: no more than was granted -------------------------------------------- */

/* What a switch takes is to be learned anew; until then it is as told. */
void gs_throttle_find_again(struct gs_throttle *t);
/* What everybody says of the time up to `to`, against what the host granted. */
void gs_throttle_hear(struct gs_throttle *t, const struct gs_peer *peer, unsigned n, uint64_t to);
/* Those of `peer` that do not say that they had more than they can have had. */
unsigned gs_throttle_credible(const struct gs_throttle *t, const struct gs_peer *peer, unsigned n,
                              struct gs_peer *out);
/* `own` of a stretch of `busy` ns, or more: all others together never had more than was granted. */
int64_t gs_throttle_granted(struct gs_throttle *t, int64_t own, int64_t busy, uint64_t now);

/* ---- probe.c: whether the device is ours
 * -------------------------------------------------- */

/* When it should be, at the latest; UINT64_MAX: none is worth while. */
uint64_t gs_throttle_next_probe(const struct gs_throttle *t, uint64_t now);
void gs_throttle_probe(struct gs_throttle *t, uint64_t now);
/* What the look that is on its way has shown. */
void gs_throttle_probed(struct gs_throttle *t, uint64_t now);
/* A segment is done: whether it was seen. */
void gs_throttle_sighted(struct gs_throttle *t, struct gs_segment *segment);

/* ---- split.c: whose a stretch was -------------------------------------------------- */

/* What takes that long can hold a slice and leave no stamp. */
bool gs_throttle_lasts(const struct gs_throttle *t, int64_t length_ns);
/* The part of a context that was on the device at `start` and at `end`; `length` is what it would
 * take alone; `fresh`: it was idle before. */
int64_t gs_throttle_split(const struct gs_throttle *t, const struct gs_peer *peer, unsigned n,
                          uint64_t start, uint64_t end, int64_t length, bool fresh);

/* ---- trust.c: how far expectations are relied on -------------------------------------
 */

/* One of its launches took so much longer lately that each is looked at. */
bool gs_throttle_is_daring(const struct gs_predictor *f, int64_t ns, uint64_t now);
/* So many launches of it may go without a marker. */
uint32_t gs_throttle_unmarked(const struct gs_predictor *f);
/* Of `quantum`, what may be on its way without a marker; `ns` at least. */
int64_t gs_throttle_most(const struct gs_predictor *f, int64_t ns, int64_t quantum, uint64_t now);
/* What is paid for a launch of `f` and those behind it, that go without a marker. While the device
 * is idle now and then it is random, so that no program knows which launch is looked at. */
int64_t gs_throttle_quantum(struct gs_throttle *t, const struct gs_predictor *f, int64_t ns,
                            uint64_t now);
/* What is paid for a launch of which nothing is known. */
int64_t gs_throttle_unknown(const struct gs_throttle *t);
/* Of what is paid for, only so much is left. */
void gs_throttle_give_back(struct gs_throttle *t, int64_t most_ns, uint64_t now);
/* Launches that were timed, however sure their time is. */
void gs_throttle_seen(const struct gs_segment *segment);
/* Its launches took `took_ns` each in the mean; `sure`: at least. */
void gs_throttle_timed(struct gs_predictor *f, int64_t took_ns, bool sure, uint64_t at);

/* What a segment takes that was interrupted: the longer it takes, the likelier it is. */
int64_t gs_throttle_when_hit(const struct gs_segment *segment, int64_t work_ns);
/* Its launches all take the same. */
bool gs_throttle_even(const struct gs_predictor *f);
/* A segment took `own`: how they differ is learned from those that were interrupted, too, since
 * these are the longer ones. What was divided is no good measure of it: less of `weight`. */
void gs_throttle_spread(struct gs_segment *segment, int64_t own, float weight);

/* ---- charge.c ------------------------------------------------------------------ */

/* What of a segment's time was surely busy. */
int64_t gs_throttle_busy(const struct gs_throttle *t, const struct gs_segment *segment, bool *sure);
/* What it is to be said to have held, as soon as it is done. */
uint64_t gs_throttle_first_guess(const struct gs_throttle *t, const struct gs_segment *segment);
/* False: the others have not said yet what they did. */
bool gs_throttle_charge(struct gs_throttle *t, struct gs_segment *segment,
                        const struct gs_peer *peer, unsigned n, uint64_t now);

/* ---- done.c -------------------------------------------------------------------- */

/* The device has begun with it, or did so before. */
bool gs_throttle_started(struct gs_throttle *t, struct gs_segment *segment);
/* All of its markers are done, and it has begun. */
bool gs_throttle_events_done(struct gs_throttle *t, struct gs_segment *segment);
/* Tell the others what we have on the device, with the `run` that is over, if any. */
void gs_throttle_publish(struct gs_throttle *t, const struct gs_run *run, uint64_t now);
/* See what has finished, and charge what can be judged. */
void gs_throttle_poll(struct gs_throttle *t, uint64_t now);

/* ---- wait.c --------------------------------------------------------------------- */

/* Before the first segment that is not finished is: whether the wait in front of it is idle time.
 */
void gs_throttle_waited(struct gs_throttle *t, struct gs_segment *segment);

/* ---- throttle.c -------------------------------------------------------------------------- */

/* Correct what was paid by `device_ns`. */
void gs_throttle_adjust(struct gs_throttle *t, int64_t device_ns, uint64_t now);

#endif
