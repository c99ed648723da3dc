/* Copies that may block until earlier work has completed: for the rate limiter they are
 * synchronisations. The copies themselves are not compute and are not charged. */
#include "core/overhead.h"
#include "launch.h"

#define GS_COPY(name, parameters, ...) \
    GS_EXPORT CUresult CUDAAPI name parameters { \
        GS_NEED(real, name); \
        gs_overhead_if_second(); \
        struct gs_compute *compute = gs_compute_sync_begin(NULL); \
        return gs_compute_sync_end(compute, real(__VA_ARGS__)); \
    }

/* The same with the thread's default stream. */
#define GS_COPIES(name, parameters, ...) \
    GS_COPY(name, parameters, __VA_ARGS__) \
    GS_COPY(name##_ptds, parameters, __VA_ARGS__)

GS_COPIES(cuMemcpy, (CUdeviceptr to, CUdeviceptr from, size_t bytes), to, from, bytes)
GS_COPIES(cuMemcpyPeer,
          (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
           size_t bytes),
          to, to_context, from, from_context, bytes)
GS_COPIES(cuMemcpyHtoD_v2, (CUdeviceptr to, const void *from, size_t bytes), to, from, bytes)
GS_COPIES(cuMemcpyDtoH_v2, (void *to, CUdeviceptr from, size_t bytes), to, from, bytes)
GS_COPIES(cuMemcpyHtoA_v2, (CUarray to, size_t at, const void *from, size_t bytes), to, at, from,
          bytes)
GS_COPIES(cuMemcpyAtoH_v2, (void *to, CUarray from, size_t at, size_t bytes), to, from, at, bytes)
GS_COPIES(cuMemcpy2D_v2, (const CUDA_MEMCPY2D *copy), copy)
GS_COPIES(cuMemcpy2DUnaligned_v2, (const CUDA_MEMCPY2D *copy), copy)
GS_COPIES(cuMemcpy3D_v2, (const CUDA_MEMCPY3D *copy), copy)
GS_COPIES(cuMemcpy3DPeer, (const CUDA_MEMCPY3D_PEER *copy), copy)

/* The first versions of these functions, with 32-bit addresses. */
GS_COPY(cuMemcpyHtoD, (CUdeviceptr_v1 to, const void *from, unsigned int bytes), to, from, bytes)
GS_COPY(cuMemcpyDtoH, (void *to, CUdeviceptr_v1 from, unsigned int bytes), to, from, bytes)
GS_COPY(cuMemcpyHtoA, (CUarray to, unsigned int at, const void *from, unsigned int bytes), to, at,
        from, bytes)
GS_COPY(cuMemcpyAtoH, (void *to, CUarray from, unsigned int at, unsigned int bytes), to, from, at,
        bytes)
GS_COPY(cuMemcpy2D, (const CUDA_MEMCPY2D_v1 *copy), copy)
GS_COPY(cuMemcpy2DUnaligned, (const CUDA_MEMCPY2D_v1 *copy), copy)
GS_COPY(cuMemcpy3D, (const CUDA_MEMCPY3D_v1 *copy), copy)
