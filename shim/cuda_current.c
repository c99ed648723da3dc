/* Which context is current: it says in whose name the next launch is. */
#include "compute.h"

static CUresult learned(CUresult result) {
    __typeof__(&cuCtxGetCurrent) get_current = GS_REAL(cuCtxGetCurrent);
    CUcontext current = NULL;
    if (get_current && get_current(&current) != CUDA_SUCCESS)
        current = NULL;
    gs_now_current(current);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuCtxSetCurrent(CUcontext ctx) {
    GS_NEED(real, cuCtxSetCurrent);
    return learned(real(ctx));
}

GS_EXPORT CUresult CUDAAPI cuCtxPushCurrent(CUcontext ctx) {
    GS_NEED(real, cuCtxPushCurrent);
    return learned(real(ctx));
}

GS_EXPORT CUresult CUDAAPI cuCtxPushCurrent_v2(CUcontext ctx) {
    GS_NEED(real, cuCtxPushCurrent_v2);
    return learned(real(ctx));
}

GS_EXPORT CUresult CUDAAPI cuCtxPopCurrent(CUcontext *pctx) {
    GS_NEED(real, cuCtxPopCurrent);
    return learned(real(pctx));
}

GS_EXPORT CUresult CUDAAPI cuCtxPopCurrent_v2(CUcontext *pctx) {
    GS_NEED(real, cuCtxPopCurrent_v2);
    return learned(real(pctx));
}
