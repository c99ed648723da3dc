/* Calls that block until work is done. A pool gives freed memory back to the driver when the
 * program synchronises, so that is when its charge goes down: otherwise the container's other
 * processes would be refused memory that is free. And what the work took is known then. Only after
 * a free out of a pool, or a launch where compute is limited: otherwise a call pays two loads. */
#include "launch.h"
#include "memory/memory.h"

static void waits(void) {
    if (atomic_load_explicit(&gs_slice_held, memory_order_relaxed))
        gs_slice_waits(true);
}

static CUresult synced(CUresult result) {
    if (atomic_load_explicit(&gs_slice_held, memory_order_relaxed))
        gs_slice_waits(false);
    if (result == CUDA_SUCCESS && atomic_load_explicit(&gs_pools_freed, memory_order_relaxed) &&
        gs_slot())
        gs_pools_synced();
    return result;
}

#define GS_SYNC(context, ...) \
    waits(); \
    struct gs_compute *compute = gs_compute_sync_begin(context); \
    return gs_compute_sync_end(compute, synced(real(__VA_ARGS__)))

GS_EXPORT CUresult CUDAAPI cuCtxSynchronize(void) {
    GS_NEED(real, cuCtxSynchronize);
    waits();
    struct gs_compute *compute = gs_compute_sync_begin(NULL);
    uint64_t put_off = atomic_load_explicit(&gs_residency_put_off, memory_order_acquire);
    CUresult result = synced(real());
    if (result == CUDA_SUCCESS && atomic_load_explicit(&gs_virtual_later, memory_order_relaxed))
        gs_virtual_drain();
    if (result == CUDA_SUCCESS && atomic_load_explicit(&gs_residency_waiting, memory_order_relaxed))
        gs_residency_synced(put_off);
    return gs_compute_sync_end(compute, result);
}

GS_EXPORT CUresult CUDAAPI cuCtxSynchronize_v2(CUcontext ctx) {
    GS_NEED(real, cuCtxSynchronize_v2);
    GS_SYNC(ctx, ctx);
}

GS_EXPORT CUresult CUDAAPI cuStreamSynchronize(CUstream hStream) {
    GS_NEED(real, cuStreamSynchronize);
    GS_SYNC(gs_compute_context_of(hStream), hStream);
}

GS_EXPORT CUresult CUDAAPI cuStreamSynchronize_ptsz(CUstream hStream) {
    GS_NEED(real, cuStreamSynchronize_ptsz);
    GS_SYNC(gs_compute_context_of(hStream), hStream);
}

/* Its context cannot be asked for; most often it is the current one. */
GS_EXPORT CUresult CUDAAPI cuEventSynchronize(CUevent hEvent) {
    GS_NEED(real, cuEventSynchronize);
    GS_SYNC(NULL, hEvent);
}

/* What is in it is timed before it goes. */
#define GS_DESTROY_STREAM \
    gs_compute_stream_goes(hStream); \
    CUresult result = real(hStream); \
    if (result == CUDA_SUCCESS) \
        gs_captures_stream_gone(hStream); \
    return result

GS_EXPORT CUresult CUDAAPI cuStreamDestroy(CUstream hStream) {
    GS_NEED(real, cuStreamDestroy);
    GS_DESTROY_STREAM;
}

GS_EXPORT CUresult CUDAAPI cuStreamDestroy_v2(CUstream hStream) {
    GS_NEED(real, cuStreamDestroy_v2);
    GS_DESTROY_STREAM;
}
