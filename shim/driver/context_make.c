/* The calls that create contexts or change what they use. */
#include <string.h>

#include "driver.h"

/* cudaGL.h and cudaVDPAU.h include headers of OpenGL and VDPAU; these four functions need none of
 * their types. */
typedef uint32_t VdpDevice;
typedef void VdpGetProcAddress(void);
CUresult CUDAAPI cuGLCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice dev);
CUresult CUDAAPI cuGLCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev);
CUresult CUDAAPI cuVDPAUCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice dev, VdpDevice vdp,
                                  VdpGetProcAddress **get);
CUresult CUDAAPI cuVDPAUCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev,
                                     VdpDevice vdp, VdpGetProcAddress **get);

#define GS_CREATE(device, ...) \
    struct gs_charge charge; \
    CUresult result = gs_context_begin(&charge, device); \
    if (result != CUDA_SUCCESS) \
        return result; \
    GS_CONTEXT_CALL(result, charge, real(__VA_ARGS__)); \
    return gs_context_made(&charge, result, pctx, device)

GS_EXPORT CUresult CUDAAPI cuCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice dev) {
    GS_NEED(real, cuCtxCreate);
    GS_CREATE(dev, pctx, flags, dev);
}

GS_EXPORT CUresult CUDAAPI cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev) {
    GS_NEED(real, cuCtxCreate_v2);
    GS_CREATE(dev, pctx, flags, dev);
}

GS_EXPORT CUresult CUDAAPI cuCtxCreate_v3(CUcontext *pctx, CUexecAffinityParam *params, int n,
                                          unsigned int flags, CUdevice dev) {
    GS_NEED(real, cuCtxCreate_v3);
    GS_CREATE(dev, pctx, params, n, flags, dev);
}

GS_EXPORT CUresult CUDAAPI cuCtxCreate_v4(CUcontext *pctx, CUctxCreateParams *params,
                                          unsigned int flags, CUdevice dev) {
    GS_NEED(real, cuCtxCreate_v4);
    GS_CREATE(dev, pctx, params, flags, dev);
}

GS_EXPORT CUresult CUDAAPI cuGLCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice dev) {
    GS_NEED(real, cuGLCtxCreate);
    GS_CREATE(dev, pctx, flags, dev);
}

GS_EXPORT CUresult CUDAAPI cuGLCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev) {
    GS_NEED(real, cuGLCtxCreate_v2);
    GS_CREATE(dev, pctx, flags, dev);
}

GS_EXPORT CUresult CUDAAPI cuVDPAUCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice dev,
                                            VdpDevice vdp, VdpGetProcAddress **get) {
    GS_NEED(real, cuVDPAUCtxCreate);
    GS_CREATE(dev, pctx, flags, dev, vdp, get);
}

GS_EXPORT CUresult CUDAAPI cuVDPAUCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev,
                                               VdpDevice vdp, VdpGetProcAddress **get) {
    GS_NEED(real, cuVDPAUCtxCreate_v2);
    GS_CREATE(dev, pctx, flags, dev, vdp, get);
}

/* ---- green contexts: parts of the primary one ---------------------------------------------------
 */

static struct gs_map greens; /* CUgreenCtx -> extra = device, context = what launches use */

struct green {
    __typeof__(&cuGreenCtxCreate) real;
    CUgreenCtx *out;
    CUdevResourceDesc desc;
    CUdevice device;
    unsigned int flags;
};

static CUresult make_green(void *arg) {
    struct green *g = arg;
    return g->real(g->out, g->desc, g->device, g->flags);
}

GS_EXPORT CUresult CUDAAPI cuGreenCtxCreate(CUgreenCtx *phCtx, CUdevResourceDesc desc, CUdevice dev,
                                            unsigned int flags) {
    GS_NEED(real, cuGreenCtxCreate);
    struct green green = {real, phCtx, desc, dev, flags};
    if (!gs_slot())
        return CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = gs_primary_used(dev, make_green, &green);
    struct gs_entry entry = {.extra = (uint32_t)dev};
    if (result == CUDA_SUCCESS && phCtx)
        gs_map_put(&greens, (uint64_t)(uintptr_t)*phCtx, &entry);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuGreenCtxDestroy(CUgreenCtx hCtx) {
    GS_NEED(real, cuGreenCtxDestroy);
    struct gs_entry entry = {.context = 0};
    struct gs_leaving leaving = {.compute = NULL};
    if (gs_slot() && gs_map_get(&greens, (uint64_t)(uintptr_t)hCtx, &entry) && entry.context)
        gs_compute_context_goes(&leaving, (CUcontext)(uintptr_t)entry.context);
    CUresult result = real(hCtx);
    gs_compute_context_gone(&leaving, result, false);
    if (gs_slot() && result == CUDA_SUCCESS &&
        gs_map_take(&greens, (uint64_t)(uintptr_t)hCtx, &entry))
        gs_primary_unused((CUdevice)(uint32_t)entry.extra);
    return result;
}

/* The context uses no memory of its own, so it is recorded with a charge of 0. */
GS_EXPORT CUresult CUDAAPI cuCtxFromGreenCtx(CUcontext *pContext, CUgreenCtx hCtx) {
    GS_NEED(real, cuCtxFromGreenCtx);
    struct gs_charge nothing = {.passed = true};
    struct gs_entry entry;
    CUresult result = real(pContext, hCtx);
    uint64_t key = (uint64_t)(uintptr_t)hCtx;
    if (!gs_slot() || !gs_map_get(&greens, key, &entry))
        return result;
    gs_context_made(&nothing, result, pContext, (CUdevice)(uint32_t)entry.extra);
    if (result == CUDA_SUCCESS && pContext && gs_map_take(&greens, key, &entry)) {
        entry.context = (uint64_t)(uintptr_t)*pContext;
        gs_map_put(&greens, key, &entry);
    }
    return result;
}

/* ---- limits of a context: some are device memory ------------------------------------------------
 */

/* Return the device bytes for one unit of a limit: the stack exists once for each thread that can
 * be resident. The memory for kernels that launch kernels is an upper bound: the programming guide
 * gives up to 150 MB for each level of synchronisation. It does not mention pending launches; each
 * has its parameters (at most 4 KiB) and little else. */
static uint64_t unit_bytes(CUlimit limit, CUdevice device) {
    __typeof__(&cuDeviceGetAttribute) get = GS_REAL(cuDeviceGetAttribute);
    int sms = 0, threads = 0;
    if (limit == CU_LIMIT_PRINTF_FIFO_SIZE || limit == CU_LIMIT_MALLOC_HEAP_SIZE)
        return 1;
    if (limit == CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH)
        return UINT64_C(150) << 20;
    if (limit == CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT)
        return 4096;
    if (limit != CU_LIMIT_STACK_SIZE || !get ||
        get(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) != CUDA_SUCCESS ||
        get(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device) != CUDA_SUCCESS)
        return 0;
    return (uint64_t)sms * (uint64_t)threads;
}

static uint64_t limit_bytes(size_t value, uint64_t unit) {
    uint64_t bytes;
    return gs_round_up(__builtin_mul_overflow(value, unit, &bytes) ? UINT64_MAX : bytes, GS_BLOCK);
}

static uint64_t excess_over(uint64_t floor, uint64_t bytes) {
    return bytes > floor ? bytes - floor : 0;
}

/* The value of a limit when this process first changed it on a device, plus one; 0: not changed
 * yet. */
static size_t defaults[GS_MAX_ORDINALS][CU_LIMIT_MAX];

/* The defaults are part of context_bytes. Memory beyond them is charged with the context, and
 * lowering a limit below its default releases nothing. The caller holds lock_limit. */
static CUresult set_limit(__typeof__(&cuCtxSetLimit) real, const struct gs_here *here,
                          CUlimit limit, size_t value, uint64_t unit) {
    __typeof__(&cuCtxGetLimit) get = GS_REAL(cuCtxGetLimit);
    struct gs_growth growth;
    size_t before = 0, after = value;
    if (!get || get(&before, limit) != CUDA_SUCCESS)
        return real(limit, value);
    size_t *first = &defaults[here->device][limit];
    if (*first == 0)
        *first = before + 1;
    uint64_t floor = limit_bytes(*first - 1, unit);
    uint64_t had = excess_over(floor, limit_bytes(before, unit));
    uint64_t want = excess_over(floor, limit_bytes(value, unit));
    CUresult result = gs_growth_begin(&growth, here->device, want > had ? want - had : 0);
    if (result != CUDA_SUCCESS)
        return result;
    result = real(limit, value);
    uint64_t kept = gs_growth_end(&growth, result == CUDA_SUCCESS);
    if (result != CUDA_SUCCESS)
        return result;
    gs_overhead_shrank(here->dev);
    if (gs_overhead_is_counted(here->dev))
        return result;
    get(&after, limit); /* the driver may round */
    uint64_t has = excess_over(floor, limit_bytes(after, unit));
    if (has > had + kept)
        gs_charge_anyway(here->dev, has - had - kept);
    else
        gs_release(here->dev, had + kept - has);
    gs_context_grow(here->context, (int64_t)(has - had));
    return result;
}

GS_EXPORT CUresult CUDAAPI cuCtxSetLimit(CUlimit limit, size_t value) {
    GS_NEED(real, cuCtxSetLimit);
    struct gs_here here;
    if (!gs_slot())
        return CUDA_ERROR_NOT_INITIALIZED;
    uint64_t unit = gs_here(&here) ? unit_bytes(limit, here.device) : 0;
    if (!unit || here.device < 0 || here.device >= GS_MAX_ORDINALS)
        return real(limit, value);
    gs_lock(&gs_self()->lock_limit);
    CUresult result = set_limit(real, &here, limit, value, unit);
    gs_unlock(&gs_self()->lock_limit);
    return result;
}

/* ---- checkpoints ---------------------------------------------------------------------------- */

/* The memory of a process stays charged while a checkpoint keeps it on the host; else there might
 * be no room to restore it. */

GS_EXPORT CUresult CUDAAPI cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args) {
    GS_NEED(real, cuCheckpointProcessLock);
    return real(pid, args);
}

GS_EXPORT CUresult CUDAAPI cuCheckpointProcessCheckpoint(int pid,
                                                         CUcheckpointCheckpointArgs *args) {
    GS_NEED(real, cuCheckpointProcessCheckpoint);
    return real(pid, args);
}

GS_EXPORT CUresult CUDAAPI cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args) {
    GS_NEED(real, cuCheckpointProcessRestore);
    for (unsigned i = 0; args && args->gpuPairs && i < args->gpuPairsCount; i++)
        if (memcmp(&args->gpuPairs[i].oldUuid, &args->gpuPairs[i].newUuid, sizeof(CUuuid)) != 0)
            return CUDA_ERROR_NOT_PERMITTED; /* the charges would stay with the old device */
    return real(pid, args);
}

GS_EXPORT CUresult CUDAAPI cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args) {
    GS_NEED(real, cuCheckpointProcessUnlock);
    return real(pid, args);
}
