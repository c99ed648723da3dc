/* Track which context is current: the next launch belongs to it. */
#include "driver.h"

static CUresult ask_current(CUresult result) {
    __typeof__(&cuCtxGetCurrent) get_current = GS_REAL(cuCtxGetCurrent);
    CUcontext current = NULL;
    if (get_current && get_current(&current) != CUDA_SUCCESS)
        current = NULL;
    gs_now_current(current);
    return result;
}

/* Use the context that the call names, without asking the driver. NULL makes an earlier context
 * current, so ask. */
static CUresult set_current(CUresult result, CUcontext ctx) {
    if (!ctx)
        return ask_current(result);
    if (result == CUDA_SUCCESS)
        gs_now_current(ctx);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuCtxSetCurrent(CUcontext ctx) {
    GS_NEED(real, cuCtxSetCurrent);
    return set_current(real(ctx), ctx);
}

GS_EXPORT CUresult CUDAAPI cuCtxPushCurrent(CUcontext ctx) {
    GS_NEED(real, cuCtxPushCurrent);
    return set_current(real(ctx), ctx);
}

GS_EXPORT CUresult CUDAAPI cuCtxPushCurrent_v2(CUcontext ctx) {
    GS_NEED(real, cuCtxPushCurrent_v2);
    return set_current(real(ctx), ctx);
}

GS_EXPORT CUresult CUDAAPI cuCtxPopCurrent(CUcontext *pctx) {
    GS_NEED(real, cuCtxPopCurrent);
    return ask_current(real(pctx));
}

GS_EXPORT CUresult CUDAAPI cuCtxPopCurrent_v2(CUcontext *pctx) {
    GS_NEED(real, cuCtxPopCurrent_v2);
    return ask_current(real(pctx));
}
