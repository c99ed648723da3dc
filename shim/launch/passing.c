/* Calls that the shim passes on as they are. It sees them because an idle program often begins with
 * one of them, and a suspended container then waits (core/suspend.c). */
#include "launch.h"

#define GS_PASS(name, parameters, ...) \
    GS_EXPORT CUresult CUDAAPI name parameters { \
        GS_NEED(real, name); \
        return real(__VA_ARGS__); \
    }
/* The function and its variant for per-thread streams. */
#define GS_PASS_STREAM(name, parameters, ...) \
    GS_PASS(name, parameters, __VA_ARGS__) \
    GS_PASS(name##_ptsz, parameters, __VA_ARGS__)
#define GS_PASS_DEFAULT(name, parameters, ...) \
    GS_PASS(name, parameters, __VA_ARGS__) \
    GS_PASS(name##_ptds, parameters, __VA_ARGS__)

GS_PASS_STREAM(cuMemcpyAsync, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), to,
               from, bytes, stream)
GS_PASS_STREAM(cuMemcpyHtoDAsync_v2,
               (CUdeviceptr to, const void *from, size_t bytes, CUstream stream), to, from, bytes,
               stream)
GS_PASS_STREAM(cuMemcpyDtoHAsync_v2, (void *to, CUdeviceptr from, size_t bytes, CUstream stream),
               to, from, bytes, stream)
GS_PASS_STREAM(cuMemcpyDtoDAsync_v2,
               (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), to, from, bytes,
               stream)
GS_PASS_STREAM(cuMemcpyPeerAsync,
               (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
                size_t bytes, CUstream stream),
               to, to_context, from, from_context, bytes, stream)
GS_PASS_STREAM(cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *copy, CUstream stream), copy, stream)
GS_PASS_STREAM(cuMemcpy3DAsync_v2, (const CUDA_MEMCPY3D *copy, CUstream stream), copy, stream)
GS_PASS_DEFAULT(cuMemcpyDtoD_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes), to, from, bytes)

#define GS_PASS_FILL(bits, type) \
    GS_PASS_STREAM(cuMemsetD##bits##Async, \
                   (CUdeviceptr at, type value, size_t n, CUstream stream), at, value, n, stream) \
    GS_PASS_DEFAULT(cuMemsetD##bits##_v2, (CUdeviceptr at, type value, size_t n), at, value, n)
GS_PASS_FILL(8, unsigned char)
GS_PASS_FILL(16, unsigned short)
GS_PASS_FILL(32, unsigned int)

/* The first versions of these functions, with 32-bit addresses. */
GS_PASS(cuMemcpyHtoDAsync,
        (CUdeviceptr_v1 to, const void *from, unsigned int bytes, CUstream stream), to, from, bytes,
        stream)
GS_PASS(cuMemcpyDtoHAsync, (void *to, CUdeviceptr_v1 from, unsigned int bytes, CUstream stream), to,
        from, bytes, stream)
GS_PASS(cuMemcpyDtoDAsync,
        (CUdeviceptr_v1 to, CUdeviceptr_v1 from, unsigned int bytes, CUstream stream), to, from,
        bytes, stream)
GS_PASS(cuMemcpyDtoD, (CUdeviceptr_v1 to, CUdeviceptr_v1 from, unsigned int bytes), to, from, bytes)
GS_PASS(cuMemcpy2DAsync, (const CUDA_MEMCPY2D_v1 *copy, CUstream stream), copy, stream)
GS_PASS(cuMemcpy3DAsync, (const CUDA_MEMCPY3D_v1 *copy, CUstream stream), copy, stream)
GS_PASS(cuMemsetD8, (CUdeviceptr_v1 at, unsigned char value, unsigned int n), at, value, n)
GS_PASS(cuMemsetD16, (CUdeviceptr_v1 at, unsigned short value, unsigned int n), at, value, n)
GS_PASS(cuMemsetD32, (CUdeviceptr_v1 at, unsigned int value, unsigned int n), at, value, n)

GS_PASS_STREAM(cuEventRecord, (CUevent event, CUstream stream), event, stream)
GS_PASS(cuEventQuery, (CUevent event), event)
GS_PASS_STREAM(cuStreamQuery, (CUstream stream), stream)

/* Memory and events that two processes share do not survive a checkpoint. */
#define GS_PASS_EXCHANGE(name, parameters, ...) \
    GS_EXPORT CUresult CUDAAPI name parameters { \
        GS_NEED(real, name); \
        gs_does(GS_DOES_EXCHANGE); \
        return real(__VA_ARGS__); \
    }
GS_PASS_EXCHANGE(cuIpcGetEventHandle, (CUipcEventHandle * handle, CUevent event), handle, event)
