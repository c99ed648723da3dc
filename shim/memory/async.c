/* Stream-ordered memory. It comes out of a pool, so the pool is charged. In a stream that is being
 * captured the call only adds a node to a graph, and nothing is allocated until that graph runs. */
#include "pool.h"

typedef CUresult (*is_capturing_fn)(CUstream, CUstreamCaptureStatus *);
typedef CUresult (*free_fn)(CUdeviceptr, CUstream);

struct async {
    struct gs_pool *pool;
    struct gs_room room;
    bool passed;  /* nothing to charge */
    bool unknown; /* there is no pool to charge: the driver will refuse the call, or it is undone */
};

static bool is_capturing(is_capturing_fn ask, CUstream stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    return ask && ask(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* `pool` NULL: the pool that the stream's device uses. */
static CUresult begin_alloc(struct async *a, size_t bytes, CUmemoryPool pool, CUstream stream,
                            is_capturing_fn ask) {
    struct gs_here here;
    *a = (struct async){0};
    if (!gs_slot())
        return CUDA_ERROR_NOT_INITIALIZED;
    a->passed = is_capturing(ask, stream) || (pool && gs_pool_passes(pool));
    if (a->passed)
        return CUDA_SUCCESS;
    if (pool) {
        a->pool = gs_pool_known(pool);
    } else if (gs_here_of_stream(stream, &here)) {
        a->pool = gs_pool_of_stream(&here);
    } else {
        a->unknown = true;
        return CUDA_SUCCESS;
    }
    if (!a->pool) /* destroyed, or the table is full: never allocate from an unknown pool */
        return pool ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OUT_OF_MEMORY;
    return gs_room_begin(&a->room, a->pool, bytes, 0);
}

static int charged_dev(const struct async *a) {
    return a->pool ? a->pool->dev : GS_NO_DEV;
}

static CUresult undo_alloc(struct async *a, CUdeviceptr *out, CUstream stream, free_fn undo) {
    if (!undo || undo(*out, stream) != CUDA_SUCCESS)
        return CUDA_SUCCESS; /* it cannot be freed, so it stays charged */
    *out = 0;
    if (a->pool) {
        atomic_fetch_sub(&a->pool->live, 1);
        gs_pools_trim(a->pool->dev);
        if (!gs_virtual_has(a->pool->dev))
            gs_count_refusal(a->pool->dev);
    }
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult end_alloc(struct async *a, CUresult result, CUdeviceptr *out, size_t bytes,
                          CUstream stream, free_fn undo) {
    if (a->passed)
        return result;
    bool given = result == CUDA_SUCCESS && out;
    if (given && a->pool)
        atomic_fetch_add(&a->pool->live, 1);
    bool over = !a->unknown && gs_room_end(&a->room);
    if (!given)
        return result;
    if (a->unknown)
        return undo_alloc(a, out, stream, undo);
    if (over) {
        gs_pools_trim(a->pool->dev);
        if (gs_over(a->pool->dev) && undo_alloc(a, out, stream, undo) == CUDA_ERROR_OUT_OF_MEMORY)
            return CUDA_ERROR_OUT_OF_MEMORY;
    }
    struct gs_entry entry = {.bytes = bytes,
                             .dev = a->pool->dev,
                             .kind = GS_KIND_POOLED,
                             .extra = gs_pool_number(a->pool)};
    if (gs_map_put(&gs_memory, *out, &entry))
        return result;
    return undo_alloc(a, out, stream, undo);
}

/* Allocate managed memory if the pool's device has no room; only on the device of the current
 * context. */
static CUresult retry_on_host(const struct async *a, CUresult result, CUdeviceptr *out,
                              size_t bytes) {
    struct gs_here here;
    bool may = result == CUDA_ERROR_OUT_OF_MEMORY && !a->passed && a->pool &&
               gs_virtual_has(a->pool->dev) && gs_here(&here) && here.dev == a->pool->dev;
    return may ? gs_virtual_alloc(out, bytes, CU_MEM_ATTACH_GLOBAL) : result;
}

#define GS_ALLOC_ASYNC(fn, suffix, pool, ...) \
    GS_NEED(real, fn); \
    GS_CHANGES; \
    struct async a; \
    CUresult result = \
        begin_alloc(&a, bytesize, pool, hStream, GS_REAL(cuStreamIsCapturing##suffix)); \
    if (result == CUDA_SUCCESS) { \
        GS_WITH_RECLAIM(result, charged_dev(&a), bytesize, real(__VA_ARGS__)); \
        result = end_alloc(&a, result, dptr, bytesize, hStream, GS_REAL(cuMemFreeAsync##suffix)); \
    } \
    return retry_on_host(&a, result, dptr, bytesize)

GS_EXPORT CUresult CUDAAPI cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream) {
    GS_ALLOC_ASYNC(cuMemAllocAsync, , NULL, dptr, bytesize, hStream);
}

GS_EXPORT CUresult CUDAAPI cuMemAllocAsync_ptsz(CUdeviceptr *dptr, size_t bytesize,
                                                CUstream hStream) {
    GS_ALLOC_ASYNC(cuMemAllocAsync_ptsz, _ptsz, NULL, dptr, bytesize, hStream);
}

GS_EXPORT CUresult CUDAAPI cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytesize,
                                                   CUmemoryPool pool, CUstream hStream) {
    GS_ALLOC_ASYNC(cuMemAllocFromPoolAsync, , pool, dptr, bytesize, pool, hStream);
}

GS_EXPORT CUresult CUDAAPI cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *dptr, size_t bytesize,
                                                        CUmemoryPool pool, CUstream hStream) {
    GS_ALLOC_ASYNC(cuMemAllocFromPoolAsync_ptsz, _ptsz, pool, dptr, bytesize, pool, hStream);
}

/* Plain memory stays on the device until earlier work in the stream has ended. So it stays charged
 * as overhead, until the driver counts less at the next synchronisation. */
static CUresult free_now(free_fn real, CUdeviceptr dptr, CUstream stream) {
    GS_CHANGES;
    struct gs_entry entry;
    bool known = gs_map_take(&gs_memory, dptr, &entry);
    CUresult result = real(dptr, stream);
    if (known && result != CUDA_SUCCESS)
        gs_map_put(&gs_memory, dptr, &entry);
    if (!known || result != CUDA_SUCCESS)
        return result;
    if (entry.kind == GS_KIND_LINEAR && gs_overhead_is_counted(entry.dev)) {
        gs_overhead_keeps(entry.dev, gs_round_up(entry.bytes, GS_BLOCK));
        atomic_fetch_or(&gs_freed_later, UINT32_C(1) << entry.dev);
        atomic_store(&gs_pools_freed, 1);
    }
    gs_uncharge(dptr, &entry);
    return result;
}

/* In a capture a free adds a node, too: the memory stays allocated. */
static CUresult free_async(free_fn real, is_capturing_fn ask, CUdeviceptr dptr, CUstream stream) {
    if (!gs_slot() || is_capturing(ask, stream))
        return real(dptr, stream);
    if (gs_virtual_is(dptr)) /* not from a pool: the driver can only free it at once */
        return gs_virtual_free_later(dptr, stream) ? CUDA_SUCCESS : cuMemFree_v2(dptr);
    return free_now(real, dptr, stream);
}

GS_EXPORT CUresult CUDAAPI cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream) {
    GS_NEED(real, cuMemFreeAsync);
    return free_async(real, GS_REAL(cuStreamIsCapturing), dptr, hStream);
}

GS_EXPORT CUresult CUDAAPI cuMemFreeAsync_ptsz(CUdeviceptr dptr, CUstream hStream) {
    GS_NEED(real, cuMemFreeAsync_ptsz);
    return free_async(real, GS_REAL(cuStreamIsCapturing_ptsz), dptr, hStream);
}
