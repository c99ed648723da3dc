/* A device in virtual time: round robin over contexts with work, slices with noise, a cost of each
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
#define RING 4096  /* of one stream, with its markers */
#define EVENTS 8192
#define BIN (10 * MS)

struct rng {
    uint64_t state;
};
double uniform(struct rng *rng); /* [0, 1) */
double normal(struct rng *rng);

/* What an item is, where it is no marker. */
enum { KERNEL = -1, RELEASER = -2, WAITER = -3 }; /* a waiter spins until a releaser is done */

struct item {
    double left_ns;
    int event; /* >= 0: a marker */
};

struct stream {
    struct item ring[RING];
    uint32_t head, tail;
};

struct context {
    int tenant;
    double width;                      /* so many streams run at full speed at once */
    struct stream stream[STREAMS + 1]; /* the last one is the law's own */
    uint32_t kernels, items;           /* not done */
    double left_ns;                    /* of them, without waiters */
    uint64_t stamp[EVENTS];            /* 0: not done */
    uint32_t next_event;
    int64_t skew_ns;  /* of its stamps against the host's clock */
    int waits_stream; /* the host waits: -1 no, else until this stream is empty */
    bool waits_room;
    bool dead;
};

/* Waiters on a device and releasers that are done and not used up, of all devices. */
struct signals {
    uint64_t waiters[MAX_TENANTS], released[MAX_TENANTS];
};

struct gpu {
    uint64_t now_ns, slice_ns, switch_low_ns, switch_high_ns, bubble_ns;
    double slice_noise;
    struct rng rng;
    struct context *context[MAX_CONTEXTS];
    int n, current, last;
    uint64_t slice_end_ns, switch_end_ns, switches;
    uint64_t held_ns[MAX_TENANTS], work_ns[MAX_TENANTS], switch_ns[MAX_TENANTS];
    uint64_t done[MAX_TENANTS]; /* kernels */
    struct signals *signals;
    uint64_t *bin[MAX_TENANTS]; /* held in each BIN */
    uint64_t bins;
    int woken; /* the context whose host may go on; -1: none */
};

void gpu_push(struct gpu *gpu, int context, uint32_t stream, double ns, int event);
bool gpu_empty(const struct gpu *gpu, int context, uint32_t stream);
/* Forward to `until`; stops early, with `woken`, when something happens that a host waits for. */
void gpu_advance(struct gpu *gpu, uint64_t until);
void gpu_kill(struct gpu *gpu, int context);

#endif
