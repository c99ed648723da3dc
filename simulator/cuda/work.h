/* Work: what a stream or a node of a graph executes. */
#ifndef SIM_WORK_H
#define SIM_WORK_H

#include "sim.h"

enum work_kind {
    WORK_EMPTY,
    WORK_KERNEL,
    WORK_COPY,
    WORK_SET,
    WORK_HOST,
    WORK_RECORD,
    WORK_WAIT,
    WORK_VALUE, /* wait for or write a value in memory */
    WORK_ALLOC,
    WORK_FREE,
    WORK_CHILD,
};

/* A copy between host-addressable boxes; pitches in bytes. */
struct copy {
    uint64_t dst, src;
    size_t width, height, depth;
    size_t dst_pitch, dst_slice, src_pitch, src_slice;
};

struct set {
    uint64_t dst;
    size_t pitch, width, height; /* width in elements */
    unsigned value, element_bytes;
};

struct value {
    uint64_t address, value;
    unsigned flags;
    bool wide, write;
};

struct kernel_call {
    struct function *function;
    CUDA_KERNEL_NODE_PARAMS params; /* as passed to the call; the parameter memory is not kept */
    bool waits, sets;               /* spins until the flag holds; writes it at its end */
    unsigned parts;                 /* parts of the device that it takes */
    bool programmatic;              /* may begin before the preceding kernel has ended */
    struct value flag;
};

/* A position in a stream that an event stands for. Shared by the event and the ops that wait for
 * it. */
struct mark {
    unsigned refs;
    bool submitted; /* its end time is known */
    bool done;
    struct context *ctx;
    uint64_t end_ns; /* in the context's attained time */
    uint64_t at_ns;  /* CLOCK_MONOTONIC, valid once done */
};

struct graph;
struct work {
    enum work_kind kind;
    uint64_t duration_ns;
    union {
        struct copy copy;
        struct set set;
        struct kernel_call kernel;
        struct value value;
        CUDA_HOST_NODE_PARAMS host;
        struct event *event;
        CUDA_MEM_ALLOC_NODE_PARAMS alloc;
        CUdeviceptr free;
        struct graph *child;
    };
    CUDA_MEMCPY3D copy_params; /* as passed for a graph node */
    CUDA_MEMSET_NODE_PARAMS set_params;
};

/* One piece of work in a stream. */
struct op {
    struct work work;
    struct graph_run *run; /* NULL: not part of a graph */
    unsigned node;
    struct mark *mark; /* RECORD: the mark to set. WAIT: the mark to wait for */
    uint64_t sequence;
    bool submitted;
    uint64_t end_ns;       /* attained time of its end, once submitted */
    uint64_t submitted_at; /* CLOCK_MONOTONIC */
    bool host_running;
    bool spinning; /* counted in its queue */
    struct op *next;
};

struct stream {
    uint32_t magic;
    struct context *ctx;
    unsigned flags;
    int priority;
    uint64_t id;
    uint64_t bytes; /* of the device; 0: a default stream, or no cost */
    bool legacy, per_thread;
    bool closed;              /* destroyed, with work on its way */
    enum work_kind last_kind; /* kind of the last added op */
    struct op *first, *last, *unsubmitted;
    uint64_t end_ns; /* end of the last submitted op */
    struct capture *capture;
    struct node **deps; /* while capturing: the next node depends on these */
    size_t n_deps;
    struct stream *next;
};

struct event {
    uint32_t magic;
    struct context *ctx;
    struct event *next; /* of the same context */
    unsigned flags;
    struct mark *mark; /* NULL: never recorded */
    struct capture *capture;
    struct node **deps;
    size_t n_deps;
};

static inline struct sim_device *device_of(const struct context *ctx) {
    return &sim.device[ctx->device].sim;
}
static inline uint64_t later(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

/* engine.c */
extern uint64_t engine_sequence; /* sequence number of the last added op */
CUresult engine_add(struct stream *stream, const struct work *work, struct mark *mark);
/* The same for a node of a graph, whose run determines when it begins. */
CUresult engine_add_node(struct stream *stream, const struct work *work, struct mark *mark,
                         struct graph_run *run, unsigned node);
/* Releases an op that is dropped before it is done. */
void engine_forget(struct op *op, struct context *ctx);
void engine_progress(struct context *ctx);
void mark_drop(struct mark *mark);

/* wait.c */
/* Releases the process lock and sleeps until the context can have attained end_ns (if the
 * awaited op is submitted), or for a short time. */
void engine_nap(struct context *ctx, uint64_t end_ns, bool submitted);
CUresult engine_wait_stream(struct stream *stream);
/* Waits for all work issued so far in the context's streams, or only in the blocking streams. */
CUresult engine_wait_streams(struct context *ctx, bool blocking_only);
CUresult engine_wait_mark(struct mark *mark);
bool engine_stream_idle(struct stream *stream);
bool engine_mark_done(struct mark *mark);
/* Spins until then: simulates the cost of a call, or waits for a very short time. */
void engine_spend(uint64_t until_ns);

/* graphrun.c: when a node of a launched graph may begin, and a record of when it ends. Times are
 * the context's; `stream_ns` is the end of the work before the graph in the stream. */
uint64_t graph_run_ready(struct graph_run *run, unsigned node, uint64_t stream_ns);
void graph_run_end(struct graph_run *run, unsigned node, uint64_t end_ns);
void graph_run_drop(struct graph_run *run);

/* service.c: the thread for work that needs a processor: host functions and values in memory */
void service_need(void);

/* late.c: memory that is freed in the order of a stream */
CUresult late_free(struct stream *stream, uint64_t va);
void late_forget(uint64_t va); /* its work is dropped */
void late_due(uint64_t va);    /* the earlier work has ended; may be called with a device locked */
void late_free_due(void);

/* stream.c */
struct stream *stream_of(struct context *ctx, CUstream handle);
void streams_drop_closed(struct context *ctx); /* frees destroyed streams whose work is done */
bool stream_blocks_with_legacy(const struct stream *stream);

/* dispatch.c: sends work to the device, or to the graph that the stream is capturing */
CUresult dispatch(CUstream stream, const struct work *work, bool synchronous);
CUresult dispatch_on(struct stream *stream, const struct work *work);
uint64_t copy_duration_ns(uint64_t bytes);
CUresult copy_work(const CUDA_MEMCPY3D *params, struct work *work);
CUresult set_work(const CUDA_MEMSET_NODE_PARAMS *params, struct work *work);
CUresult kernel_work(struct context *ctx, const CUDA_KERNEL_NODE_PARAMS *params, struct work *work);
void run_copy(const struct copy *copy);
void run_set(const struct set *set);
void run_value_write(const struct value *value);
bool value_holds(const struct value *value);

/* graphmem.c: memory of allocation nodes */
CUdeviceptr graph_alloc_address(struct node *node);

/* capture.c */
CUresult capture_work(struct stream *stream, const struct work *work, struct node **node);
CUresult capture_wait_event(struct stream *stream, struct event *event);
CUresult capture_record_event(struct stream *stream, struct event *event, unsigned flags);
void capture_forget_event(struct event *event);
void capture_abandon(struct stream *stream);
/* False: a synchronising call now would break a capture, which is now invalid. NULL: any stream. */
bool capture_allows_wait(struct stream *stream);
/* The same check for work in the legacy stream. */
bool capture_allows_legacy(struct stream *stream);
#endif
