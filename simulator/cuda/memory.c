/* Plain, pitched and managed memory. */
#include "sim.h"

#include <stdlib.h>

#define PITCH_ALIGN 512ull
#define MAX_BYTES (1ull << 47)

struct mem *mem_take(struct context *ctx, int device, uint64_t bytes, enum mem_kind kind,
                     CUresult *error) {
    *error = CUDA_ERROR_OUT_OF_MEMORY;
    if (bytes > MAX_BYTES)
        return NULL;
    uint64_t span = round_up(bytes, SIM_BLOCK);
    bool lazy = kind == MEM_MANAGED || kind == MEM_CODE; /* charged elsewhere */
    *error = lazy ? join_device(device) : charge(device, span);
    if (*error != CUDA_SUCCESS)
        return NULL;
    struct mem *m = space_take(device, span / SIM_BLOCK);
    if (m && kind == MEM_MANAGED && !(m->place = calloc(span / SIM_BLOCK, 1))) {
        space_give(m);
        m = NULL;
    }
    if (!m) {
        if (!lazy)
            uncharge(device, span);
        *error = CUDA_ERROR_OUT_OF_MEMORY;
        return NULL;
    }
    m->kind = kind;
    m->size = bytes;
    m->ctx = ctx;
    if (ctx) {
        m->next = ctx->mems;
        if (m->next)
            m->next->prev = m;
        ctx->mems = m;
    }
    return m;
}

void mem_give(struct mem *m) {
    if (m->ctx) {
        if (m->prev)
            m->prev->next = m->next;
        else
            m->ctx->mems = m->next;
        if (m->next)
            m->next->prev = m->prev;
    }
    if (m->place)
        managed_leave(m);
    else if (m->shared_id)
        sim_drop_shared(&sim.device[m->device].sim, m->shared_id);
    else if (m->kind != MEM_CODE)
        uncharge(m->device, m->span);
    space_give(m);
}

CUresult share_blocks(struct context *ctx, uint64_t *sum, uint64_t bytes) {
    uint64_t before = round_up(*sum, SIM_BLOCK), after = round_up(*sum + bytes, SIM_BLOCK);
    CUresult result = after > before ? charge(ctx->device, after - before) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS)
        *sum += bytes;
    return result;
}

void unshare_blocks(struct context *ctx, uint64_t *sum, uint64_t bytes) {
    uint64_t before = round_up(*sum, SIM_BLOCK);
    *sum -= bytes;
    uncharge(ctx->device, before - round_up(*sum, SIM_BLOCK));
}

void mem_give_all(struct context *ctx) {
    small_drop_all(ctx);
    while (ctx->mems) {
        if (ctx->mems->kind == MEM_ARRAY && ctx->mems->owner)
            *(uint32_t *)ctx->mems->owner = 0; /* invalidates its handle */
        mem_give(ctx->mems);
    }
}

bool mem_range(uint64_t va, uint64_t *start, uint64_t *size, struct mem **found) {
    struct mem *m = space_find(va);
    if (!m)
        return false;
    if (found)
        *found = m;
    if (m->kind == MEM_SMALL)
        return small_range(m, va, start, size);
    if (m->kind == MEM_POOL)
        return pool_range(m, va, start, size);
    *start = m->va;
    *size = m->size;
    return va - m->va < m->size && m->kind != MEM_ARRAY;
}

CUresult mem_alloc(struct context *ctx, uint64_t bytes, CUdeviceptr *va) {
    CUresult error;
    if (bytes < SIM_LARGE)
        return small_alloc(ctx, bytes, va);
    struct mem *m = mem_take(ctx, ctx->device, bytes, MEM_DEVICE, &error);
    if (m)
        *va = m->va;
    return error;
}

CUresult mem_free(uint64_t va) {
    struct mem *m = space_find(va);
    CHECK_VALUE(m);
    switch (m->kind) {
    case MEM_SMALL:
        CHECK_VALUE(small_free(m, va));
        return CUDA_SUCCESS;
    case MEM_POOL:
        CHECK_VALUE(pool_free(m, va));
        return CUDA_SUCCESS;
    case MEM_DEVICE:
    case MEM_MANAGED:
        CHECK_VALUE(va == m->va);
        mem_give(m);
        return CUDA_SUCCESS;
    case MEM_FOREIGN:
        return foreign_drop(va);
    case MEM_GRAPH:
        return graph_free_address(m, va);
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize) {
    ENTER_CONTEXT(ctx);
    CHECK_VALUE(dptr && bytesize);
    CHECK(capture_allows_call(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    return mem_alloc(ctx, bytesize, dptr);
}

/* Waits for the context's work, like the real cuMemFree. */
EXPORT CUresult cuMemFree_v2(CUdeviceptr dptr) {
    ENTER_CONTEXT(ctx);
    if (!dptr)
        return CUDA_SUCCESS;
    CHECK_VALUE(space_find(dptr));
    CHECK(capture_allows_call(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CUresult waited = engine_wait_context(ctx);
    if (waited != CUDA_SUCCESS)
        return waited;
    return mem_free(dptr);
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes,
                                   size_t Height, unsigned int ElementSizeBytes) {
    ENTER_CONTEXT(ctx);
    CHECK_VALUE(dptr && pPitch && WidthInBytes && Height);
    CHECK(capture_allows_call(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK_VALUE(ElementSizeBytes == 4 || ElementSizeBytes == 8 || ElementSizeBytes == 16);
    CHECK(WidthInBytes <= MAX_BYTES, CUDA_ERROR_OUT_OF_MEMORY);
    uint64_t pitch = round_up(WidthInBytes, PITCH_ALIGN);
    CHECK(Height <= MAX_BYTES / pitch, CUDA_ERROR_OUT_OF_MEMORY);
    CUresult result = mem_alloc(ctx, pitch * Height, dptr);
    if (result == CUDA_SUCCESS)
        *pPitch = pitch;
    return result;
}

/* Occupies whole blocks, like unified memory of the real driver, on the host until used
 * (managed.c). */
EXPORT CUresult cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags) {
    ENTER_CONTEXT(ctx);
    CUresult error;
    CHECK_VALUE(dptr && bytesize);
    CHECK(capture_allows_call(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK_VALUE(flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST);
    struct mem *m = mem_take(ctx, ctx->device, bytesize, MEM_MANAGED, &error);
    if (!m)
        return error;
    m->touched = m->span;
    *dptr = m->va;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER_CONTEXT(ctx);
    CHECK_VALUE(free_bytes && total);
    struct sim_device *d = &sim.device[ctx->device].sim;
    *total = d->state->config.total_bytes;
    *free_bytes = *total - sim_used_bytes(d);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr) {
    ENTER_CONTEXT(ctx);
    uint64_t start, size;
    int device;
    CHECK(mem_range(dptr, &start, &size, NULL) || vmm_range(dptr, &start, &size, &device) ||
              host_range(dptr, &start, &size),
          CUDA_ERROR_NOT_FOUND);
    (void)ctx;
    if (pbase)
        *pbase = start;
    if (psize)
        *psize = size;
    return CUDA_SUCCESS;
}

/* The oldest functions return 32-bit sizes: larger values saturate. */
static unsigned int saturated(size_t bytes) {
    return bytes > UINT32_MAX ? UINT32_MAX : (unsigned int)bytes;
}

EXPORT CUresult cuMemGetInfo(unsigned int *free_bytes, unsigned int *total) {
    size_t f, t;
    CHECK_VALUE(free_bytes && total);
    CUresult result = cuMemGetInfo_v2(&f, &t);
    if (result != CUDA_SUCCESS)
        return result;
    *free_bytes = saturated(f);
    *total = saturated(t);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice dev) {
    size_t total;
    CHECK_VALUE(bytes);
    CUresult result = cuDeviceTotalMem_v2(&total, dev);
    if (result == CUDA_SUCCESS)
        *bytes = saturated(total);
    return result;
}
