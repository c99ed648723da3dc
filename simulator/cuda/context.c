/* Contexts: primary and created ones, each thread's stack of them, their overhead in memory. */
#include "sim.h"

#include <stdlib.h>

#define STACK_DEPTH 64
#define API_VERSION 3020u

static _Thread_local struct {
    struct context *ctx;
    uint64_t id;
} stack[STACK_DEPTH];
static _Thread_local unsigned depth;

static bool is_listed(const struct context *ctx, uint64_t id) {
    for (const struct context *c = sim.contexts; c; c = c->next)
        if (c == ctx && (!id || c->id == id))
            return true;
    return false;
}

/* A destroyed context may still be on a thread's stack; the thread then has no current context. */
struct context *current_context(void) {
    if (!depth || !stack[depth - 1].ctx)
        return NULL;
    return is_listed(stack[depth - 1].ctx, stack[depth - 1].id) ? stack[depth - 1].ctx : NULL;
}

struct context *context_of(CUcontext handle) {
    struct context *ctx = (struct context *)handle;
    return is_listed(ctx, 0) ? ctx : NULL;
}

static void set_top(struct context *ctx) {
    stack[depth - 1].ctx = ctx;
    stack[depth - 1].id = ctx ? ctx->id : 0;
}

static CUresult push(struct context *ctx) {
    if (depth == STACK_DEPTH)
        return CUDA_ERROR_INVALID_CONTEXT;
    depth++;
    set_top(ctx);
    return CUDA_SUCCESS;
}

static CUresult open_context(int device, unsigned flags, struct context **out) {
    CUresult result = join_device(device);
    if (result != CUDA_SUCCESS)
        return result;
    struct context *ctx = calloc(1, sizeof *ctx);
    CHECK(ctx, CUDA_ERROR_OUT_OF_MEMORY);
    const struct sim_config *config = &sim.device[device].sim.state->config;
    uint64_t overhead = config->context_bytes; /* not whole blocks, as measured on the H100 */
    result = charge(device, overhead);
    if (result != CUDA_SUCCESS)
        return free(ctx), result;
    *ctx = (struct context){.magic = OBJ_CONTEXT,
                            .device = device,
                            .flags = flags,
                            .refs = 1,
                            .id = sim.next_id++,
                            .overhead = overhead,
                            .next = sim.contexts};
    limits_open(ctx);
    sim_unlist(&sim.device[device].sim, (int64_t)costs_of(device)->unlisted_bytes);
    sim.contexts = ctx;
    result = engine_open(ctx);
    sim_count_context(&sim.device[device].sim, 1);
    *out = ctx;
    return result;
}

static void close_context(struct context *ctx) {
    engine_wait_context(ctx);
    events_drop_all(ctx);
    streams_drop_all(ctx);
    modules_drop_all(ctx);
    mem_give_all(ctx);
    struct sim_device *d = &sim.device[ctx->device].sim;
    sim_count_context(d, -1);
    sim_unlist(d, -(int64_t)costs_of(ctx->device)->unlisted_bytes);
    uncharge(ctx->device, ctx->overhead + round_up(ctx->graph_bytes, SIM_BLOCK));
    engine_close(ctx);
    for (struct context **p = &sim.contexts; *p; p = &(*p)->next) {
        if (*p != ctx)
            continue;
        *p = ctx->next;
        break;
    }
    ctx->magic = 0;
    free(ctx);
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev) {
    ENTER();
    CHECK_VALUE(pctx);
    CHECK_DEVICE(dev);
    struct device *d = &sim.device[dev];
    if (d->primary) {
        d->primary->refs++;
    } else {
        CUresult result = open_context(dev, d->primary_flags, &d->primary);
        if (result != CUDA_SUCCESS)
            return result;
        d->primary->primary = true;
    }
    *pctx = (CUcontext)d->primary;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
    ENTER();
    CHECK_DEVICE(dev);
    struct device *d = &sim.device[dev];
    CHECK(d->primary, CUDA_ERROR_INVALID_CONTEXT);
    if (--d->primary->refs > 0)
        return CUDA_SUCCESS;
    struct context *ctx = d->primary;
    d->primary = NULL;
    close_context(ctx);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice dev) {
    ENTER();
    CHECK_DEVICE(dev);
    struct context *ctx = sim.device[dev].primary;
    sim.device[dev].primary = NULL;
    if (ctx)
        close_context(ctx);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags) {
    ENTER();
    CHECK_DEVICE(dev);
    CHECK_VALUE(!(flags & ~(unsigned)CU_CTX_FLAGS_MASK));
    sim.device[dev].primary_flags = flags;
    if (sim.device[dev].primary)
        sim.device[dev].primary->flags = flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active) {
    ENTER();
    CHECK_DEVICE(dev);
    CHECK_VALUE(flags && active);
    *flags = sim.device[dev].primary_flags;
    *active = sim.device[dev].primary != NULL;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice dev) {
    return cuDevicePrimaryCtxRelease_v2(dev);
}

EXPORT CUresult cuDevicePrimaryCtxReset(CUdevice dev) {
    return cuDevicePrimaryCtxReset_v2(dev);
}

EXPORT CUresult cuDevicePrimaryCtxSetFlags(CUdevice dev, unsigned int flags) {
    return cuDevicePrimaryCtxSetFlags_v2(dev, flags);
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev) {
    ENTER();
    CHECK_VALUE(pctx && !(flags & ~(unsigned)CU_CTX_FLAGS_MASK));
    CHECK_DEVICE(dev);
    struct context *ctx;
    CUresult result = open_context(dev, flags, &ctx);
    if (result != CUDA_SUCCESS)
        return result;
    *pctx = (CUcontext)ctx;
    return push(ctx);
}

EXPORT CUresult cuCtxCreate_v3(CUcontext *pctx, CUexecAffinityParam *params, int n,
                               unsigned int flags, CUdevice dev) {
    if (n < 0 || (n > 0 && !params))
        return CUDA_ERROR_INVALID_VALUE;
    if (n > 0)
        return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
    return cuCtxCreate_v2(pctx, flags, dev);
}

EXPORT CUresult cuCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice dev) {
    return cuCtxCreate_v2(pctx, flags, dev);
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext handle) {
    ENTER();
    struct context *ctx = context_of(handle);
    CHECK(ctx && !ctx->primary, CUDA_ERROR_INVALID_CONTEXT);
    if (depth && stack[depth - 1].ctx == ctx)
        depth--;
    close_context(ctx);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxDestroy(CUcontext handle) {
    return cuCtxDestroy_v2(handle);
}

EXPORT CUresult cuCtxAttach(CUcontext *pctx, unsigned int flags) {
    ENTER_CONTEXT(ctx);
    CHECK_VALUE(pctx && flags == 0);
    ctx->refs++;
    *pctx = (CUcontext)ctx;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxDetach(CUcontext handle) {
    ENTER();
    struct context *ctx = context_of(handle);
    CHECK(ctx && !ctx->primary && ctx == current_context(), CUDA_ERROR_INVALID_CONTEXT);
    if (--ctx->refs > 0)
        return CUDA_SUCCESS;
    depth--;
    close_context(ctx);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext handle) {
    ENTER();
    struct context *ctx = context_of(handle);
    CHECK(ctx, CUDA_ERROR_INVALID_CONTEXT);
    return push(ctx);
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *pctx) {
    ENTER();
    CHECK(depth, CUDA_ERROR_INVALID_CONTEXT);
    depth--;
    if (pctx)
        *pctx = (CUcontext)stack[depth].ctx;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent(CUcontext handle) {
    return cuCtxPushCurrent_v2(handle);
}

EXPORT CUresult cuCtxPopCurrent(CUcontext *pctx) {
    return cuCtxPopCurrent_v2(pctx);
}

EXPORT CUresult cuCtxSetCurrent(CUcontext handle) {
    ENTER();
    struct context *ctx = context_of(handle);
    CHECK(ctx || !handle, CUDA_ERROR_INVALID_CONTEXT);
    if (!ctx) {
        if (depth)
            depth--;
        return CUDA_SUCCESS;
    }
    if (!depth)
        return push(ctx);
    set_top(ctx);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *pctx) {
    ENTER();
    CHECK_VALUE(pctx);
    *pctx = depth ? (CUcontext)stack[depth - 1].ctx : NULL;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER_CONTEXT(ctx);
    CHECK_VALUE(device);
    *device = ctx->device;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetFlags(unsigned int *flags) {
    ENTER_CONTEXT(ctx);
    CHECK_VALUE(flags);
    *flags = ctx->flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetFlags(unsigned int flags) {
    ENTER_CONTEXT(ctx);
    CHECK_VALUE(!(flags & ~(unsigned)CU_CTX_FLAGS_MASK));
    ctx->flags = flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetId(CUcontext handle, unsigned long long *id) {
    ENTER();
    struct context *ctx = handle ? context_of(handle) : current_context();
    CHECK(ctx, CUDA_ERROR_INVALID_CONTEXT);
    CHECK_VALUE(id);
    *id = ctx->id;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetApiVersion(CUcontext handle, unsigned int *version) {
    ENTER();
    struct context *ctx = handle ? context_of(handle) : current_context();
    CHECK(ctx, CUDA_ERROR_INVALID_CONTEXT);
    CHECK_VALUE(version);
    *version = API_VERSION;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCacheConfig(CUfunc_cache *config) {
    ENTER_CONTEXT(ctx);
    CHECK_VALUE(config);
    *config = (CUfunc_cache)ctx->cache_config;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCacheConfig(CUfunc_cache config) {
    ENTER_CONTEXT(ctx);
    ctx->cache_config = config;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetSharedMemConfig(CUsharedconfig *config) {
    ENTER_CONTEXT(ctx);
    CHECK_VALUE(config);
    *config = (CUsharedconfig)ctx->shared_config;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetSharedMemConfig(CUsharedconfig config) {
    ENTER_CONTEXT(ctx);
    ctx->shared_config = config;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER_CONTEXT(ctx);
    (void)ctx;
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxResetPersistingL2Cache(void) {
    ENTER_CONTEXT(ctx);
    (void)ctx;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags) {
    ENTER_CONTEXT(ctx);
    struct context *other = context_of(peer);
    CHECK_VALUE(flags == 0);
    CHECK(other, CUDA_ERROR_INVALID_CONTEXT);
    return other->device == ctx->device ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

EXPORT CUresult cuCtxDisablePeerAccess(CUcontext peer) {
    ENTER_CONTEXT(ctx);
    (void)ctx;
    CHECK(context_of(peer), CUDA_ERROR_INVALID_CONTEXT);
    return CUDA_SUCCESS;
}
