/* Markers: timing events of one context, and the conversion of their timestamps to host time.
 *
 * The driver gives a timestamp only relative to another event, the base. The host time of the base
 * is unknown, but bounded: no event completes before it was recorded, or later than it was seen to
 * be complete. An event that was recorded while nothing was running completes at once, so these
 * bounds become narrow by themselves. The base is moved when a bound is violated, which also
 * follows clocks that drift apart. The driver reports the difference in milliseconds as a float, so
 * a later event replaces the base from time to time to keep its precision. */
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

static uint64_t shifted(uint64_t ns, int64_t by) {
    return by < 0 && ns < (uint64_t)-by ? 0 : ns + (uint64_t)by;
}

static void make_base(struct gs_clock *clock, int event, uint64_t at_ns) {
    CUevent base = clock->base;
    clock->base = clock->event[event];
    clock->event[event] = base;
    clock->base_ns = at_ns;
}

/* Convert the timestamp of an event to host time; return false if the driver does not report it. */
static bool timestamp_of(struct gs_clock *clock, int event, uint64_t now, uint64_t *stamp) {
    float ms;
    CUresult result = GS_REAL(cuEventElapsedTime)(&ms, clock->base, clock->event[event]);
    if (result != CUDA_SUCCESS || !(ms > -1e9f && ms < 1e9f))
        return false;
    int64_t since = (int64_t)((double)ms * 1e6);
    uint64_t at = shifted(clock->base_ns, since);
    if (at < clock->recorded_ns[event])
        clock->base_ns += clock->recorded_ns[event] - at;
    else if (at > now)
        clock->base_ns -= min64(at - now, clock->base_ns);
    at = shifted(clock->base_ns, since);
    if (since > (int64_t)REBASE)
        make_base(clock, event, at);
    *stamp = at;
    return true;
}

/* An event that was recorded into a capture never completes: it is lost. */
static bool is_pending(CUresult result) {
    return result == CUDA_ERROR_NOT_READY || (result >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED &&
                                              result <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD &&
                                              result != CUDA_ERROR_CAPTURED_EVENT);
}

/* Lost events and those of a broken context have no timestamps: treat them as completed now. */
bool gs_clock_done(struct gs_compute *c, int event, uint64_t *stamp_ns) {
    struct gs_clock *clock = &c->clock;
    CUresult result = GS_REAL(cuEventQuery)(clock->event[event]);
    if (is_pending(result))
        return false;
    uint64_t now = gs_compute_now();
    if (result != CUDA_SUCCESS) {
        *stamp_ns = now;
    } else if (!timestamp_of(clock, event, now, stamp_ns)) {
        CUresult of_base = GS_REAL(cuEventQuery)(clock->base);
        if (is_pending(of_base))
            return false;
        if (of_base == CUDA_ERROR_CAPTURED_EVENT)
            make_base(clock, event, now);
        *stamp_ns = now;
    }
    put_event(clock, event);
    return true;
}
