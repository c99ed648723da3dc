/* What the compute_*.c files share; the wrappers need compute.h only. */
#ifndef GPUSHARE_COMPUTE_PARTS_H
#define GPUSHARE_COMPUTE_PARTS_H

#include "compute.h"
#include "limiter/throttle_parts.h"

#define GS_STREAMS_KNOWN 256u
#define GS_PREDICTORS 512u
#define GS_WAYS 8u
#define GS_EVENTS (GS_SEGMENTS * (GS_STREAMS + 2)) /* all that can be on their way, and some */

struct gs_known_stream {
    struct gs_throttle_stream law; /* `id` is its number in the table */
    CUstream handle;               /* NULL: free */
    uint64_t name;           /* cuStreamGetId, or the thread of a per-thread stream; 0: none */
    uint32_t used, unmarked; /* `unmarked`: so many markers in a row could not be recorded */
    bool blocks;             /* the legacy stream waits for it, and it for the legacy stream */
};

struct gs_known_function {
    struct gs_predictor law;
    const void *function;
    struct gs_grid grid;
    uint32_t used;
};

/* Device stamps as host time: see clock.c. */
struct gs_clock {
    CUevent base; /* NULL: none yet */
    uint64_t base_ns;
    uint32_t n_free, n_made;
    uint16_t free[GS_EVENTS];
    CUevent event[GS_EVENTS];
    uint64_t recorded_ns[GS_EVENTS];
};

/* One context of this process. Never unmapped: a thread may still look at it; used again. */
struct gs_compute {
    _Atomic(CUcontext) context; /* NULL: free */
    _Atomic uint32_t *lock;
    int dev;
    struct gs_throttle law;
    struct gs_throttle_env env;
    uint64_t limits_seen; /* generation */
    struct gs_page *page; /* `unshared` when there is no other */
    struct gs_page unshared;
    uint32_t page_index;
    bool used;           /* by some context, now or before */
    bool leaves;         /* a thread is destroying it: the driver says whether it is gone */
    bool stopped;        /* paused: launches are held */
    bool peers_read;     /* in this call */
    bool has_legacy;     /* something was launched into the legacy stream */
    bool mixed;          /* it and others that block have launches without a marker */
    uint32_t per_thread; /* streams of threads, in all */
    uint32_t tick, peers_n;
    uint64_t marked_ns; /* host time of the last marker */
    CUstream looks;     /* ours, with nothing in it but looks; NULL: none yet */
    bool no_looks;      /* it could not be made */
    uint32_t streams;   /* known_stream[] in use below this */
    struct gs_known_stream stream[GS_STREAMS_KNOWN];
    struct gs_known_function function[GS_PREDICTORS];
    struct gs_clock clock;
    struct gs_peer peer[MAX_PEERS];
    struct gs_activity told[MAX_PEERS];
};
#define GS_MAX_COMPUTES 64u

/* ---- compute.c ------------------------------------------------------------------------------ */

/* The record of a context, made when there is none; NULL: its device has no pages, or no more can
 * be kept. */
struct gs_compute *gs_compute_of(const struct gs_here *here);
/* By the limits file as it is now. */
bool gs_compute_is_limited(int dev);
bool gs_compute_is_paused(int dev, uint64_t *generation);
/* Call locked, while `stopped`; when to ask again. */
uint64_t gs_compute_stopped(struct gs_compute *c);
struct gs_compute *gs_compute_find(CUcontext context);
/* Limits that changed; call locked. */
void gs_compute_limits(struct gs_compute *c);
extern const struct gs_limits *gs_compute_limits_file;
uint64_t gs_compute_now(void);

/* What a limits file or an index says, for the law. No percentage: no limit. */
static inline struct gs_throttle_limit gs_compute_limit(uint32_t percent, uint32_t flags,
                                                        uint32_t priority, uint32_t weight) {
    bool limited = percent && percent < GS_NO_PERCENT;
    return (struct gs_throttle_limit){.ppm = limited ? percent * 10000 : 1000000,
                                      .weight = weight,
                                      .priority = priority,
                                      .mode = flags & GS_DEVICE_COMPUTE_SOFT ? GS_THROTTLE_SOFT
                                              : limited                      ? GS_THROTTLE_HARD
                                                        : GS_THROTTLE_UNLIMITED};
}

/* ---- tables.c: call locked ---------------------------------------------------------- */

struct gs_known_stream *gs_compute_stream(struct gs_compute *c, CUstream stream);
struct gs_known_stream *gs_compute_stream_if_known(struct gs_compute *c, CUstream stream);
struct gs_predictor *gs_compute_function(struct gs_compute *c, const void *function,
                                         struct gs_grid grid);

/* See env_mark. */
bool gs_compute_is_mixed(struct gs_compute *c);

/* ---- clock.c ------------------------------------------------------------------------ */

int gs_clock_mark(struct gs_compute *c, CUstream stream);
bool gs_clock_done(struct gs_compute *c, int event, uint64_t *stamp_ns);

/* ---- pages.c ------------------------------------------------------------------------ */

/* False: the device has no pages. */
bool gs_activity_open(const struct gs_limits *limits, unsigned dev);
bool gs_activity_are_open(int dev);
/* What this container says of turns (oversubscription/migration_slice.c), NULL without pages; and
 * what the others say. */
struct gs_turn *gs_activity_slice(int dev);
void gs_activity_slices(int dev,
                        void (*each)(const struct gs_turn *turn, uint32_t number, void *arg),
                        void *arg);
/* `left`: what the process that had the page before and died said last; all 0 when none did. */
void gs_activity_claim(struct gs_compute *c, struct gs_activity *left);
void gs_activity_give(struct gs_compute *c);
unsigned gs_activity_peers(struct gs_compute *c, struct gs_peer *out, unsigned max);
/* What the host granted to all other containers, a millionth of the device each. */
uint32_t gs_activity_others_ppm(const struct gs_compute *c);

/* ---- wait.c ---------------------------------------------------------------------------
 */

/* Until `until_ns`, or until limits change; at most 50 ms. */
void gs_compute_wait(uint64_t until_ns, uint64_t generation);

#endif
