/* Streams that wait for something other than work of their own context. During the wait the device
 * may be idle or used by another context, and that time is not charged. */
#include "launch.h"

/* An event of another process was opened, so any event may be from another process. */
static _Atomic bool foreign_events;

/* If only one context launches, an event belongs to it, and the work that is waited for is charged
 * anyway. */
static void waits_for_event(CUstream stream) {
    if (atomic_load_explicit(&gs_computes, memory_order_relaxed) > 1 ||
        atomic_load_explicit(&foreign_events, memory_order_relaxed))
        gs_compute_waits(stream);
}

static void waits_for_values(CUstream stream, const CUstreamBatchMemOpParams *op, unsigned n) {
    for (unsigned i = 0; op && i < n; i++)
        if (op[i].operation == CU_STREAM_MEM_OP_WAIT_VALUE_32 ||
            op[i].operation == CU_STREAM_MEM_OP_WAIT_VALUE_64) {
            gs_compute_waits(stream);
            return;
        }
}

GS_EXPORT CUresult CUDAAPI cuIpcOpenEventHandle(CUevent *phEvent, CUipcEventHandle handle) {
    GS_NEED(real, cuIpcOpenEventHandle);
    gs_does(GS_DOES_EXCHANGE);
    atomic_store(&foreign_events, true);
    return real(phEvent, handle);
}

#define GS_ONE_WAIT(name, parameters, waits, stream, ...) \
    GS_EXPORT CUresult CUDAAPI name parameters { \
        GS_NEED(real, name); \
        waits(stream); \
        return real(__VA_ARGS__); \
    }
/* The function and its variant for per-thread streams. */
#define GS_WAIT(name, parameters, waits, ...) \
    GS_ONE_WAIT(name, parameters, waits, stream, __VA_ARGS__) \
    GS_ONE_WAIT(name##_ptsz, parameters, waits, gs_per_thread(stream), __VA_ARGS__)

GS_WAIT(cuLaunchHostFunc, (CUstream stream, CUhostFn fn, void *data), gs_compute_waits, stream, fn,
        data)
GS_WAIT(cuLaunchHostFunc_v2, (CUstream stream, CUhostFn fn, void *data, unsigned int mode),
        gs_compute_waits, stream, fn, data, mode)
GS_WAIT(cuStreamAddCallback,
        (CUstream stream, CUstreamCallback callback, void *data, unsigned int flags),
        gs_compute_waits, stream, callback, data, flags)
GS_WAIT(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned int flags), waits_for_event,
        stream, event, flags)
GS_WAIT(cuWaitExternalSemaphoresAsync,
        (const CUexternalSemaphore *semaphore, const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS *wait,
         unsigned int n, CUstream stream),
        gs_compute_waits, semaphore, wait, n, stream)

#define GS_WAIT_VALUE(name, type) \
    GS_WAIT(name, (CUstream stream, CUdeviceptr address, type value, unsigned int flags), \
            gs_compute_waits, stream, address, value, flags)
GS_WAIT_VALUE(cuStreamWaitValue32, cuuint32_t)
GS_WAIT_VALUE(cuStreamWaitValue32_v2, cuuint32_t)
GS_WAIT_VALUE(cuStreamWaitValue64, cuuint64_t)
GS_WAIT_VALUE(cuStreamWaitValue64_v2, cuuint64_t)

#define GS_BATCH(name, stream_of) \
    GS_EXPORT CUresult CUDAAPI name(CUstream stream, unsigned int count, \
                                    CUstreamBatchMemOpParams *params, unsigned int flags) { \
        GS_NEED(real, name); \
        waits_for_values(stream_of, params, count); \
        return real(stream, count, params, flags); \
    }
GS_BATCH(cuStreamBatchMemOp, stream)
GS_BATCH(cuStreamBatchMemOp_ptsz, gs_per_thread(stream))
GS_BATCH(cuStreamBatchMemOp_v2, stream)
GS_BATCH(cuStreamBatchMemOp_v2_ptsz, gs_per_thread(stream))
