/* Calls that block until work has completed. A pool returns freed memory to the driver when the
 * program synchronises, so its charge is reduced then: otherwise other processes of the container
 * would be refused memory that is free. Also, the duration of the work is known then. Both happen
 * only after a free to a pool, or after a launch where compute is limited; otherwise a call costs
 * two loads. */
#include "launch.h"
#include "memory/memory.h"

static void begin_wait(void) {
    gs_overhead_if_second();
    if (atomic_load_explicit(&gs_slice_held, memory_order_relaxed))
        gs_slice_waits(true);
}

static CUresult end_wait(CUresult result) {
    if (atomic_load_explicit(&gs_slice_held, memory_order_relaxed))
        gs_slice_waits(false);
    if (result == CUDA_SUCCESS && atomic_load_explicit(&gs_pools_freed, memory_order_relaxed) &&
        gs_slot())
        gs_pools_synced();
    return result;
}

#define GS_SYNC(context, ...) \
    begin_wait(); \
    struct gs_compute *compute = gs_compute_sync_begin(context); \
    return gs_compute_sync_end(compute, end_wait(real(__VA_ARGS__)))

GS_EXPORT CUresult CUDAAPI cuCtxSynchronize(void) {
    GS_NEED(real, cuCtxSynchronize);
    begin_wait();
    struct gs_compute *compute = gs_compute_sync_begin(NULL);
    uint64_t put_off = atomic_load_explicit(&gs_residency_put_off, memory_order_acquire);
    CUresult result = end_wait(real());
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

/* The event's context cannot be queried; most often it is the current one. */
GS_EXPORT CUresult CUDAAPI cuEventSynchronize(CUevent hEvent) {
    GS_NEED(real, cuEventSynchronize);
    GS_SYNC(NULL, hEvent);
}

/* Measure the work in the stream before it is destroyed. */
#define GS_DESTROY_STREAM \
    gs_compute_stream_goes(hStream); \
    CUresult result = real(hStream); \
    if (result == CUDA_SUCCESS) \
        gs_stream_gone(hStream); \
    return result

GS_EXPORT CUresult CUDAAPI cuStreamDestroy(CUstream hStream) {
    GS_NEED(real, cuStreamDestroy);
    GS_DESTROY_STREAM;
}

GS_EXPORT CUresult CUDAAPI cuStreamDestroy_v2(CUstream hStream) {
    GS_NEED(real, cuStreamDestroy_v2);
    GS_DESTROY_STREAM;
}
