/* Markers: timing events of one context, and their stamps as host time.
 *
 * A stamp is known relative to another event, the base. When the base was is not known, but it lies
 * between what causes allow: no event is done before it was recorded, none later than it was seen
 * to be. An event that was recorded when nothing was running is done at once, so that these bounds
 * get narrow by themselves; the base is moved when one of them is broken, which also follows two
 * clocks that drift apart. The difference comes as float milliseconds, so now and then a later
 * event becomes the base. */
#include "compute_parts.h"

#define REBASE (1000 * MS)

static int take_event(struct gs_clock *clock) {
    CUevent event;
    if (clock->n_free)
        return clock->free[--clock->n_free];
    if (clock->n_made == GS_EVENTS ||
        GS_REAL(cuEventCreate)(&event, CU_EVENT_DEFAULT) != CUDA_SUCCESS)
        return -1;
    clock->event[clock->n_made] = event;
    return (int)clock->n_made++;
}

static void put_event(struct gs_clock *clock, int event) {
    clock->free[clock->n_free++] = (uint16_t)event;
}

static CUresult record(CUevent event, CUstream stream) {
    return GS_REAL(cuEventRecord)(event, stream);
}

int gs_clock_mark(struct gs_compute *c, CUstream stream) {
    struct gs_clock *clock = &c->clock;
    if (!GS_REAL(cuEventCreate) || !GS_REAL(cuEventRecord) || !GS_REAL(cuEventQuery) ||
        !GS_REAL(cuEventElapsedTime))
        return -1;
    if (!clock->base) {
        CUevent base;
        if (GS_REAL(cuEventCreate)(&base, CU_EVENT_DEFAULT) != CUDA_SUCCESS)
            return -1;
        clock->base_ns = gs_compute_now();
        if (record(base, stream) != CUDA_SUCCESS) {
            GS_REAL(cuEventDestroy_v2)(base);
            return -1;
        }
        clock->base = base;
    }
    int event = take_event(clock);
    if (event < 0)
        return -1;
    clock->recorded_ns[event] = gs_compute_now();
    if (record(clock->event[event], stream) != CUDA_SUCCESS) {
        put_event(clock, event);
        return -1;
    }
    c->marked_ns = clock->recorded_ns[event];
    return event;
}

static uint64_t moved(uint64_t ns, int64_t by) {
    return by < 0 && ns < (uint64_t)-by ? 0 : ns + (uint64_t)by;
}

/* What an event's stamp is in host time; false when the driver cannot say. */
static bool stamp_of(struct gs_clock *clock, int event, uint64_t now, uint64_t *stamp) {
    float ms;
    CUresult result = GS_REAL(cuEventElapsedTime)(&ms, clock->base, clock->event[event]);
    if (result != CUDA_SUCCESS || !(ms > -1e9f && ms < 1e9f))
        return false;
    int64_t since = (int64_t)((double)ms * 1e6);
    uint64_t at = moved(clock->base_ns, since);
    if (at < clock->recorded_ns[event])
        clock->base_ns += clock->recorded_ns[event] - at;
    else if (at > now)
        clock->base_ns -= min64(at - now, clock->base_ns);
    at = moved(clock->base_ns, since);
    if (since > (int64_t)REBASE) {
        CUevent base = clock->base;
        clock->base = clock->event[event];
        clock->event[event] = base;
        clock->base_ns = at;
    }
    *stamp = at;
    return true;
}

/* A context that is broken has no stamps any more: it is done now. */
bool gs_clock_done(struct gs_compute *c, int event, uint64_t *stamp_ns) {
    struct gs_clock *clock = &c->clock;
    CUresult result = GS_REAL(cuEventQuery)(clock->event[event]);
    if (result == CUDA_ERROR_NOT_READY || (result >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED &&
                                           result <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD))
        return false;
    uint64_t now = gs_compute_now();
    if (result != CUDA_SUCCESS || !stamp_of(clock, event, now, stamp_ns)) {
        if (result == CUDA_SUCCESS && GS_REAL(cuEventQuery)(clock->base) == CUDA_ERROR_NOT_READY)
            return false;
        *stamp_ns = now;
    }
    put_event(clock, event);
    return true;
}
