/* The contexts of this process that launch: one rate limiter each, from the first launch until the
 * context ends. */
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "compute_parts.h"

#define OLD_DEBT (250 * MS) /* the part of a debt that remains when a limit is raised */

_Atomic uint32_t gs_computes;
_Atomic uint64_t gs_compute_epoch = 1;
const struct gs_limits *gs_compute_limits_file;

static _Atomic(struct gs_compute *) table[GS_MAX_COMPUTES];

uint64_t gs_compute_now(void) {
    return gs_now_ns();
}

/* ---- limits -----------------------------------------------------------------------------------
 */

static uint32_t load_relaxed(const uint32_t *of) {
    return __atomic_load_n(of, __ATOMIC_RELAXED);
}

/* A debt is wall time at the limit under which it was made; at a higher limit, paying it back would
 * take too long. Every process of the container calls this, so the debt is capped, not divided. */
static void cap_debt(struct gs_bucket *bucket) {
    uint64_t most = gs_compute_now() + OLD_DEBT, tat = atomic_load(&bucket->tat_ns);
    while (tat > most && !atomic_compare_exchange_weak(&bucket->tat_ns, &tat, most))
        ;
}

void gs_compute_limits(struct gs_compute *c) {
    const struct gs_limits *file = gs_compute_limits_file;
    if (c->limits_seen == __atomic_load_n(&file->generation, __ATOMIC_ACQUIRE))
        return;
    struct gs_limit_now now = gs_limit_now(file, (unsigned)c->dev);
    struct gs_throttle_limit limit =
        gs_compute_limit(now.percent < 1 ? 1 : now.percent, now.flags, now.priority);
    c->limits_seen = now.generation;
    if (limit.ppm > c->throttle.limit.ppm)
        cap_debt(c->throttle.bucket);
    c->throttle.limit = limit;
    c->throttle.rate_ppm = limit.ppm;
    c->stopped = now.flags & GS_DEVICE_PAUSED;
}

void gs_compute_forget_all(void) {
    gs_compute_forget();
}

bool gs_compute_is_limited(int dev) {
    if (dev < 0)
        return false; /* not granted, so no memory on the device can be allocated either */
    struct gs_limit_now now = gs_limit_now(gs_compute_limits_file, (unsigned)dev);
    return now.percent < GS_NO_PERCENT || now.flags & GS_DEVICE_COMPUTE_SOFT;
}

bool gs_compute_is_paused(int dev, uint64_t *generation) {
    if (dev < 0)
        return false;
    struct gs_limit_now now = gs_limit_now(gs_compute_limits_file, (unsigned)dev);
    *generation = now.generation;
    return now.flags & GS_DEVICE_PAUSED;
}

/* While launches are held, detect completion of the work on the device and publish it to peers.
 * Return when to check again. */
uint64_t gs_compute_stopped(struct gs_compute *c) {
    struct gs_throttle *t = &c->throttle;
    uint64_t now = gs_compute_now();
    gs_throttle_launched(t);
    gs_throttle_sync_end(t);
    uint64_t work = t->in_flight_ns > 0 ? (uint64_t)t->in_flight_ns : 0;
    return now + (t->capturing || t->marked == t->finished ? 1000 * MS : MS + work / 2);
}

bool gs_compute_ready(const struct gs_view *view) {
    gs_compute_limits_file = view->limits;
    for (uint32_t i = 0; i < view->limits->n_devices; i++) {
        if (!gs_activity_are_open((int)i) && !gs_activity_open(view->limits, i) &&
            gs_compute_is_limited((int)i))
            return false;
    }
    return true;
}

/* ---- environment of the rate limiter -------------------------------------------------------- */

static uint64_t env_now(void *arg) {
    (void)arg;
    return gs_compute_now();
}

/* Not during a capture: creating a stream may invalidate it. */
static int record_probe_event(struct gs_compute *c) {
    if (c->no_probe_stream || atomic_load(&gs_captures))
        return -1;
    if (!c->probe_stream &&
        (!GS_REAL(cuStreamCreate) ||
         GS_REAL(cuStreamCreate)(&c->probe_stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)) {
        c->probe_stream = NULL;
        c->no_probe_stream = true;
        return -1;
    }
    uint64_t marked_ns = c->marked_ns;
    int event = gs_clock_mark(c, c->probe_stream);
    c->marked_ns = marked_ns;
    return event;
}

/* Only its own thread marks a per-thread stream. Work in the legacy stream waits for all earlier
 * work in blocking streams, and delays all later work in them. If both have launches, a marker
 * could close a cycle of waiting that the program does not have. */
static int env_mark(void *arg, uint32_t number) {
    struct gs_compute *c = arg;
    if (number == GS_LOOKS)
        return record_probe_event(c);
    struct gs_known_stream *s = &c->stream[number];
    if (!s->handle ||
        (s->handle == CU_STREAM_PER_THREAD && gs_compute_stream_if_known(c, s->handle) != s) ||
        (s->handle == CU_STREAM_LEGACY && c->mixed) ||
        (s->handle == CU_STREAM_LEGACY && atomic_load(&gs_captures)) ||
        gs_compute_is_capturing(s->handle))
        return -1;
    int event = gs_clock_mark(c, s->handle);
    s->unmarked = event < 0 ? s->unmarked + 1 : 0;
    return event;
}

static bool env_done(void *arg, int event, uint64_t *stamp_ns) {
    return gs_clock_done(arg, event, stamp_ns);
}

/* The shim does not track copies and similar work in the stream, so ask the driver. */
static bool env_idle(void *arg, uint32_t number) {
    const struct gs_known_stream *s = &((struct gs_compute *)arg)->stream[number];
    return s->handle && !atomic_load(&gs_captures) && GS_REAL(cuStreamQuery) &&
           !gs_compute_is_capturing(s->handle) && GS_REAL(cuStreamQuery)(s->handle) == CUDA_SUCCESS;
}

static uint32_t env_others(void *arg) {
    return gs_activity_others_ppm(arg);
}

static void env_trace(void *arg, const struct gs_trace *record) {
    gs_trace_write(((struct gs_compute *)arg)->dev, record);
}

static unsigned env_turns(void *arg, struct gs_turn_of *out, unsigned max) {
    return gs_activity_turns(((struct gs_compute *)arg)->dev, out, max);
}

static unsigned env_peers(void *arg, struct gs_peer *out, unsigned max) {
    struct gs_compute *c = arg;
    if (!c->peers_read) {
        c->peers_n = gs_activity_peers(c, c->peer, MAX_PEERS);
        c->peers_read = true;
    }
    unsigned n = c->peers_n < max ? c->peers_n : max;
    memcpy(out, c->peer, n * sizeof(*out));
    return n;
}

/* ---- the table ------------------------------------------------------------------------------ */

struct gs_compute *gs_compute_find(CUcontext context) {
    for (unsigned i = 0; context && i < GS_MAX_COMPUTES; i++) {
        struct gs_compute *c = atomic_load_explicit(&table[i], memory_order_acquire);
        if (!c)
            return NULL;
        if (atomic_load_explicit(&c->context, memory_order_acquire) == context)
            return c;
    }
    return NULL;
}

/* Make a record for the context; the caller holds lock_context. */
static struct gs_compute *make_record(const struct gs_here *here) {
    unsigned i = 0;
    struct gs_compute *c = NULL;
    while (i < GS_MAX_COMPUTES && (c = atomic_load(&table[i])) && atomic_load(&c->context))
        i++;
    if (i == GS_MAX_COMPUTES)
        return NULL;
    if (!c) {
        c = mmap(NULL, sizeof(*c), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (c == MAP_FAILED)
            return NULL;
        c->lock = &gs_self()->lock_compute[i];
    }
    gs_lock(c->lock);
    if (c->used) { /* by another context; untouched pages of a new record stay unallocated */
        memset(c->stream, 0, sizeof(c->stream));
        memset(c->function, 0, sizeof(c->function));
        memset(&c->clock, 0, sizeof(c->clock));
    }
    c->used = true;
    c->leaves = false;
    c->dev = here->dev;
    c->streams = c->per_thread = 0;
    c->has_legacy = c->no_probe_stream = false;
    c->probe_stream = NULL;
    struct gs_activity left;
    gs_activity_claim(c, &left);
    c->env = (struct gs_throttle_env){c,          env_now,   env_mark,
                                      env_done,   env_peers, env_idle,
                                      env_others, env_turns, gs_trace_is_on() ? env_trace : NULL};
    gs_throttle_init(&c->throttle, &c->env, &gs_region()->usage->bucket[c->dev], c->page,
                     load_relaxed(&gs_compute_limits_file->device[c->dev].page));
    const struct gs_device_limit *l = &gs_compute_limits_file->device[c->dev];
    uint32_t slice_ns = load_relaxed(&l->slice_ns), switch_ns = load_relaxed(&l->switch_ns);
    c->throttle.turn = gs_activity_turn(c->dev);
    c->throttle.round_ns = GS_ROUND_MS(load_relaxed(&gs_compute_limits_file->flags)) * MS;
    c->throttle.slice_ns = slice_ns ? slice_ns : c->throttle.slice_ns;
    c->throttle.switch_ns = switch_ns ? switch_ns : c->throttle.switch_ns;
    c->limits_seen = 0;
    gs_compute_limits(c);
    gs_throttle_inherit(&c->throttle, &left, gs_compute_now());
    atomic_store(&c->context, here->context);
    gs_unlock(c->lock);
    atomic_store(&table[i], c);
    atomic_fetch_add(&gs_computes, 1);
    return c;
}

struct gs_compute *gs_compute_of(const struct gs_here *here) {
    struct gs_compute *c = gs_compute_find(here->context);
    if (c || !gs_activity_are_open(here->dev))
        return c;
    gs_lock(&gs_self()->lock_context);
    c = gs_compute_find(here->context);
    if (!c)
        c = make_record(here);
    gs_unlock(&gs_self()->lock_context);
    return c;
}

/* ---- contexts that go ----------------------------------------------------------------------- */

/* Work on the device cannot be timed by events that are destroyed with the context. It is charged
 * from the last known timestamp until the context has ended, less what was paid. No other thread
 * uses these events until the result is known (enter_context, in launch/admit.c): the driver may
 * also refuse to destroy the context, and then nothing is charged. */
void gs_compute_context_goes(struct gs_leaving *leaving, CUcontext context) {
    struct gs_compute *c = gs_compute_find(context);
    *leaving = (struct gs_leaving){.compute = NULL};
    if (!c)
        return;
    gs_lock(c->lock);
    if (atomic_load(&c->context) == context && !c->leaves) { /* no other thread was first */
        struct gs_throttle *t = &c->throttle;
        c->peers_read = false;
        if (!t->capturing && !atomic_load(&gs_captures))
            gs_throttle_sync_end(t);
        int64_t paid = t->in_flight_ns + (t->open.launches ? t->open.hint_ns : 0);
        if (paid > 0) {
            leaving->paid_ns = paid;
            leaving->since_ns = max64(t->covered_ns, t->busy_from_ns);
        }
        c->leaves = true;
        leaving->compute = c;
        gs_no_cancel();
    }
    gs_unlock(c->lock);
    gs_compute_forget();
}

/* Its events and its probe stream were destroyed with it. */
static void release_record(struct gs_compute *c) {
    memset(&c->clock, 0, sizeof(c->clock));
    c->probe_stream = NULL;
    gs_activity_give(c);
    atomic_store(&c->context, NULL);
    atomic_fetch_sub(&gs_computes, 1);
}

/* An error of earlier work does not tell whether the context was destroyed; assume so. */
static bool was_refused(CUresult result) {
    return result == CUDA_ERROR_INVALID_CONTEXT || result == CUDA_ERROR_INVALID_VALUE ||
           result == CUDA_ERROR_INVALID_DEVICE || result == CUDA_ERROR_NOT_INITIALIZED;
}

void gs_compute_context_gone(struct gs_leaving *leaving, CUresult result, bool stays) {
    struct gs_compute *c = leaving->compute;
    if (!c)
        return;
    gs_lock(c->lock);
    uint64_t now = gs_compute_now();
    int64_t took = (int64_t)(now - min64(now, leaving->since_ns));
    stays |= was_refused(result);
    if (!stays && leaving->since_ns && c->throttle.limit.mode != GS_THROTTLE_UNLIMITED &&
        (result == CUDA_SUCCESS || took > leaving->paid_ns))
        gs_bucket_adjust(&c->throttle, took - leaving->paid_ns, now);
    c->leaves = false;
    if (!stays)
        release_record(c);
    gs_unlock(c->lock);
    gs_cancel_again();
}

/* The context ended without a call that announced it. */
void gs_compute_context_lost(CUcontext context) {
    struct gs_compute *c = gs_compute_find(context);
    if (!c)
        return;
    gs_lock(c->lock);
    if (atomic_load(&c->context) == context && !c->leaves)
        release_record(c);
    gs_unlock(c->lock);
    gs_compute_forget();
}

/* ---- functions that change ------------------------------------------------------------------ */

/* The measured duration stays the expectation until the first new measurement, which then counts
 * fully. */
void gs_compute_changed(const void *function) {
    for (unsigned i = 0; i < GS_MAX_COMPUTES && atomic_load(&gs_computes) && gs_slot(); i++) {
        struct gs_compute *c = atomic_load_explicit(&table[i], memory_order_acquire);
        if (!c)
            return;
        gs_lock(c->lock);
        for (unsigned k = 0; k < GS_PREDICTORS; k++)
            if (c->function[k].function == function)
                c->function[k].predictor.samples = 0;
        gs_unlock(c->lock);
    }
}
