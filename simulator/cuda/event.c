/* Events. */
#include "work.h"

#include <stdlib.h>

#define POOL_EVENTS 512u

/* Takes another pool of events when the context has more than its pools hold. */
static CUresult take_pool(struct context *ctx) {
    uint64_t bytes = costs_of(ctx->device)->event_pool_bytes;
    if (!bytes || ctx->n_events < ctx->event_pools * POOL_EVENTS)
        return CUDA_SUCCESS;
    CUresult result = charge(ctx->device, bytes);
    if (result == CUDA_SUCCESS) {
        ctx->overhead += bytes;
        ctx->event_pools++;
    }
    return result;
}

EXPORT CUresult cuEventCreate(CUevent *phEvent, unsigned int flags) {
    ENTER_CONTEXT(ctx);
    CHECK_VALUE(phEvent && !(flags & ~7u));
    CHECK_VALUE(!(flags & CU_EVENT_INTERPROCESS) || (flags & CU_EVENT_DISABLE_TIMING));
    CUresult result = take_pool(ctx);
    CHECK(result == CUDA_SUCCESS, result);
    struct event *e = calloc(1, sizeof *e);
    CHECK(e, CUDA_ERROR_OUT_OF_MEMORY);
    *e = (struct event){.magic = OBJ_EVENT, .ctx = ctx, .next = ctx->events, .flags = flags};
    ctx->events = e;
    ctx->n_events++;
    *phEvent = (CUevent)e;
    return CUDA_SUCCESS;
}

#define ENTER_EVENT(e, handle) \
    ENTER(); \
    struct event *e = (struct event *)(handle); \
    CHECK_HANDLE(sim_is(e, OBJ_EVENT))

static void event_drop(struct event *e) {
    struct event **at = &e->ctx->events;
    while (*at && *at != e)
        at = &(*at)->next;
    if (*at)
        *at = e->next;
    e->ctx->n_events--;
    mark_drop(e->mark);
    capture_forget_event(e);
    sim_bury(e, true);
}

/* Events of a destroyed context become invalid, like events that the program destroyed
 * (cuCtxDestroy). */
void events_drop_all(struct context *ctx) {
    while (ctx->events)
        event_drop(ctx->events);
}

EXPORT CUresult cuEventDestroy_v2(CUevent hEvent) {
    ENTER_EVENT(e, hEvent);
    event_drop(e);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy(CUevent hEvent) {
    return cuEventDestroy_v2(hEvent);
}

static CUresult record(CUevent hEvent, CUstream hStream, unsigned int flags, uint64_t *cost_ns) {
    ENTER_EVENT(e, hEvent);
    struct stream *s = stream_of(current_context(), hStream);
    CHECK(s,
          hStream > CU_STREAM_PER_THREAD ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_CONTEXT);
    CHECK_VALUE(!(flags & ~1u));
    CHECK_HANDLE(e->ctx == s->ctx);
    if (s->capture)
        return capture_record_event(s, e, flags);
    struct mark *m = calloc(1, sizeof *m);
    CHECK(m, CUDA_ERROR_OUT_OF_MEMORY);
    *m = (struct mark){.refs = 1, .ctx = s->ctx};
    const struct sim_config *config = &sim.device[s->ctx->device].sim.state->config;
    *cost_ns = config->record_ns;
    struct work work = {.kind = WORK_RECORD, .duration_ns = config->bubble_ns};
    CUresult result = engine_add(s, &work, m);
    mark_drop(e->mark);
    e->mark = m;
    capture_forget_event(e);
    return result;
}

EXPORT CUresult cuEventRecordWithFlags(CUevent hEvent, CUstream hStream, unsigned int flags) {
    uint64_t began_ns = sim_now_ns(), cost_ns = 0;
    CUresult result = record(hEvent, hStream, flags, &cost_ns);
    engine_spend(began_ns + cost_ns);
    return result;
}

EXPORT CUresult cuEventRecord(CUevent hEvent, CUstream hStream) {
    return cuEventRecordWithFlags(hEvent, hStream, 0);
}

EXPORT CUresult cuEventQuery(CUevent hEvent) {
    ENTER_EVENT(e, hEvent);
    CHECK(!e->capture, CUDA_ERROR_CAPTURED_EVENT);
    CHECK(capture_allows_wait(NULL), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    return !e->mark || engine_mark_done(e->mark) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuEventSynchronize(CUevent hEvent) {
    ENTER_EVENT(e, hEvent);
    CHECK(!e->capture, CUDA_ERROR_CAPTURED_EVENT);
    CHECK(capture_allows_wait(NULL), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    int device = e->ctx->device;
    if (e->mark)
        engine_wait_mark(e->mark);
    pools_trim_at_sync(device);
    return CUDA_SUCCESS;
}

/* Milliseconds with the device's resolution of half a microsecond. */
EXPORT CUresult cuEventElapsedTime(float *ms, CUevent hStart, CUevent hEnd) {
    ENTER_EVENT(start, hStart);
    struct event *end = (struct event *)hEnd;
    CHECK_HANDLE(sim_is(end, OBJ_EVENT));
    CHECK_VALUE(ms);
    CHECK_HANDLE(start->mark && end->mark &&
                 !((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING));
    CHECK(engine_mark_done(start->mark) && engine_mark_done(end->mark), CUDA_ERROR_NOT_READY);
    int64_t halves = ((int64_t)end->mark->at_ns - (int64_t)start->mark->at_ns) / 500;
    *ms = (float)((double)halves * 0.0005);
    return CUDA_SUCCESS;
}
