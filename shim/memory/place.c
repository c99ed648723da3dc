/* A program may place its own managed memory, but not the managed memory that replaces device
 * memory on the host (oversubscription/virtual.c): it would use more of the device than the share
 * has. Such advice is a hint, so the call returns success without effect. */
#include "memory.h"

static bool is_kept_on_host(CUdeviceptr address) {
    return gs_slot() && gs_virtual_holds(address);
}

GS_EXPORT CUresult CUDAAPI cuMemAdvise(CUdeviceptr ptr, size_t count, CUmem_advise advice,
                                       CUdevice device) {
    GS_NEED(real, cuMemAdvise);
    return is_kept_on_host(ptr) ? CUDA_SUCCESS : real(ptr, count, advice, device);
}

GS_EXPORT CUresult CUDAAPI cuMemAdvise_v2(CUdeviceptr ptr, size_t count, CUmem_advise advice,
                                          CUmemLocation location) {
    GS_NEED(real, cuMemAdvise_v2);
    return is_kept_on_host(ptr) ? CUDA_SUCCESS : real(ptr, count, advice, location);
}

/* Prefetches are served as far as the share has room (oversubscription/residency.c). */
#define GS_PREFETCH(fn) \
    GS_EXPORT CUresult CUDAAPI fn(CUdeviceptr ptr, size_t count, CUdevice device, \
                                  CUstream stream) { \
        GS_NEED(real, fn); \
        struct gs_virtual ours; \
        if (gs_slot() && gs_virtual_of(ptr, &ours)) \
            return gs_residency_prefetch(&ours, ptr, count, device, stream, real); \
        return real(ptr, count, device, stream); \
    }
GS_PREFETCH(cuMemPrefetchAsync)
GS_PREFETCH(cuMemPrefetchAsync_ptsz)

#define GS_PREFETCH_V2(fn, older) \
    GS_EXPORT CUresult CUDAAPI fn(CUdeviceptr ptr, size_t count, CUmemLocation location, \
                                  unsigned int flags, CUstream stream) { \
        GS_NEED(real, fn); \
        struct gs_virtual ours; \
        CUdevice device = \
            location.type == CU_MEM_LOCATION_TYPE_DEVICE ? location.id : (CUdevice)CU_DEVICE_CPU; \
        if (!flags && gs_slot() && GS_REAL(older) && gs_virtual_of(ptr, &ours)) \
            return gs_residency_prefetch(&ours, ptr, count, device, stream, GS_REAL(older)); \
        return is_kept_on_host(ptr) ? CUDA_SUCCESS : real(ptr, count, location, flags, stream); \
    }
GS_PREFETCH_V2(cuMemPrefetchAsync_v2, cuMemPrefetchAsync)
GS_PREFETCH_V2(cuMemPrefetchAsync_v2_ptsz, cuMemPrefetchAsync_ptsz)

/* A batch with such memory is ignored as a whole: a list without it would have to outlive the
 * call. */
static bool any_kept_on_host(const CUdeviceptr *ptrs, size_t count) {
    for (size_t i = 0; ptrs && i < count; i++)
        if (is_kept_on_host(ptrs[i]))
            return true;
    return false;
}

#define GS_PREFETCH_BATCH(fn) \
    GS_EXPORT CUresult CUDAAPI fn(CUdeviceptr *ptrs, size_t *sizes, size_t count, \
                                  CUmemLocation *places, size_t *indices, size_t n_places, \
                                  unsigned long long flags, CUstream stream) { \
        GS_NEED(real, fn); \
        if (any_kept_on_host(ptrs, count)) \
            return CUDA_SUCCESS; \
        return real(ptrs, sizes, count, places, indices, n_places, flags, stream); \
    }
GS_PREFETCH_BATCH(cuMemPrefetchBatchAsync)
GS_PREFETCH_BATCH(cuMemPrefetchBatchAsync_ptsz)
GS_PREFETCH_BATCH(cuMemDiscardAndPrefetchBatchAsync)
GS_PREFETCH_BATCH(cuMemDiscardAndPrefetchBatchAsync_ptsz)
