/* Streams. */
#include "work.h"

#include <stdlib.h>

static _Thread_local struct {
    uint64_t context_id;
    struct stream *stream;
} own[8]; /* this thread's default streams, one per context */

static struct stream *open_stream(struct context *ctx, unsigned flags, int priority) {
    struct stream *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    *s = (struct stream){.magic = OBJ_STREAM,
                         .ctx = ctx,
                         .flags = flags,
                         .priority = priority,
                         .id = sim.next_id++,
                         .next = ctx->streams};
    ctx->streams = s;
    return s;
}

static struct stream *per_thread_stream(struct context *ctx) {
    unsigned free_slot = 0;
    for (unsigned i = 0; i < sizeof own / sizeof *own; i++) {
        if (own[i].context_id == ctx->id)
            return own[i].stream;
        if (!own[i].context_id)
            free_slot = i;
    }
    struct stream *s = open_stream(ctx, CU_STREAM_DEFAULT, 0);
    if (s) {
        s->per_thread = true;
        own[free_slot].context_id = ctx->id;
        own[free_slot].stream = s;
    }
    return s;
}

/* Finds the stream of a handle; NULL when there is none. 0 and CU_STREAM_LEGACY mean the
 * context's legacy stream. */
struct stream *stream_of(struct context *ctx, CUstream handle) {
    if (handle == CU_STREAM_PER_THREAD)
        return ctx ? per_thread_stream(ctx) : NULL;
    if (!handle || handle == CU_STREAM_LEGACY) {
        if (ctx && !ctx->legacy) {
            ctx->legacy = open_stream(ctx, CU_STREAM_DEFAULT, 0);
            if (ctx->legacy)
                ctx->legacy->legacy = true;
        }
        return ctx ? ctx->legacy : NULL;
    }
    struct stream *s = (struct stream *)handle;
    return sim_is(s, OBJ_STREAM) ? s : NULL;
}

bool stream_blocks_with_legacy(const struct stream *s) {
    return !(s->flags & CU_STREAM_NON_BLOCKING);
}

static void stream_drop(struct stream *s) {
    for (struct stream **p = &s->ctx->streams; *p; p = &(*p)->next) {
        if (*p != s)
            continue;
        *p = s->next;
        break;
    }
    while (s->first) {
        struct op *op = s->first;
        s->first = op->next;
        s->ctx->pending--;
        engine_forget(op, s->ctx);
        mark_drop(op->mark);
        graph_run_drop(op->run);
        free(op);
    }
    free(s->deps);
    if (s->bytes)
        uncharge(s->ctx->device, s->bytes);
    sim_bury(s, s->closed);
}

void streams_drop_all(struct context *ctx) {
    while (ctx->streams)
        stream_drop(ctx->streams);
    ctx->legacy = NULL;
}

void streams_drop_closed(struct context *ctx) {
    for (struct stream *s = ctx->streams, *next; s; s = next) {
        next = s->next;
        if (s->closed && !s->first)
            stream_drop(s);
    }
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream *phStream, unsigned int flags, int priority) {
    ENTER_CONTEXT(ctx);
    CHECK_VALUE(phStream && !(flags & ~(unsigned)CU_STREAM_NON_BLOCKING));
    priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    uint64_t bytes = costs_of(ctx->device)->stream_bytes;
    CUresult result = bytes ? charge(ctx->device, bytes) : CUDA_SUCCESS;
    CHECK(result == CUDA_SUCCESS, result);
    struct stream *s = open_stream(ctx, flags, priority);
    CHECK(s, CUDA_ERROR_OUT_OF_MEMORY);
    s->bytes = bytes;
    *phStream = (CUstream)s;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamCreate(CUstream *phStream, unsigned int flags) {
    return cuStreamCreateWithPriority(phStream, flags, 0);
}

#define ENTER_STREAM(s, handle) \
    ENTER(); \
    struct context *current = current_context(); \
    struct stream *s = stream_of(current, handle); \
    CHECK(s, (handle) > CU_STREAM_PER_THREAD ? CUDA_ERROR_INVALID_HANDLE \
                                             : CUDA_ERROR_INVALID_CONTEXT)

/* Returns at once; engine_progress frees the stream when its work is done. */
EXPORT CUresult cuStreamDestroy_v2(CUstream hStream) {
    CHECK_HANDLE(hStream > CU_STREAM_PER_THREAD);
    ENTER_STREAM(s, hStream);
    capture_abandon(s);
    s->magic = OBJ_DESTROYED;
    s->closed = true;
    engine_progress(s->ctx);
    if (!s->ctx->pending)
        streams_drop_closed(s->ctx);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamDestroy(CUstream hStream) {
    return cuStreamDestroy_v2(hStream);
}

EXPORT CUresult cuStreamSynchronize(CUstream hStream) {
    checkpoint_before_wait();
    ENTER_STREAM(s, hStream);
    CHECK(capture_allows_wait(s), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    int device = s->ctx->device;
    CUresult result = s->legacy ? engine_wait_streams(s->ctx, true) : engine_wait_stream(s);
    pools_trim_at_sync(device);
    return result;
}

EXPORT CUresult cuStreamQuery(CUstream hStream) {
    ENTER_STREAM(s, hStream);
    CHECK(capture_allows_wait(s), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    return engine_stream_idle(s) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuCtxSynchronize(void) {
    checkpoint_before_wait();
    ENTER_CONTEXT(ctx);
    CHECK(capture_allows_wait(NULL), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CUresult result = engine_wait_context(ctx);
    pools_trim_at_sync(ctx->device);
    return result;
}

EXPORT CUresult cuStreamGetFlags(CUstream hStream, unsigned int *flags) {
    ENTER_STREAM(s, hStream);
    CHECK_VALUE(flags);
    *flags = s->flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetPriority(CUstream hStream, int *priority) {
    ENTER_STREAM(s, hStream);
    CHECK_VALUE(priority);
    *priority = s->priority;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetId(CUstream hStream, unsigned long long *id) {
    ENTER_STREAM(s, hStream);
    CHECK_VALUE(id);
    *id = s->id;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetCtx(CUstream hStream, CUcontext *pctx) {
    ENTER_STREAM(s, hStream);
    CHECK_VALUE(pctx);
    *pctx = (CUcontext)s->ctx;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetAttribute(CUstream hStream, CUstreamAttrID attr,
                                     CUstreamAttrValue *value) {
    ENTER_STREAM(s, hStream);
    (void)attr;
    CHECK_VALUE(value);
    *value = (CUstreamAttrValue){0};
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamSetAttribute(CUstream hStream, CUstreamAttrID attr,
                                     const CUstreamAttrValue *value) {
    ENTER_STREAM(s, hStream);
    (void)attr;
    CHECK_VALUE(value);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamCopyAttributes(CUstream dst, CUstream src) {
    ENTER_STREAM(s, dst);
    CHECK_HANDLE(stream_of(current, src));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamAttachMemAsync(CUstream hStream, CUdeviceptr dptr, size_t length,
                                       unsigned int flags) {
    ENTER_STREAM(s, hStream);
    struct mem *m = space_find(dptr);
    (void)length;
    (void)flags;
    CHECK_VALUE(m && m->kind == MEM_MANAGED);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int flags) {
    ENTER_STREAM(s, hStream);
    struct event *e = (struct event *)hEvent;
    CHECK_HANDLE(sim_is(e, OBJ_EVENT));
    CHECK_VALUE(!(flags & ~1u));
    if (e->capture || s->capture)
        return capture_wait_event(s, e);
    if (!e->mark)
        return CUDA_SUCCESS;
    struct work work = {.kind = WORK_WAIT};
    return engine_add(s, &work, e->mark);
}

static CUresult add_value(CUstream hStream, uint64_t address, uint64_t value, unsigned flags,
                          bool wide, bool write) {
    CHECK_VALUE(address && address % (wide ? 8 : 4) == 0);
    struct work work = {
        .kind = WORK_VALUE,
        .value = {
            .address = address, .value = value, .flags = flags, .wide = wide, .write = write}};
    return dispatch(hStream, &work, false);
}

#define VALUE_FUNCTIONS(suffix, type, wide) \
    EXPORT CUresult cuStreamWaitValue##suffix##_v2(CUstream s, CUdeviceptr a, type v, \
                                                   unsigned f) { \
        return add_value(s, a, v, f, wide, false); \
    } \
    EXPORT CUresult cuStreamWriteValue##suffix##_v2(CUstream s, CUdeviceptr a, type v, \
                                                    unsigned f) { \
        return add_value(s, a, v, f, wide, true); \
    } \
    EXPORT CUresult cuStreamWaitValue##suffix(CUstream s, CUdeviceptr a, type v, unsigned f) { \
        return add_value(s, a, v, f, wide, false); \
    } \
    EXPORT CUresult cuStreamWriteValue##suffix(CUstream s, CUdeviceptr a, type v, unsigned f) { \
        return add_value(s, a, v, f, wide, true); \
    }
VALUE_FUNCTIONS(32, cuuint32_t, false)
VALUE_FUNCTIONS(64, cuuint64_t, true)

EXPORT CUresult cuStreamBatchMemOp_v2(CUstream hStream, unsigned int count,
                                      CUstreamBatchMemOpParams *ops, unsigned int flags) {
    CHECK_VALUE(ops && count && count <= 256 && !flags);
    for (unsigned i = 0; i < count; i++) {
        CUstreamBatchMemOpParams *p = &ops[i];
        CUresult result = CUDA_SUCCESS;
        switch (p->operation) {
        case CU_STREAM_MEM_OP_WAIT_VALUE_32:
            result = add_value(hStream, p->waitValue.address, p->waitValue.value,
                               p->waitValue.flags, false, false);
            break;
        case CU_STREAM_MEM_OP_WAIT_VALUE_64:
            result = add_value(hStream, p->waitValue.address, p->waitValue.value64,
                               p->waitValue.flags, true, false);
            break;
        case CU_STREAM_MEM_OP_WRITE_VALUE_32:
            result = add_value(hStream, p->writeValue.address, p->writeValue.value,
                               p->writeValue.flags, false, true);
            break;
        case CU_STREAM_MEM_OP_WRITE_VALUE_64:
            result = add_value(hStream, p->writeValue.address, p->writeValue.value64,
                               p->writeValue.flags, true, true);
            break;
        case CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES:
        case CU_STREAM_MEM_OP_BARRIER:
            break;
        default:
            return CUDA_ERROR_INVALID_VALUE;
        }
        if (result != CUDA_SUCCESS)
            return result;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamBatchMemOp(CUstream hStream, unsigned int count,
                                   CUstreamBatchMemOpParams *ops, unsigned int flags) {
    return cuStreamBatchMemOp_v2(hStream, count, ops, flags);
}
