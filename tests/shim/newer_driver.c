/* A newer driver: functions that the simulated one lacks, in front of it. Calls that begin a
 * capture are the simulator's under other names, some of which no shim knows. Logical endpoints
 * hold nothing. */
#define _GNU_SOURCE
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <dlfcn.h>

/* The simulator's own: a plain call would reach the shim. */
#define SIMULATED(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define EXPORT __attribute__((visibility("default")))

EXPORT CUresult cuStreamBeginNovelCapture(CUstream stream) {
    return SIMULATED(cuStreamBeginCapture_v2)(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

/* A capture that begins between the shim's question and its mark: the answer is always "none". */
static CUstream hidden;

EXPORT CUresult cuStreamBeginHiddenCapture(CUstream stream) {
    hidden = stream;
    return cuStreamBeginNovelCapture(stream);
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    if (stream != hidden)
        return SIMULATED(cuStreamIsCapturing)(stream, status);
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamBeginRecaptureToGraph(CUstream stream, CUstreamCaptureMode mode,
                                              CUgraph graph, CUgraphRecaptureCallback callback,
                                              void *data) {
    (void)graph, (void)callback, (void)data;
    return SIMULATED(cuStreamBeginCapture_v2)(stream, mode);
}

EXPORT CUresult cuStreamBeginCaptureToCig(CUstream stream, CUstreamCigCaptureParams *params) {
    (void)params;
    return SIMULATED(cuStreamBeginCapture_v2)(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

EXPORT CUresult cuStreamEndCaptureToCig(CUstream stream) {
    CUgraph graph;
    CUresult result = SIMULATED(cuStreamEndCapture)(stream, &graph);
    return result == CUDA_SUCCESS ? SIMULATED(cuGraphDestroy)(graph) : result;
}

EXPORT CUresult cuLogicalEndpointBindMem(CUlogicalEndpointId id, CUdevice dev, cuuint64_t offset,
                                         CUmemGenericAllocationHandle memory,
                                         cuuint64_t memory_offset, cuuint64_t size,
                                         unsigned long long flags) {
    (void)id, (void)dev, (void)offset, (void)memory, (void)memory_offset, (void)size;
    return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuLogicalEndpointBindAddr(CUlogicalEndpointId id, CUdevice dev, cuuint64_t offset,
                                          void *address, cuuint64_t size,
                                          unsigned long long flags) {
    (void)id, (void)dev, (void)offset, (void)address, (void)size;
    return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuLogicalEndpointUnbind(CUlogicalEndpointId id, CUdevice dev, cuuint64_t offset,
                                        cuuint64_t size) {
    (void)id, (void)dev, (void)offset, (void)size;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLogicalEndpointDestroy(CUlogicalEndpointId id) {
    (void)id;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchHostFunc_v2(CUstream stream, CUhostFn function, void *data,
                                    unsigned int mode) {
    return mode ? CUDA_ERROR_INVALID_VALUE : SIMULATED(cuLaunchHostFunc)(stream, function, data);
}
