/* A device in virtual time: round robin over contexts with work, slices with noise, a cost per
 * switch, streams, a bounded launch queue, timing events. Its ledger is the ground truth. */
#ifndef VT_GPU_H
#define VT_GPU_H

#include <stdbool.h>
#include <stdint.h>

#define US UINT64_C(1000)
#define MS (1000 * US)

#define MAX_CONTEXTS 64
#define MAX_TENANTS 16
#define STREAMS 8
#define QUEUE 1024 /* launches of one context */
#define RING 4096  /* items of one stream, including its events */
#define EVENTS 8192
#define BIN (10 * MS)

struct rng {
    uint64_t state;
};
double uniform(struct rng *rng); /* [0, 1) */
double normal(struct rng *rng);

/* The kinds of item that are no event. */
enum { KERNEL = -1, RELEASER = -2, WAITER = -3 }; /* a waiter spins until a releaser is done */

struct item {
    double left_ns;
    int event; /* >= 0: an event */
};

struct stream {
    struct item ring[RING];
    uint32_t head, tail;
};

struct context {
    int tenant;
    int group;                         /* whose signals its waiters and releasers use */
    double width;                      /* this many streams run at full speed at once */
    struct stream stream[STREAMS + 1]; /* the last stream is the limiter's own */
    uint32_t kernels, items;           /* not yet done */
    double left_ns;                    /* work of those, without waiters */
    uint64_t stamp[EVENTS];            /* 0: not done */
    uint32_t next_event;
    int64_t skew_ns;  /* offset of its timestamps from the host's clock */
    int waits_stream; /* the stream that the host waits for; -1: none */
    bool waits_room;
    bool dead;
};

/* Waiters on a device; finished releasers of all devices that no waiter has consumed. */
struct signals {
    uint64_t waiters[MAX_TENANTS], released[MAX_TENANTS];
};

struct gpu {
    uint64_t now_ns, slice_ns, bubble_ns;
    double handover_ns, preempt_ns; /* mean switch costs: the previous context had no more work */
    double slice_noise;
    struct rng rng;
    struct context *context[MAX_CONTEXTS];
    int n, current, last;
    uint64_t slice_end_ns, switch_end_ns, switches;
    uint64_t held_ns[MAX_TENANTS], work_ns[MAX_TENANTS], switch_ns[MAX_TENANTS];
    uint64_t done[MAX_TENANTS]; /* finished kernels */
    struct signals *signals;
    uint64_t *bin[MAX_TENANTS]; /* device time held in each BIN */
    uint64_t bins;
    int woken; /* the context whose host was woken; -1: none */
};

void gpu_push(struct gpu *gpu, int context, uint32_t stream, double ns, int event);
bool gpu_empty(const struct gpu *gpu, int context, uint32_t stream);
/* Simulates until `until`; stops early and sets `woken` when something happens that a host waits
 * for. */
void gpu_advance(struct gpu *gpu, uint64_t until);
void gpu_kill(struct gpu *gpu, int context);

#endif
