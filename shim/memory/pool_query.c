/* Pools that the driver makes itself, one per device: whoever asks for one may allocate from it by
 * name (cuMemAllocFromPoolAsync), so it is known from here on, like one that the program made. */
#include "pool.h"

static CUresult answered(CUresult result, const CUmemoryPool *pool, CUdevice device) {
    if (result == CUDA_SUCCESS && pool && gs_slot() && !gs_pool_of(*pool, device))
        return CUDA_ERROR_OUT_OF_MEMORY; /* the table is full: what is not known is not handed out
                                          */
    return result;
}

GS_EXPORT CUresult CUDAAPI cuDeviceGetDefaultMemPool(CUmemoryPool *pool_out, CUdevice dev) {
    GS_NEED(real, cuDeviceGetDefaultMemPool);
    return answered(real(pool_out, dev), pool_out, dev);
}

GS_EXPORT CUresult CUDAAPI cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev) {
    GS_NEED(real, cuDeviceGetMemPool);
    return answered(real(pool, dev), pool, dev);
}

static CUresult of_location(CUresult result, const CUmemoryPool *pool,
                            const CUmemLocation *location, CUmemAllocationType type) {
    bool unmet = result == CUDA_SUCCESS && pool && location && gs_slot() &&
                 !gs_pool_met(*pool, location, type);
    return unmet ? CUDA_ERROR_OUT_OF_MEMORY : result;
}

GS_EXPORT CUresult CUDAAPI cuMemGetDefaultMemPool(CUmemoryPool *pool_out, CUmemLocation *location,
                                                  CUmemAllocationType type) {
    GS_NEED(real, cuMemGetDefaultMemPool);
    return of_location(real(pool_out, location, type), pool_out, location, type);
}

GS_EXPORT CUresult CUDAAPI cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location,
                                           CUmemAllocationType type) {
    GS_NEED(real, cuMemGetMemPool);
    return of_location(real(pool, location, type), pool, location, type);
}
