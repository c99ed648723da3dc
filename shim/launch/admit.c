/* Launches that the thread does not remember, or that are not paid for yet, and calls that block.
 * The context's lock is held while the rate limiter decides, never during a wait or during the
 * launch itself. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "accounting/compute_parts.h"
#include "launch.h"
#include "oversubscription/oversubscription.h"

#define OVERLAP (4 * MS) /* maximum time without a marker for launches that overlap */
#define UNMARKED 64u     /* a stream with so many failed markers cannot be limited */
#define MEMORIES 8u      /* number of contexts whose launches a thread remembers */

struct gs_memory gs_no_memory; /* no launch has an epoch of 0; never written to */
_Thread_local struct gs_memory *gs_memory_of_thread = &gs_no_memory;

static pthread_key_t at_exit_of_thread;
static _Atomic int key_state; /* 0: none yet, 1: being created, 2: created, 3: failed */

/* ---- remembered launches -------------------------------------------------------------------- */

static void thread_ends(void *first) {
    gs_memory_of_thread = &gs_no_memory; /* later destructors of this thread may still launch */
    for (struct gs_memory *memory = first, *next; memory; memory = next) {
        next = memory->next;
        free(memory);
    }
}

static bool create_key(void) {
    int none = 0;
    if (atomic_compare_exchange_strong(&key_state, &none, 1))
        atomic_store(&key_state, pthread_key_create(&at_exit_of_thread, thread_ends) == 0 ? 2 : 3);
    return atomic_load(&key_state) == 2;
}

void gs_other_current(CUcontext context) {
    struct gs_memory *memory =
        context && atomic_load(&key_state) == 2 ? pthread_getspecific(at_exit_of_thread) : NULL;
    while (memory && memory->context != context)
        memory = memory->next;
    gs_memory_of_thread = memory ? memory : &gs_no_memory;
}

/* Create the memory of launches for `context`, which has none. At MEMORIES contexts, reuse the
 * oldest. */
static bool make_memory(CUcontext context) {
    if (!create_key())
        return false;
    struct gs_memory *first = pthread_getspecific(at_exit_of_thread), *fresh = NULL;
    unsigned n = 0;
    for (struct gs_memory **at = &first; *at; at = &(*at)->next)
        if (++n == MEMORIES) {
            fresh = *at;
            *at = NULL;
            break;
        }
    if (!fresh)
        fresh = aligned_alloc(_Alignof(struct gs_memory), sizeof(*fresh));
    if (!fresh)
        return false;
    memset(fresh, 0, sizeof(*fresh));
    fresh->context = context;
    fresh->next = first;
    if (pthread_setspecific(at_exit_of_thread, fresh) != 0) {
        free(fresh);
        return false;
    }
    gs_memory_of_thread = fresh;
    return true;
}

static void remember_launch(CUcontext context, const struct gs_remembered *what) {
    gs_now_current(context);
    if (context && (gs_memory_of_thread != &gs_no_memory || make_memory(context)))
        *gs_remembered_at(gs_memory_of_thread, what->function, what->grid.x) = *what;
}

/* ---- around the rate limiter ---------------------------------------------------------------- */

struct bracket {
    CUcontext before;
    CUstreamCaptureMode mode;
    bool pushed, relaxed;
};

/* Make `context` current and lock its record, so that the shim's own calls run in it and break no
 * capture of the program. Return false if the record belongs to another context now; then another
 * thread may have destroyed the context's streams and events, so only leave. */
static bool enter_context(struct bracket *b, struct gs_compute *c, CUcontext context) {
    *b = (struct bracket){.mode = CU_STREAM_CAPTURE_MODE_RELAXED};
    __typeof__(&cuThreadExchangeStreamCaptureMode) exchange =
        GS_REAL(cuThreadExchangeStreamCaptureMode);
    b->relaxed = exchange && exchange(&b->mode) == CUDA_SUCCESS;
    if (GS_REAL(cuCtxGetCurrent)(&b->before) == CUDA_SUCCESS && b->before != context)
        b->pushed = GS_REAL(cuCtxPushCurrent_v2)(context) == CUDA_SUCCESS;
    gs_lock(c->lock);
    while (c->leaves) {
        uint64_t generation = c->limits_seen;
        gs_unlock(c->lock);
        gs_compute_wait(gs_compute_now() + POLL, generation);
        gs_lock(c->lock);
    }
    c->peers_read = false;
    c->throttle.capturing =
        gs_captures_stop_markers() || (atomic_load(&gs_captures) && !b->relaxed);
    c->mixed = gs_compute_is_mixed(c);
    gs_compute_limits(c);
    return atomic_load(&c->context) == context;
}

static void leave_context(struct bracket *b, struct gs_compute *c) {
    CUcontext popped;
    gs_unlock(c->lock);
    if (b->pushed)
        GS_REAL(cuCtxPopCurrent_v2)(&popped);
    if (b->relaxed)
        GS_REAL(cuThreadExchangeStreamCaptureMode)(&b->mode);
}

/* ---- a launch ------------------------------------------------------------------------------- */

struct request {
    const void *function;
    struct gs_grid grid;
    CUstream stream;
    bool overlaps;
    struct gs_known_stream *s;
    struct gs_predictor *f;
    uint64_t generation;
    CUresult refused;
    bool counted;           /* as underway in its stream */
    uint32_t limiter_epoch; /* in which launches like this one count; 0: they do not */
};

/* Return 0 to launch now, else when to ask again. */
static uint64_t ask_limiter(struct gs_compute *c, CUcontext context, struct request *w,
                            bool *mark) {
    struct bracket b;
    bool there = enter_context(&b, c, context);
    uint64_t until = 0;
    w->generation = c->limits_seen;
    if (!there) { /* the context was destroyed: the driver will report it */
        leave_context(&b, c);
        return 0;
    }
    w->s = gs_compute_stream(c, w->stream);
    if (!w->s) { /* all known streams have launches without a marker */
        gs_throttle_launched(&c->throttle);
        w->s = gs_compute_stream(c, w->stream);
    }
    w->f = gs_compute_function(c, w->function, w->grid);
    if (c->stopped) {
        until = gs_compute_stopped(c);
    } else if (!w->s ||
               (w->s->unmarked > UNMARKED && c->throttle.limit.mode != GS_THROTTLE_UNLIMITED)) {
        w->refused = CUDA_ERROR_NOT_SUPPORTED;
        gs_log("launch refused", "the shim cannot time this stream, so it cannot enforce the limit",
               "start the container without GPUSHARE_COMPUTE");
    } else {
        if (w->overlaps && gs_compute_now() - c->marked_ns < OVERLAP)
            c->throttle.capturing = true;
        until = gs_throttle_slow(&c->throttle, &w->s->throttle, w->f);
        w->counted = !until;
        /* If several threads have per-thread streams, each thread marks its launches at once: no
         * other thread can do it later. */
        *mark = w->s->throttle.mark || (w->stream == CU_STREAM_PER_THREAD && c->per_thread > 1 &&
                                        !until && !c->throttle.capturing);
        if (gs_throttle_counts(&c->throttle, &w->s->throttle, w->f))
            w->limiter_epoch = atomic_load(&c->throttle.epoch);
    }
    leave_context(&b, c);
    return until;
}

CUresult gs_compute_admit(struct gs_admission *a, const void *function, struct gs_grid grid,
                          CUstream stream, bool overlaps, bool again) {
    struct gs_here here;
    CUstream named = stream ? stream : CU_STREAM_LEGACY;
    struct request w = {function, grid, named, overlaps, NULL, NULL, 0, CUDA_SUCCESS, false, 0};
    uint64_t until;
    *a = (struct gs_admission){0};
    uint64_t epoch = atomic_load(&gs_compute_epoch);
    uint32_t captures = atomic_load(&gs_captures);
    if (!gs_slot() || gs_compute_is_capturing(named))
        return CUDA_SUCCESS;
    CUcontext current = NULL;
    if (!gs_here_of_stream(stream, &here) || GS_REAL(cuCtxGetCurrent)(&current) != CUDA_SUCCESS)
        return CUDA_SUCCESS; /* the driver will refuse the launch */
    gs_now_current(current);
    if (!captures && gs_slices_needed(here.dev)) { /* each launch must ask, so none is remembered */
        again = false;
        if (current == here.context)
            gs_slice_admit(&here, stream);
    }
    struct gs_compute *c = gs_compute_of(&here);
    if (!c && gs_compute_is_limited(here.dev))
        return CUDA_ERROR_NOT_SUPPORTED; /* the process has more contexts than can be tracked */
    while (!c && gs_compute_is_paused(here.dev, &w.generation))
        gs_compute_wait(gs_compute_now() + 1000 * MS, w.generation);
    while (c && (until = ask_limiter(c, here.context, &w, &a->mark)))
        gs_compute_wait(until, w.generation);
    if (!c || w.refused != CUDA_SUCCESS)
        return w.refused;
    a->s = w.counted ? &w.s->throttle : NULL;
    if (a->mark) {
        a->compute = c;
        a->context = here.context;
        a->f = w.f;
    }
    if (again && !captures && w.s)
        remember_launch(current, &(struct gs_remembered){function, stream, grid, w.limiter_epoch,
                                                         epoch, &c->throttle, &w.s->throttle, w.f});
    return CUDA_SUCCESS;
}

void gs_compute_launched_marked(struct gs_admission *a, CUresult result) {
    struct gs_compute *c = a->compute;
    struct bracket b;
    if (enter_context(&b, c, a->context)) {
        uint32_t marked = c->throttle.marked;
        if (result != CUDA_SUCCESS)
            gs_throttle_refused(&c->throttle, a->f);
        gs_throttle_launched(&c->throttle);
        if (c->throttle.marked == marked) /* not recorded: the launch will not be measured */
            a->f->probing = false;
    }
    leave_context(&b, c);
}

/* ---- calls that block ----------------------------------------------------------------------- */

struct gs_compute *gs_compute_sync_begin_in(CUcontext context) {
    struct bracket b;
    if (!gs_slot() || (!context && GS_REAL(cuCtxGetCurrent)(&context) != CUDA_SUCCESS))
        return NULL;
    struct gs_compute *c = gs_compute_find(context);
    /* Without launches since the last marker there is nothing to do. This check is all that most
     * synchronisations of a program cost. */
    if (!c || !__atomic_load_n(&c->throttle.dirty, __ATOMIC_RELAXED))
        return c;
    if (enter_context(&b, c, context))
        gs_throttle_sync_begin(&c->throttle);
    leave_context(&b, c);
    return c;
}

void gs_compute_sync_end_in(struct gs_compute *c) {
    struct bracket b;
    CUcontext context = atomic_load(&c->context);
    if (!context || __atomic_load_n(&c->throttle.marked, __ATOMIC_RELAXED) ==
                        __atomic_load_n(&c->throttle.finished, __ATOMIC_RELAXED))
        return;
    if (enter_context(&b, c, context))
        gs_throttle_sync_end(&c->throttle);
    leave_context(&b, c);
}

/* Record the stream, even if it has had no launch yet. */
void gs_compute_waits_in(CUstream stream) {
    struct gs_here here;
    struct bracket b;
    CUstream named = stream ? stream : CU_STREAM_LEGACY;
    if (!gs_slot() || !gs_here_of_stream(stream, &here) || gs_compute_is_capturing(named))
        return;
    struct gs_compute *c = gs_compute_find(here.context);
    if (!c)
        return;
    struct gs_known_stream *s =
        enter_context(&b, c, here.context) ? gs_compute_stream(c, named) : NULL;
    if (s)
        gs_throttle_waits(&c->throttle, &s->throttle);
    leave_context(&b, c);
}

/* ---- streams that are destroyed -------------------------------------------------------------- */

static void unlink_stream(struct gs_throttle *t, struct gs_throttle_stream *s) {
    struct gs_throttle_stream **at = &t->dirty;
    while (*at && *at != s)
        at = &(*at)->next_dirty;
    if (*at)
        SHOW(*at, s->next_dirty);
    s->dirty = false;
}

void gs_compute_stream_goes(CUstream stream) {
    struct gs_here here;
    struct bracket b;
    if (!atomic_load(&gs_computes) || !gs_slot() || !gs_here_of_stream(stream, &here))
        return;
    struct gs_compute *c = gs_compute_find(here.context);
    if (!c)
        return;
    struct gs_known_stream *s =
        enter_context(&b, c, here.context) ? gs_compute_stream_if_known(c, stream) : NULL;
    if (s && s->throttle.dirty)
        gs_throttle_launched(&c->throttle);
    if (s && s->throttle.dirty)
        unlink_stream(&c->throttle, &s->throttle);
    if (s)
        s->handle = NULL;
    leave_context(&b, c);
    gs_compute_forget();
}
