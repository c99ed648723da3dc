/* Containers on the device of gpu.h: processes that launch kernels under one of several rate
 * limiters. */
#ifndef VT_H
#define VT_H

#include "gpu.h"
#include "limiter/throttle.h"

#define FUNCTIONS 3
#define REQUEST 20 /* launches of a request of an interactive program */
#define REQUESTS 4096
#define STEP 500 /* launches of a training step, each of another function */
#define MAX_PROCESSES 8

enum law { LAW_NONE, LAW_OURS, LAW_ORACLE };
enum kernel {
    K_5US,
    K_50US,
    K_1MS,
    K_20MS,
    K_LOGNORMAL,
    K_BIMODAL,
    K_CHANGING,
    K_CYCLING,
    K_COLD,
    K_GROWING,
    K_ENDLESS,
    K_5_TO_65US,
    K_30_TO_80US,
    KERNELS
};
enum program {
    P_STREAM,
    P_STREAMS,
    P_GRAPH,
    P_SYNC,
    P_PAUSE,
    P_PAIR,
    P_POLL,
    P_THREADS,
    P_TRAIN,
    P_INTERACTIVE,
    PROGRAMS
};
#define THREADS 4
enum spoof {
    SPOOF_NONE,
    SPOOF_BUSY,
    SPOOF_IDLE,
    SPOOF_GARBAGE,
    SPOOF_RUNS,
    SPOOF_CROWD,
    SPOOF_FUTURE,
    SPOOF_PAST,
    SPOOF_NEGATIVE,
    SPOOF_SLOW,
    SPOOF_CAREFUL,
    SPOOF_CORPUS,
    SPOOFS
};

/* False claims about turns: see env_turns in law.c. */
enum claim {
    CLAIM_NONE,
    CLAIM_HOLDS,
    CLAIM_LONG,
    CLAIM_FIRST,
    CLAIM_GARBAGE,
    CLAIM_OWN,
    CLAIM_LATE,
    CLAIM_SOON,
    CLAIM_CUTS,
    CLAIM_NICKS,
    CLAIM_BLINKS,
    CLAIM_FLICKERS,
    CLAIMS
};

extern const char *const claim_name[CLAIMS];
extern const char *const kernel_name[KERNELS];
extern const char *const program_name[PROGRAMS];
extern const char *const spoof_name[SPOOFS];

struct tenant {
    enum law law;
    enum kernel kernel;
    enum program program;
    enum spoof spoof;
    struct gs_throttle_limit limit;
    int processes;
    int unequal; /* all processes but the first mostly pause */
    uint64_t join_ns, leave_ns, kill_ns, limit_at_ns, capture_ns; /* a capture lasts 500 ms */
    uint32_t limit_then_ppm;
    enum claim claim;
    int no_turns;                  /* it pays no attention to turns */
    int waits_for;                 /* its kernels wait for those of this container; -1: none */
    uint64_t stop_ns, stop_for_ns; /* all its processes are stopped then */
    double cpu_us;                 /* of the host between two launches; 0: 2 to 4 */
    double latency_us;             /* from the beginning of a launch until the device has it */
    double first_us;               /* the same for the first launch of a function */
    double stall_ms;               /* without a launch, after every twentieth training step */
};

/* The oracle: it knows from the device's ledger what a container held, and each launch's
 * duration. No limiter can hold a cell that it misses. */
struct oracle {
    uint64_t at_ns, held_ns;
    double credit_ns; /* of device time, before subtracting launches in flight */
};

/* One of several threads of a process, each with its own stream. */
struct thread {
    uint64_t clock_ns;
    bool launching, mark; /* launching: admitted, but not yet in the driver */
    int function;
    double kernel_ns; /* 0: not chosen yet */
};

struct host {
    struct world *world;
    int tenant, context;
    struct gpu *gpu;
    bool pauses;
    struct rng rng;
    uint64_t clock_ns; /* when it continues; UINT64_MAX while it waits for the device */
    bool chosen, syncing, launching;
    uint32_t launches, burst_left;
    int function;
    uint32_t stream;
    double kernel_ns;
    struct thread thread[THREADS];
    int kind; /* KERNEL, RELEASER, WAITER */
    struct gs_throttle throttle;
    struct gs_throttle_stream streams[STREAMS];
    struct gs_predictor predictor[STEP];
    uint64_t asked_ns; /* when its current request began */
    uint32_t requests;
    uint32_t request_us[REQUESTS];   /* how long each of them took */
    uint64_t marks, slow, forbidden; /* forbidden: events recorded or queried while capturing */
};

#define DEVICES 2

struct world {
    struct gpu gpu[DEVICES]; /* process i of a container is on device i % devices */
    struct signals signals;
    double devices;
    struct gs_throttle_env env;
    struct tenant tenant[MAX_TENANTS];
    struct host *host[MAX_CONTEXTS];
    struct gs_page *page[MAX_CONTEXTS];
    struct gs_activity spoof[MAX_CONTEXTS][GS_MAX_PAGES];
    const uint8_t *corpus; /* activity for SPOOF_CORPUS, used in rotation */
    size_t corpus_size, corpus_at;
    struct gs_bucket bucket[DEVICES][MAX_TENANTS];
    struct gs_compute_turn turn[DEVICES][MAX_TENANTS];
    double round_us; /* of turns; 0: none */
    struct oracle oracle[DEVICES][MAX_TENANTS];
    double burst_ms;           /* the oracle's */
    int pairs_of[MAX_TENANTS]; /* containers that use the signals of this one */
    int tenants, hosts;
    double jitter_us, skew_us, stall, lost, one_queue;
    uint64_t end_ns;
};

/* simulate.c: simulates hosts and devices until `end_ns`. */
void simulate(struct world *world);
/* program.c: chooses the next launch of a process; false: none now. */
bool choose(struct host *host);
bool wants_sync(const struct host *host);
uint64_t stall_ns(struct host *host); /* after a synchronisation */
bool polls(const struct host *host);  /* true if it waits without a call that the shim intercepts */
uint64_t pause_ns(struct host *host);
/* spoof.c: returns the published page `page` of a context; NULL: there are no more. */
const struct gs_activity *told(struct world *world, int context, unsigned page);
/* law.c: 0, or the time at which to ask again. */
uint64_t may_launch(struct host *host);
void set_env(struct world *world);

#endif
