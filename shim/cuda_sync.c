/* A pool gives freed memory back to the driver when the program synchronises, so that is when its
 * charge goes down: otherwise the container's other processes would be refused memory that is free.
 * Only after a free out of a pool: every other synchronisation pays one load. */
#include "cuda_shim.h"

static CUresult synced(CUresult result) {
    if (result == CUDA_SUCCESS && atomic_load_explicit(&gs_pools_freed, memory_order_relaxed) &&
        gs_slot())
        gs_pools_synced();
    return result;
}

GS_EXPORT CUresult CUDAAPI cuCtxSynchronize(void) {
    GS_NEED(real, cuCtxSynchronize);
    return synced(real());
}

GS_EXPORT CUresult CUDAAPI cuCtxSynchronize_v2(CUcontext ctx) {
    GS_NEED(real, cuCtxSynchronize_v2);
    return synced(real(ctx));
}

GS_EXPORT CUresult CUDAAPI cuStreamSynchronize(CUstream hStream) {
    GS_NEED(real, cuStreamSynchronize);
    return synced(real(hStream));
}

GS_EXPORT CUresult CUDAAPI cuStreamSynchronize_ptsz(CUstream hStream) {
    GS_NEED(real, cuStreamSynchronize_ptsz);
    return synced(real(hStream));
}

GS_EXPORT CUresult CUDAAPI cuEventSynchronize(CUevent hEvent) {
    GS_NEED(real, cuEventSynchronize);
    return synced(real(hEvent));
}
