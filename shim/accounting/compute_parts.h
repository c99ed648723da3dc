/* Declarations that the files of this folder share; wrappers need compute.h only. */
#ifndef GPUSHARE_COMPUTE_PARTS_H
#define GPUSHARE_COMPUTE_PARTS_H

#include "compute.h"
#include "limiter/throttle_parts.h"

#define GS_STREAMS_KNOWN 256u
#define GS_PREDICTORS 512u
#define GS_WAYS 8u
#define GS_EVENTS (GS_SEGMENTS * (GS_STREAMS + 2)) /* the maximum in flight, and a few more */

struct gs_known_stream {
    struct gs_throttle_stream throttle; /* `id` is its number in the table */
    CUstream handle;                    /* NULL: free */
    uint64_t name;           /* cuStreamGetId, or the thread of a per-thread stream; 0: none */
    uint32_t used, unmarked; /* `unmarked`: consecutive markers that could not be recorded */
    bool blocks;             /* the legacy stream waits for this stream, and this stream for it */
};

struct gs_known_function {
    struct gs_predictor predictor;
    const void *function;
    struct gs_grid grid;
    uint32_t used;
};

/* Converts device timestamps to host time: see clock.c. */
struct gs_clock {
    CUevent base; /* NULL: none yet */
    uint64_t base_ns;
    uint32_t n_free, n_made;
    uint16_t free[GS_EVENTS];
    CUevent event[GS_EVENTS];
    uint64_t recorded_ns[GS_EVENTS];
};

/* One context of this process. Records are reused and never unmapped, since a thread may still read
 * one. */
struct gs_compute {
    _Atomic(CUcontext) context; /* NULL: free */
    _Atomic uint32_t *lock;
    int dev;
    struct gs_throttle throttle;
    struct gs_throttle_env env;
    uint64_t limits_seen; /* generation */
    struct gs_page *page; /* `unshared` if no other is available */
    struct gs_page unshared;
    uint32_t page_index;
    bool used;           /* by a context, now or earlier */
    bool leaves;         /* a thread is destroying the context; the driver decides */
    bool stopped;        /* paused: launches wait */
    bool peers_read;     /* peers were read in this call */
    bool has_legacy;     /* the legacy stream has had launches */
    bool mixed;          /* the legacy and other blocking streams have unmarked launches */
    uint32_t per_thread; /* number of per-thread streams */
    uint32_t tick, peers_n;
    uint64_t marked_ns;    /* host time of the last marker */
    CUstream probe_stream; /* the shim's stream for probe events; NULL: none yet */
    bool no_probe_stream;  /* that stream could not be created */
    uint32_t streams;      /* known_stream[] is in use below this index */
    struct gs_known_stream stream[GS_STREAMS_KNOWN];
    struct gs_known_function function[GS_PREDICTORS];
    struct gs_clock clock;
    struct gs_peer peer[MAX_PEERS];
    struct gs_activity told[MAX_PEERS];
};
#define GS_MAX_COMPUTES 64u

/* ---- compute.c ------------------------------------------------------------------------------ */

/* Return the record of a context, created if necessary; NULL if its device has no activity file or
 * the table is full. */
struct gs_compute *gs_compute_of(const struct gs_here *here);
/* According to the current limits file. */
bool gs_compute_is_limited(int dev);
bool gs_compute_is_paused(int dev, uint64_t *generation);
/* Call with the lock held, while `stopped`; return when to check again. */
uint64_t gs_compute_stopped(struct gs_compute *c);
struct gs_compute *gs_compute_find(CUcontext context);
/* Apply changed limits; call with the lock held. */
void gs_compute_limits(struct gs_compute *c);
extern const struct gs_limits *gs_compute_limits_file;
uint64_t gs_compute_now(void);

/* Convert a limit from the limits file or the index for the rate limiter. No percentage means no
 * limit. */
static inline struct gs_throttle_limit gs_compute_limit(uint32_t percent, uint32_t flags,
                                                        uint32_t priority) {
    bool limited = percent && percent < GS_NO_PERCENT;
    return (struct gs_throttle_limit){.ppm = limited ? percent * 10000 : 1000000,
                                      .priority = priority,
                                      .mode = flags & GS_DEVICE_COMPUTE_SOFT ? GS_THROTTLE_SOFT
                                              : limited                      ? GS_THROTTLE_HARD
                                                        : GS_THROTTLE_UNLIMITED};
}

/* ---- tables.c: call with the lock held ---------------------------------------------- */

struct gs_known_stream *gs_compute_stream(struct gs_compute *c, CUstream stream);
struct gs_known_stream *gs_compute_stream_if_known(struct gs_compute *c, CUstream stream);
struct gs_predictor *gs_compute_function(struct gs_compute *c, const void *function,
                                         struct gs_grid grid);

/* See env_mark. */
bool gs_compute_is_mixed(struct gs_compute *c);

/* ---- clock.c ------------------------------------------------------------------------ */

int gs_clock_mark(struct gs_compute *c, CUstream stream);
bool gs_clock_done(struct gs_compute *c, int event, uint64_t *stamp_ns);

/* ---- activity_files.c --------------------------------------------------------------- */

/* Return false if the device has no activity file. */
bool gs_activity_open(const struct gs_limits *limits, unsigned dev);
bool gs_activity_are_open(int dev);
/* Return this container's state of migration slices (oversubscription/migration_slice.c), NULL
 * without activity files. gs_activity_slices() reads the state of the other containers. */
struct gs_turn *gs_activity_slice(int dev);
void gs_activity_slices(int dev,
                        void (*each)(const struct gs_turn *turn, uint32_t number, void *arg),
                        void *arg);
/* Return what this container advertises about its turns, NULL without activity files.
 * gs_activity_turns() copies what the other containers advertise; at most `max`. */
struct gs_compute_turn *gs_activity_turn(int dev);
unsigned gs_activity_turns(int dev, struct gs_turn_of *out, unsigned max);
/* `left`: the last report of the process that had the page before and died; all 0 if there was
 * none. */
void gs_activity_claim(struct gs_compute *c, struct gs_activity *left);
void gs_activity_give(struct gs_compute *c);
unsigned gs_activity_peers(struct gs_compute *c, struct gs_peer *out, unsigned max);
/* Return the sum of the host's grants to all other containers, in millionths of the device. */
uint32_t gs_activity_others_ppm(const struct gs_compute *c);

/* ---- trace.c ------------------------------------------------------------------------ */

bool gs_trace_is_on(void);
void gs_trace_write(int dev, const struct gs_trace *record);

/* ---- wait.c ------------------------------------------------------------------------- */

/* Sleep until `until_ns`, or until limits change; at most 50 ms. */
void gs_compute_wait(uint64_t until_ns, uint64_t generation);

#endif
