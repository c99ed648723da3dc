/* Stream-ordered memory. It comes out of a pool, so the pool is charged; on a stream that is being
 * captured the call only adds a node to a graph, and nothing is taken until that graph runs. */
#include "pool.h"

typedef CUresult (*is_capturing_fn)(CUstream, CUstreamCaptureStatus *);
typedef CUresult (*free_fn)(CUdeviceptr, CUstream);

struct async {
    struct gs_pool *pool;
    struct gs_room room;
    bool passed;  /* nothing to charge */
    bool unknown; /* nothing that could be charged: the driver will refuse it, or it is undone */
};

static bool capturing(is_capturing_fn ask, CUstream stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    return ask && ask(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* `pool` NULL: the one that the stream's device uses. */
static CUresult begin(struct async *a, size_t bytes, CUmemoryPool pool, CUstream stream,
                      is_capturing_fn ask) {
    struct gs_here here;
    *a = (struct async){0};
    if (!gs_slot())
        return CUDA_ERROR_NOT_INITIALIZED;
    a->passed = capturing(ask, stream) || (pool && gs_pool_passes(pool));
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
    if (!a->pool) /* destroyed, or in no table: what is not known is not allocated from */
        return pool ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OUT_OF_MEMORY;
    return gs_room_begin(&a->room, a->pool, bytes, 0);
}

static CUresult give_back(struct async *a, CUdeviceptr *out, CUstream stream, free_fn undo) {
    if (!undo || undo(*out, stream) != CUDA_SUCCESS)
        return CUDA_SUCCESS; /* it stays, and stays charged */
    *out = 0;
    if (a->pool) {
        atomic_fetch_sub(&a->pool->live, 1);
        gs_pools_trim(a->pool->dev);
        if (!gs_virtual_has(a->pool->dev))
            gs_count_refusal(a->pool->dev);
    }
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult end(struct async *a, CUresult result, CUdeviceptr *out, size_t bytes,
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
        return give_back(a, out, stream, undo);
    if (over) {
        gs_pools_trim(a->pool->dev);
        if (gs_over(a->pool->dev) && give_back(a, out, stream, undo) == CUDA_ERROR_OUT_OF_MEMORY)
            return CUDA_ERROR_OUT_OF_MEMORY;
    }
    struct gs_entry entry = {.bytes = bytes,
                             .dev = a->pool->dev,
                             .kind = GS_KIND_POOLED,
                             .extra = gs_pool_number(a->pool)};
    if (gs_map_put(&gs_memory, *out, &entry))
        return result;
    return give_back(a, out, stream, undo);
}

/* Managed memory for what the pool's device has no room for. There is none on another device than
 * the current context's. */
static CUresult on_host(const struct async *a, CUresult result, CUdeviceptr *out, size_t bytes) {
    struct gs_here here;
    bool may = result == CUDA_ERROR_OUT_OF_MEMORY && !a->passed && a->pool &&
               gs_virtual_has(a->pool->dev) && gs_here(&here) && here.dev == a->pool->dev;
    return may ? gs_virtual_alloc(out, bytes, CU_MEM_ATTACH_GLOBAL) : result;
}

#define GS_ALLOC_ASYNC(fn, suffix, pool, ...) \
    GS_NEED(real, fn); \
    struct async a; \
    CUresult result = begin(&a, bytesize, pool, hStream, GS_REAL(cuStreamIsCapturing##suffix)); \
    if (result == CUDA_SUCCESS) \
        result = \
            end(&a, real(__VA_ARGS__), dptr, bytesize, hStream, GS_REAL(cuMemFreeAsync##suffix)); \
    return on_host(&a, result, dptr, bytesize)

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

/* While capturing, a free is a node too: the memory stays where it is. */
static CUresult free_async(free_fn real, is_capturing_fn ask, CUdeviceptr dptr, CUstream stream) {
    if (!gs_slot() || capturing(ask, stream))
        return real(dptr, stream);
    if (gs_virtual_is(dptr)) /* of no pool: the driver frees it at once only */
        return gs_virtual_free_later(dptr, stream) ? CUDA_SUCCESS : cuMemFree_v2(dptr);
    return GS_FREE(gs_memory, dptr, real(dptr, stream));
}

GS_EXPORT CUresult CUDAAPI cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream) {
    GS_NEED(real, cuMemFreeAsync);
    return free_async(real, GS_REAL(cuStreamIsCapturing), dptr, hStream);
}

GS_EXPORT CUresult CUDAAPI cuMemFreeAsync_ptsz(CUdeviceptr dptr, CUstream hStream) {
    GS_NEED(real, cuMemFreeAsync_ptsz);
    return free_async(real, GS_REAL(cuStreamIsCapturing_ptsz), dptr, hStream);
}
