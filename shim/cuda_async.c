/* Stream-ordered memory. It comes out of a pool, so the pool is charged; on a stream that is being
 * captured the call only adds a node to a graph, and nothing is taken until that graph runs. */
#include "pool.h"

typedef CUresult (*is_capturing_fn)(CUstream, CUstreamCaptureStatus *);
typedef CUresult (*free_fn)(CUdeviceptr, CUstream);

struct async {
    struct gs_here here;
    struct gs_charge charge;
    struct gs_pool *pool;
    bool passed; /* nothing to charge */
};

static bool capturing(is_capturing_fn ask, CUstream stream) {
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    return ask && ask(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* `pool` NULL: the one that the stream's device uses. */
static CUresult begin(struct async *a, size_t bytes, CUmemoryPool pool, CUstream stream,
                      is_capturing_fn ask) {
    if (!gs_slot())
        return CUDA_ERROR_NOT_INITIALIZED;
    a->passed = !gs_here_of_stream(stream, &a->here) || capturing(ask, stream);
    if (a->passed)
        return CUDA_SUCCESS;
    a->pool = pool ? gs_pool_known(pool) : gs_pool_of_stream(&a->here);
    if (!a->pool) { /* on the host, or imported from another process: not this container's device
                       memory */
        a->passed = pool != NULL;
        return a->passed ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    return gs_charge_begin_on(&a->charge, a->pool->device, bytes);
}

/* Settle before the bound is released, so that there is no moment with neither. A pool may have
 * grown by more than was asked for (it takes memory in larger steps): over the limit, it is undone.
 */
static CUresult end(struct async *a, CUresult result, CUdeviceptr *out, size_t bytes,
                    CUstream stream, free_fn undo) {
    if (a->passed)
        return result;
    uint64_t grown = result == CUDA_SUCCESS && out ? gs_pool_settle(a->pool) : 0;
    gs_charge_abort(&a->charge);
    if (result != CUDA_SUCCESS || !out)
        return result;
    if (grown > a->charge.bytes && gs_over(a->pool->dev)) {
        gs_pools_trim(a->pool->dev);
        if (gs_over(a->pool->dev) && undo && undo(*out, stream) == CUDA_SUCCESS) {
            *out = 0;
            gs_pools_trim(a->pool->dev);
            gs_count_refusal(a->pool->dev);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    struct gs_entry entry = {.bytes = bytes,
                             .dev = a->pool->dev,
                             .kind = GS_KIND_POOLED,
                             .extra = gs_pool_number(a->pool)};
    atomic_fetch_add(&a->pool->live, 1);
    if (!gs_map_put(&gs_memory, *out, &entry))
        atomic_fetch_sub(&a->pool->live, 1);
    return result;
}

#define GS_ALLOC_ASYNC(fn, suffix, pool, ...) \
    GS_NEED(real, fn); \
    struct async a; \
    CUresult result = begin(&a, bytesize, pool, hStream, GS_REAL(cuStreamIsCapturing##suffix)); \
    if (result != CUDA_SUCCESS) \
        return result; \
    return end(&a, real(__VA_ARGS__), dptr, bytesize, hStream, GS_REAL(cuMemFreeAsync##suffix))

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
