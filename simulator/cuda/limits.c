/* A context's limits and the device memory that they use. */
#include "sim.h"

#define DEFAULT_STACK 1024u
#define DEFAULT_FIFO (1u << 20)
#define DEFAULT_HEAP (8u << 20)
#define DEFAULT_DEPTH 2u
#define DEFAULT_PENDING 2048u
#define DEPTH_BYTES (150ull << 20) /* documented: up to 150 MB per level */
#define PENDING_BYTES 1024ull      /* assumed */

void limits_open(struct context *ctx) {
    ctx->limit[CU_LIMIT_STACK_SIZE] = DEFAULT_STACK;
    ctx->limit[CU_LIMIT_PRINTF_FIFO_SIZE] = DEFAULT_FIFO;
    ctx->limit[CU_LIMIT_MALLOC_HEAP_SIZE] = DEFAULT_HEAP;
    ctx->limit[CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH] = DEFAULT_DEPTH;
    ctx->limit[CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT] = DEFAULT_PENDING;
    ctx->limit[CU_LIMIT_MAX_L2_FETCH_GRANULARITY] = 64;
}

/* Device memory used by a limit. The defaults are part of the context's overhead. */
static uint64_t limit_bytes(const struct context *ctx, CUlimit limit, size_t value) {
    const struct sim_config *c = &sim.device[ctx->device].sim.state->config;
    switch (limit) {
    case CU_LIMIT_STACK_SIZE:
        return round_up(value * c->sm_count * c->threads_per_sm, SIM_BLOCK);
    case CU_LIMIT_PRINTF_FIFO_SIZE:
    case CU_LIMIT_MALLOC_HEAP_SIZE:
        return round_up(value, SIM_BLOCK);
    case CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH:
        return round_up(value * DEPTH_BYTES, SIM_BLOCK);
    case CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT:
        return round_up(value * PENDING_BYTES, SIM_BLOCK);
    default:
        return 0;
    }
}

static size_t default_limit(CUlimit limit) {
    switch (limit) {
    case CU_LIMIT_STACK_SIZE:
        return DEFAULT_STACK;
    case CU_LIMIT_PRINTF_FIFO_SIZE:
        return DEFAULT_FIFO;
    case CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH:
        return DEFAULT_DEPTH;
    case CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT:
        return DEFAULT_PENDING;
    default:
        return DEFAULT_HEAP;
    }
}

EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    ENTER_CONTEXT(ctx);
    CHECK_VALUE(limit < CU_LIMIT_MAX);
    CHECK_VALUE(value <= (limit == CU_LIMIT_STACK_SIZE ? 512u << 10 : 1ull << 46));
    uint64_t floor = limit_bytes(ctx, limit, default_limit(limit));
    uint64_t before = limit_bytes(ctx, limit, ctx->limit[limit]),
             after = limit_bytes(ctx, limit, value);
    before = before > floor ? before - floor : 0;
    after = after > floor ? after - floor : 0;
    if (after > before) {
        CUresult result = charge(ctx->device, after - before);
        if (result != CUDA_SUCCESS)
            return result;
    } else if (before > after) {
        uncharge(ctx->device, before - after);
    }
    ctx->overhead += after - before;
    ctx->limit[limit] = value;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    ENTER_CONTEXT(ctx);
    CHECK_VALUE(value && limit < CU_LIMIT_MAX);
    *value = ctx->limit[limit];
    return CUDA_SUCCESS;
}

CUresult local_room(struct context *ctx, uint64_t bytes) {
    const struct sim_config *c = &sim.device[ctx->device].sim.state->config;
    uint64_t threads = (uint64_t)c->sm_count * c->threads_per_sm;
    uint64_t more = bytes > DEFAULT_STACK ? bytes - DEFAULT_STACK : 0;
    if (more <= ctx->local_bytes)
        return CUDA_SUCCESS;
    uint64_t before = round_up(ctx->local_bytes * threads, SIM_BLOCK);
    uint64_t after = round_up(more * threads, SIM_BLOCK);
    CUresult result = charge(ctx->device, after - before);
    if (result != CUDA_SUCCESS)
        return result;
    ctx->overhead += after - before;
    ctx->local_bytes = more;
    return CUDA_SUCCESS;
}
