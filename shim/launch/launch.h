/* Compute limits in the process: the check of a launch before it goes to the driver. The rate
 * limiter itself is in limiter/throttle.h; contexts, streams, events and activity files are in
 * accounting/.
 *
 *   a launch      gs_compute_passes (inline), else gs_compute_admit .. gs_compute_launched
 *   a sync        gs_compute_sync_begin .. gs_compute_sync_end
 *   a capture     gs_capture_opened .. gs_capture_closed
 *
 * Each thread remembers its last launches in each context: an unchanged launch that is paid for
 * needs no look-up, no clock and no other call to the driver. The memory is void once
 * `gs_compute_epoch` has changed (a context, stream, library or capture began or ended) or the rate
 * limiter has begun a new interval. */
#ifndef GPUSHARE_LAUNCH_H
#define GPUSHARE_LAUNCH_H

#include "accounting/compute.h"

/* ---- remembered launches -------------------------------------------------------------------- */

struct gs_remembered {
    const void *function;
    CUstream stream; /* as the program passed it: NULL is the legacy stream */
    struct gs_grid grid;
    uint32_t limiter_epoch; /* in which it counts; 0: it does not */
    uint64_t epoch;
    struct gs_throttle *throttle;
    struct gs_throttle_stream *s;
    struct gs_predictor *f;
};
#define GS_REMEMBERED 32u
_Static_assert(sizeof(struct gs_remembered) == 64, "one launch, one cache line");

struct gs_memory {
    _Alignas(64) struct gs_remembered launch[GS_REMEMBERED];
    CUcontext context;      /* the context that was current at these launches */
    struct gs_memory *next; /* of the same thread */
};

/* The memory of the current context. It is one word of static TLS, since little of it is left for a
 * library that is opened at run time. Never NULL: without a memory it points to one that matches no
 * launch. */
extern _Thread_local struct gs_memory *gs_memory_of_thread GS_HIDDEN;
extern struct gs_memory gs_no_memory GS_HIDDEN;

/* NULL: unknown. */
void gs_other_current(CUcontext context);
static inline void gs_now_current(CUcontext context) {
    if (gs_memory_of_thread->context != context)
        gs_other_current(context);
}

static inline struct gs_remembered *gs_remembered_at(struct gs_memory *memory, const void *function,
                                                     uint32_t x) {
    uint64_t mixed = ((uint64_t)(uintptr_t)function + x) * UINT64_C(0x3779b97f);
    return &memory->launch[mixed >> 20 & (GS_REMEMBERED - 1)];
}

/* Return true if a launch like `r` may go to the driver at once, with nothing to do after it. The
 * caller has already compared the grid. `crowded`: the caller has arguments in six registers. */
static inline __attribute__((always_inline)) bool
gs_remembered_passes(struct gs_remembered *r, const void *function, CUstream stream, bool crowded) {
    if (__builtin_expect(
            r->function != function || r->stream != stream ||
                r->epoch != atomic_load_explicit(&gs_compute_epoch, memory_order_relaxed) ||
                r->limiter_epoch != atomic_load_explicit(&r->throttle->epoch, memory_order_relaxed),
            0))
        return false;
    /* Then only three registers are free. Keeping the limiter in one of them would need a fourth,
     * and saving that one costs more than reading the limiter again. So tell the compiler that `r`
     * is another pointer from here on. */
    int64_t had = gs_throttle_allowance(r->throttle), ns;
    if (crowded)
        __asm__("" : "+r"(r), "+r"(had));
    ns = gs_throttle_expects(r->f);
    if (!gs_throttle_covers(had, ns))
        return false;
    if (crowded)
        __asm__ volatile("" : "+r"(r));
    return gs_throttle_pay(r->throttle, r->s, ns);
}

static inline __attribute__((always_inline)) bool
gs_compute_passes(const void *function, uint32_t x, uint32_t y, uint32_t z, CUstream stream) {
    struct gs_remembered *r = gs_remembered_at(gs_memory_of_thread, function, x);
    return __builtin_expect(r->grid.x == x && r->grid.y == y && r->grid.z == z, 1) &&
           gs_remembered_passes(r, function, stream, true);
}

/* No kernel has an empty grid, so one word of the grid identifies a graph. */
static inline __attribute__((always_inline)) bool gs_compute_passes_graph(const void *exec,
                                                                          CUstream stream) {
    struct gs_remembered *r = gs_remembered_at(gs_memory_of_thread, exec, 0);
    return __builtin_expect(r->grid.x == 0, 1) && gs_remembered_passes(r, exec, stream, false);
}

/* Resolve the driver's launch functions before anything is remembered. One wrapper may pass a
 * launch that another one remembered, and then calls the driver without a look-up. */
void gs_launches_ready(void);

/* ---- a launch ------------------------------------------------------------------------------- */

struct gs_admission {
    struct gs_compute *compute; /* NULL: nothing to do after the launch */
    CUcontext context;
    struct gs_predictor *f;
    struct gs_throttle_stream *s; /* where the launch is underway; NULL: it is not limited */
    bool mark;
};

/* Wait until the launch may go. Any result but CUDA_SUCCESS: it must not, since its limit could not
 * be enforced. `function` may be an executable graph (with an empty grid). `overlaps`: it may start
 * before earlier work in the stream has ended, so no marker may come between. `remember`: the next
 * launch like it needs no other look-up of the caller. */
CUresult gs_compute_admit(struct gs_admission *a, const void *function, struct gs_grid grid,
                          CUstream stream, bool overlaps, bool remember);
/* `result`: what the driver returned. */
void gs_compute_launched_marked(struct gs_admission *a, CUresult result);
static inline void gs_compute_launched(struct gs_admission *a, CUresult result) {
    if (a->s && atomic_load(&a->s->launch_ns))
        gs_throttle_entered(a->s, gs_now_ns());
    if (a->s)
        gs_throttle_went(a->s);
    if (a->mark)
        gs_compute_launched_marked(a, result);
}
/* An executable graph was changed: learn its duration again. */
void gs_compute_changed(const void *function);

/* ---- calls that block ----------------------------------------------------------------------- */

/* Return the context of a stream; NULL: the current one. */
static inline CUcontext gs_compute_context_of(CUstream stream) {
    struct gs_here here;
    return atomic_load_explicit(&gs_computes, memory_order_relaxed) &&
                   gs_here_of_stream(stream, &here)
               ? here.context
               : NULL;
}
/* `context` NULL: the current one. Return NULL if there is nothing to do at the end. */
struct gs_compute *gs_compute_sync_begin_in(CUcontext context);
void gs_compute_sync_end_in(struct gs_compute *compute);
static inline struct gs_compute *gs_compute_sync_begin(CUcontext context) {
    return atomic_load_explicit(&gs_computes, memory_order_relaxed)
               ? gs_compute_sync_begin_in(context)
               : NULL;
}
static inline CUresult gs_compute_sync_end(struct gs_compute *compute, CUresult result) {
    if (compute)
        gs_compute_sync_end_in(compute);
    return result;
}

/* The next work in `stream` waits for something other than work of its context. */
void gs_compute_waits_in(CUstream stream);
static inline void gs_compute_waits(CUstream stream) {
    if (atomic_load_explicit(&gs_computes, memory_order_relaxed))
        gs_compute_waits_in(stream);
}

/* ---- stream.c, capture.c, and streams that are destroyed --------------------------------------
 */

void gs_stream_gone(CUstream stream);
void gs_captures_stream_gone(CUstream stream);
void gs_captures_context_gone(CUcontext context);

/* Call before a stream is destroyed. */
void gs_compute_stream_goes(CUstream stream);

#endif
