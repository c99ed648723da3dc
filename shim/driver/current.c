/* Which context is current: it says in whose name the next launch is. */
#include "driver.h"

static CUresult learned(CUresult result) {
    __typeof__(&cuCtxGetCurrent) get_current = GS_REAL(cuCtxGetCurrent);
    CUcontext current = NULL;
    if (get_current && get_current(&current) != CUDA_SUCCESS)
        current = NULL;
    gs_now_current(current);
    return result;
}

/* Without asking the driver, where the call itself says it. NULL uncovers what was below. */
static CUresult made(CUresult result, CUcontext ctx) {
    if (!ctx)
        return learned(result);
    if (result == CUDA_SUCCESS)
        gs_now_current(ctx);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuCtxSetCurrent(CUcontext ctx) {
    GS_NEED(real, cuCtxSetCurrent);
    return made(real(ctx), ctx);
}

GS_EXPORT CUresult CUDAAPI cuCtxPushCurrent(CUcontext ctx) {
    GS_NEED(real, cuCtxPushCurrent);
    return made(real(ctx), ctx);
}

GS_EXPORT CUresult CUDAAPI cuCtxPushCurrent_v2(CUcontext ctx) {
    GS_NEED(real, cuCtxPushCurrent_v2);
    return made(real(ctx), ctx);
}

GS_EXPORT CUresult CUDAAPI cuCtxPopCurrent(CUcontext *pctx) {
    GS_NEED(real, cuCtxPopCurrent);
    return learned(real(pctx));
}

GS_EXPORT CUresult CUDAAPI cuCtxPopCurrent_v2(CUcontext *pctx) {
    GS_NEED(real, cuCtxPopCurrent_v2);
    return learned(real(pctx));
}
