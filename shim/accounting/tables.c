/* The streams and functions of a context that it has launched into and from. The tables are
 * bounded: the least recently used entry is replaced, unless the rate limiter still has it in a
 * list. */
#include <string.h>

#include "compute_parts.h"

static _Thread_local char this_thread; /* its address identifies the thread */

static bool is_special(CUstream stream) {
    return stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD;
}

/* Distinguishes two streams that have the same handle one after the other. */
static uint64_t stream_id(CUstream stream) {
    unsigned long long id = 0;
    if (stream == CU_STREAM_PER_THREAD)
        return (uint64_t)(uintptr_t)&this_thread;
    if (!is_special(stream) && GS_REAL(cuStreamGetId))
        GS_REAL(cuStreamGetId)(stream, &id);
    return id;
}

static bool is_blocking(CUstream stream) {
    unsigned flags = 0;
    if (is_special(stream) || !GS_REAL(cuStreamGetFlags) ||
        GS_REAL(cuStreamGetFlags)(stream, &flags) != CUDA_SUCCESS)
        return true;
    return !(flags & CU_STREAM_NON_BLOCKING);
}

struct gs_known_stream *gs_compute_stream_if_known(struct gs_compute *c, CUstream stream) {
    uint64_t name = stream == CU_STREAM_PER_THREAD ? stream_id(stream) : 0;
    for (uint32_t i = 0; i < c->streams; i++) {
        struct gs_known_stream *s = &c->stream[i];
        if (s->handle == stream && (!name || s->name == name))
            return s;
    }
    return NULL;
}

/* Return the first free entry, else the least recently used one without work to be marked. */
static struct gs_known_stream *room_for_stream(struct gs_compute *c) {
    struct gs_known_stream *oldest = NULL;
    for (uint32_t i = 0; i < c->streams; i++) {
        struct gs_known_stream *s = &c->stream[i];
        if (!s->handle && !s->throttle.dirty)
            return s;
        if (!s->throttle.dirty && (!oldest || c->tick - s->used > c->tick - oldest->used))
            oldest = s;
    }
    if (c->streams < GS_STREAMS_KNOWN)
        return &c->stream[c->streams++];
    if (oldest)
        gs_compute_forget();
    return oldest;
}

struct gs_known_stream *gs_compute_stream(struct gs_compute *c, CUstream stream) {
    struct gs_known_stream *s = gs_compute_stream_if_known(c, stream);
    uint64_t name = stream_id(stream);
    c->tick++;
    if (!s || s->name != name) {
        if (!s && !(s = room_for_stream(c)))
            return NULL;
        if (!s->throttle.dirty)
            s->throttle = (struct gs_throttle_stream){.id = (uint32_t)(s - c->stream)};
        s->handle = stream;
        s->name = name;
        s->blocks = is_blocking(stream);
        c->per_thread += stream == CU_STREAM_PER_THREAD;
        c->has_legacy |= stream == CU_STREAM_LEGACY;
    }
    s->used = c->tick;
    return s;
}

/* Return whether an interval that is not charged yet lists this function. */
static bool is_noted(const struct gs_compute *c, const struct gs_known_function *f) {
    return f->predictor.noted && c->throttle.number - f->predictor.noted <= GS_SEGMENTS;
}

struct gs_predictor *gs_compute_function(struct gs_compute *c, const void *function,
                                         struct gs_grid grid) {
    uint64_t mixed = ((uint64_t)(uintptr_t)function >> 4 ^ grid.x ^ (uint64_t)grid.y << 20 ^
                      (uint64_t)grid.z << 40) *
                     UINT64_C(0x9e3779b97f4a7c15);
    struct gs_known_function *set =
        &c->function[(mixed >> 40) % (GS_PREDICTORS / GS_WAYS) * GS_WAYS];
    struct gs_known_function *oldest = NULL;
    c->tick++;
    for (unsigned i = 0; i < GS_WAYS; i++) {
        struct gs_known_function *f = &set[i];
        if (f->function == function && memcmp(&f->grid, &grid, sizeof(grid)) == 0) {
            f->used = c->tick;
            return &f->predictor;
        }
        if (!oldest || (!f->function && oldest->function) ||
            (is_noted(c, oldest) && !is_noted(c, f)) ||
            (is_noted(c, oldest) == is_noted(c, f) && oldest->function &&
             c->tick - f->used > c->tick - oldest->used))
            oldest = f;
    }
    if (oldest->function)
        gs_compute_forget(); /* a thread may remember the replaced function */
    oldest->function = function;
    oldest->grid = grid;
    oldest->used = c->tick;
    gs_predictor_init(&oldest->predictor);
    return &oldest->predictor;
}

bool gs_compute_is_mixed(struct gs_compute *c) {
    bool legacy = false, others = false;
    for (uint32_t i = 0; c->has_legacy && i < c->streams; i++) {
        const struct gs_known_stream *s = &c->stream[i];
        if (s->throttle.dirty && s->blocks)
            *(s->handle == CU_STREAM_LEGACY ? &legacy : &others) = true;
    }
    return legacy && others;
}
