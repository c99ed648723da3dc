/* Pools that the driver creates itself, one per device. A program that queries such a pool may
 * allocate from it by name (cuMemAllocFromPoolAsync), so it is recorded here, like a pool that the
 * program created. */
#include "pool.h"

static CUresult record_device_pool(CUresult result, const CUmemoryPool *pool, CUdevice device) {
    if (result == CUDA_SUCCESS && pool && gs_slot() && !gs_pool_of(*pool, device))
        return CUDA_ERROR_OUT_OF_MEMORY; /* the table is full: never return an unknown pool */
    return result;
}

GS_EXPORT CUresult CUDAAPI cuDeviceGetDefaultMemPool(CUmemoryPool *pool_out, CUdevice dev) {
    GS_NEED(real, cuDeviceGetDefaultMemPool);
    return record_device_pool(real(pool_out, dev), pool_out, dev);
}

GS_EXPORT CUresult CUDAAPI cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev) {
    GS_NEED(real, cuDeviceGetMemPool);
    return record_device_pool(real(pool, dev), pool, dev);
}

static CUresult record_pool_at(CUresult result, const CUmemoryPool *pool,
                               const CUmemLocation *location, CUmemAllocationType type) {
    bool unrecorded = result == CUDA_SUCCESS && pool && location && gs_slot() &&
                      !gs_pool_register(*pool, location, type);
    return unrecorded ? CUDA_ERROR_OUT_OF_MEMORY : result;
}

GS_EXPORT CUresult CUDAAPI cuMemGetDefaultMemPool(CUmemoryPool *pool_out, CUmemLocation *location,
                                                  CUmemAllocationType type) {
    GS_NEED(real, cuMemGetDefaultMemPool);
    return record_pool_at(real(pool_out, location, type), pool_out, location, type);
}

GS_EXPORT CUresult CUDAAPI cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location,
                                           CUmemAllocationType type) {
    GS_NEED(real, cuMemGetMemPool);
    return record_pool_at(real(pool, location, type), pool, location, type);
}
