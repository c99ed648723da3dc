/* The contexts of this process that launch: one law each, from their first launch until they go. */
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "compute_parts.h"

_Atomic uint32_t gs_computes;
_Atomic uint64_t gs_compute_epoch = 1;
const struct gs_limits *gs_compute_limits_file;

static _Atomic(struct gs_compute *) table[GS_MAX_COMPUTES];

uint64_t gs_compute_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- limits -----------------------------------------------------------------------------------
 */

static uint32_t word(const uint32_t *of) {
    return __atomic_load_n(of, __ATOMIC_RELAXED);
}

void gs_compute_limits(struct gs_compute *c) {
    const struct gs_device_limit *l = &gs_compute_limits_file->device[c->dev];
    uint64_t generation = __atomic_load_n(&gs_compute_limits_file->generation, __ATOMIC_ACQUIRE);
    if (c->limits_seen == generation)
        return;
    c->limits_seen = generation;
    uint32_t percent = word(&l->compute_percent), flags = word(&l->flags);
    percent = percent < 1 ? 1 : percent < 100 ? percent : 100;
    struct gs_throttle_limit limit = {.ppm = percent * 10000,
                                      .weight = word(&l->weight),
                                      .priority = word(&l->priority),
                                      .mode = flags & GS_DEVICE_COMPUTE_SOFT ? GS_THROTTLE_SOFT
                                              : percent < 100                ? GS_THROTTLE_HARD
                                                              : GS_THROTTLE_UNLIMITED};
    c->law.limit = limit;
    c->law.rate_ppm = limit.weight ? c->law.rate_ppm : limit.ppm;
    c->stopped = flags & GS_DEVICE_PAUSED;
}

bool gs_compute_is_limited(int dev) {
    if (dev < 0)
        return false; /* not granted: there is no memory on it either */
    const struct gs_device_limit *l = &gs_compute_limits_file->device[dev];
    return word(&l->compute_percent) < GS_NO_PERCENT ||
           word(&l->flags) & (GS_DEVICE_COMPUTE_SOFT | GS_DEVICE_PAUSED);
}

bool gs_compute_ready(const struct gs_view *view) {
    gs_compute_limits_file = view->limits;
    for (uint32_t i = 0; i < view->limits->n_devices; i++) {
        if (!gs_pages_are_open((int)i) && !gs_pages_open(view->limits, i) &&
            gs_compute_is_limited((int)i))
            return false;
    }
    return true;
}

/* ---- what the law is given ----------------------------------------------------------------------
 */

static uint64_t env_now(void *arg) {
    (void)arg;
    return gs_compute_now();
}

/* A per-thread stream is marked by its own thread only. What is put into the legacy stream waits
 * for all that was launched before it into streams that block, and holds up what comes after: where
 * both were launched into, a marker could close a circle of waiting that the program does not have.
 */
static int env_mark(void *arg, uint32_t number) {
    struct gs_compute *c = arg;
    struct gs_known_stream *s = &c->stream[number];
    if (!s->handle ||
        (s->handle == CU_STREAM_PER_THREAD && gs_compute_stream_if_known(c, s->handle) != s) ||
        (s->handle == CU_STREAM_LEGACY && c->mixed))
        return -1;
    int event = gs_clock_mark(c, s->handle);
    s->unmarked = event < 0 ? s->unmarked + 1 : 0;
    return event;
}

static bool env_done(void *arg, int event, uint64_t *stamp_ns) {
    return gs_clock_done(arg, event, stamp_ns);
}

static unsigned env_peers(void *arg, struct gs_peer *out, unsigned max) {
    struct gs_compute *c = arg;
    if (!c->peers_read) {
        c->peers_n = gs_pages_peers(c, c->peer, MAX_PEERS);
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

/* A record for `context`; the caller holds lock_context. */
static struct gs_compute *make(const struct gs_here *here) {
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
    if (c->used) { /* of another context; fresh memory is not touched before it is needed */
        memset(c->stream, 0, sizeof(c->stream));
        memset(c->function, 0, sizeof(c->function));
        memset(&c->clock, 0, sizeof(c->clock));
    }
    c->used = true;
    c->dev = here->dev;
    c->streams = c->per_thread = 0;
    c->has_legacy = false;
    gs_pages_claim(c);
    c->env = (struct gs_throttle_env){c, env_now, env_mark, env_done, env_peers};
    gs_throttle_init(&c->law, &c->env, &gs_region()->usage->bucket[c->dev], c->page,
                     word(&gs_compute_limits_file->device[c->dev].page));
    const struct gs_device_limit *l = &gs_compute_limits_file->device[c->dev];
    c->law.slice_ns = word(&l->slice_ns) ? word(&l->slice_ns) : c->law.slice_ns;
    c->law.switch_ns = word(&l->switch_ns) ? word(&l->switch_ns) : c->law.switch_ns;
    c->limits_seen = 0;
    gs_compute_limits(c);
    atomic_store(&c->context, here->context);
    gs_unlock(c->lock);
    atomic_store(&table[i], c);
    atomic_fetch_add(&gs_computes, 1);
    return c;
}

struct gs_compute *gs_compute_of(const struct gs_here *here) {
    struct gs_compute *c = gs_compute_find(here->context);
    if (c || !gs_pages_are_open(here->dev))
        return c;
    gs_lock(&gs_self()->lock_context);
    c = gs_compute_find(here->context);
    if (!c)
        c = make(here);
    gs_unlock(&gs_self()->lock_context);
    return c;
}

/* ---- contexts that go ----------------------------------------------------------------------- */

/* What it has on the device cannot be timed by events that go with it. It is charged from the last
 * known stamp until the context has gone, less what was paid. */
void gs_compute_context_goes(struct gs_leaving *leaving, CUcontext context) {
    struct gs_compute *c = gs_compute_find(context);
    *leaving = (struct gs_leaving){.compute = c};
    if (!c)
        return;
    gs_lock(c->lock);
    struct gs_throttle *t = &c->law;
    c->peers_read = false;
    if (!t->capturing && !atomic_load(&gs_captures))
        gs_throttle_sync_end(t);
    int64_t paid = t->in_flight_ns + (t->open.launches ? t->open.hint_ns : 0);
    if (paid > 0) {
        leaving->paid_ns = paid;
        leaving->since_ns = max64(t->covered_ns, t->busy_from_ns);
    }
    gs_clock_close(&c->clock);
    gs_unlock(c->lock);
    gs_compute_forget();
}

void gs_compute_context_gone(struct gs_leaving *leaving) {
    struct gs_compute *c = leaving->compute;
    if (!c)
        return;
    gs_lock(c->lock);
    uint64_t now = gs_compute_now();
    if (leaving->since_ns && now > leaving->since_ns && c->law.limit.mode != GS_THROTTLE_UNLIMITED)
        gs_throttle_adjust(&c->law, (int64_t)(now - leaving->since_ns) - leaving->paid_ns, now);
    gs_pages_give(c);
    atomic_store(&c->context, NULL);
    gs_unlock(c->lock);
    atomic_fetch_sub(&gs_computes, 1);
}

/* It went without having been said to go: its events went with it. */
void gs_compute_context_lost(CUcontext context) {
    struct gs_leaving leaving = {.compute = gs_compute_find(context)};
    if (!leaving.compute)
        return;
    gs_lock(leaving.compute->lock);
    memset(&leaving.compute->clock, 0, sizeof(leaving.compute->clock));
    gs_unlock(leaving.compute->lock);
    gs_compute_forget();
    gs_compute_context_gone(&leaving);
}

/* ---- functions that change ------------------------------------------------------------------ */

/* What it took so far stays the expectation until the first new measurement, which counts fully. */
void gs_compute_changed(const void *function) {
    for (unsigned i = 0; i < GS_MAX_COMPUTES && atomic_load(&gs_computes) && gs_slot(); i++) {
        struct gs_compute *c = atomic_load_explicit(&table[i], memory_order_acquire);
        if (!c)
            return;
        gs_lock(c->lock);
        for (unsigned k = 0; k < GS_PREDICTORS; k++)
            if (c->function[k].function == function)
                c->function[k].law.samples = 0;
        gs_unlock(c->lock);
    }
}
