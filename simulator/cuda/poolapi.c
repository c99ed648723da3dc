/* The rest of the pool API: attributes, current pool, stream-ordered calls. */
#include "pool.h"
#include "work.h"

static uint64_t *counter_of(struct pool *p, CUmemPool_attribute attribute) {
    switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        return &p->threshold;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
        return &p->reserved;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        return &p->reserved_high;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        return &p->used;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        return &p->used_high;
    default:
        return NULL;
    }
}

static int *switch_of(struct pool *p, CUmemPool_attribute attribute) {
    switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
        return &p->reuse[0];
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
        return &p->reuse[1];
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        return &p->reuse[2];
    default:
        return NULL;
    }
}

EXPORT CUresult cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute attr, void *value) {
    ENTER();
    struct pool *p = pool_of(handle);
    CHECK_VALUE(p && value);
    if (counter_of(p, attr))
        *(cuuint64_t *)value = *counter_of(p, attr);
    else if (switch_of(p, attr))
        *(int *)value = *switch_of(p, attr);
    else
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

/* High-water marks can only be set to 0, which resets them to the current value. */
EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attr, void *value) {
    ENTER();
    struct pool *p = pool_of(handle);
    CHECK_VALUE(p && value);
    if (switch_of(p, attr)) {
        *switch_of(p, attr) = *(int *)value;
        return CUDA_SUCCESS;
    }
    cuuint64_t wanted = *(cuuint64_t *)value;
    switch (attr) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        p->threshold = wanted;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        CHECK_VALUE(!wanted);
        p->reserved_high = p->reserved;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        CHECK_VALUE(!wanted);
        p->used_high = p->used;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

EXPORT CUresult cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc *map, size_t count) {
    ENTER();
    CHECK_VALUE(pool_of(handle) && (map || !count));
    for (size_t i = 0; i < count; i++)
        CHECK_DEVICE(map[i].location.id);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool handle,
                                   CUmemLocation *location) {
    ENTER();
    struct pool *p = pool_of(handle);
    CHECK_VALUE(flags && p && location);
    *flags = location->id == p->device ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                                       : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice dev) {
    ENTER();
    struct pool *p;
    CHECK_VALUE(out);
    CHECK_DEVICE(dev);
    CUresult result = pool_of_device(dev, &p);
    if (result == CUDA_SUCCESS)
        *out = (CUmemoryPool)p;
    return result;
}

EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool *out, CUdevice dev) {
    ENTER();
    CHECK_VALUE(out);
    CHECK_DEVICE(dev);
    struct pool *p = pool_current(dev);
    CHECK(p, CUDA_ERROR_OUT_OF_MEMORY);
    *out = (CUmemoryPool)p;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceSetMemPool(CUdevice dev, CUmemoryPool handle) {
    ENTER();
    struct pool *p = pool_of(handle);
    CHECK_DEVICE(dev);
    CHECK_VALUE(p && p->device == dev && !p->on_host);
    sim.device[dev].current_pool = p;
    return CUDA_SUCCESS;
}

/* In a capturing stream the allocation becomes a node of the graph. */
static CUresult alloc_async(struct context *ctx, struct pool *p, CUdeviceptr *dptr, size_t bytes,
                            CUstream hStream) {
    struct stream *s = stream_of(ctx, hStream);
    CHECK(s,
          hStream > CU_STREAM_PER_THREAD ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_CONTEXT);
    CHECK_VALUE(dptr && bytes && p);
    if (!s->capture)
        return pool_alloc(p, bytes, dptr);
    struct work work = {.kind = WORK_ALLOC, .alloc = {.poolProps = p->props, .bytesize = bytes}};
    struct node *node;
    CUresult result = capture_work(s, &work, &node);
    if (result == CUDA_SUCCESS)
        *dptr = graph_alloc_address(node);
    return result;
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream) {
    ENTER();
    struct context *ctx = current_context();
    if (hStream > CU_STREAM_PER_THREAD && sim_is(hStream, OBJ_STREAM))
        ctx = ((struct stream *)hStream)->ctx;
    CHECK(ctx, CUDA_ERROR_INVALID_CONTEXT);
    return alloc_async(ctx, pool_current(ctx->device), dptr, bytesize, hStream);
}

EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool handle,
                                        CUstream hStream) {
    ENTER_CONTEXT(ctx);
    struct pool *p = pool_of(handle);
    CHECK_VALUE(p && !p->imported);
    return alloc_async(ctx, p, dptr, bytesize, hStream);
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream) {
    ENTER();
    struct context *ctx = current_context();
    struct stream *s = stream_of(ctx, hStream);
    CHECK(s,
          hStream > CU_STREAM_PER_THREAD ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_CONTEXT);
    CHECK_VALUE(dptr);
    if (s->capture) {
        struct work work = {.kind = WORK_FREE, .free = dptr};
        return capture_work(s, &work, NULL);
    }
    struct mem *m = space_find(dptr);
    CHECK_VALUE(m);
    if (m->kind == MEM_GRAPH)
        return graph_free_address(m, dptr);
    if (m->kind == MEM_FOREIGN)
        return foreign_drop(dptr);
    if (m->kind == MEM_DEVICE || m->kind == MEM_SMALL)
        return late_free(s, dptr);
    CHECK_VALUE(m->kind == MEM_POOL && pool_free(m, dptr));
    return CUDA_SUCCESS;
}
