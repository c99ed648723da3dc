/* Report a program's own limit and use as the device's memory. The driver is always called first,
 * so its errors and its handling of NULL pointers do not change. */
#include "driver.h"

struct answer {
    uint64_t free, total;
};

/* Total is the limit, used is the container's use, and free is what it can have now. */
static struct answer own_memory(int dev, uint64_t free_real, uint64_t total_real) {
    gs_pools_settle(dev);
    gs_overhead_settle(dev);
    struct gs_whole whole = gs_whole(dev);
    bool all = whole.oversubscribed || whole.limit < total_real;
    return (struct answer){gs_free_now(dev, &whole, free_real), all ? whole.limit : total_real};
}

GS_EXPORT CUresult CUDAAPI cuMemGetInfo_v2(size_t *free, size_t *total) {
    GS_NEED(real, cuMemGetInfo_v2);
    struct gs_here here;
    CUresult result = real(free, total);
    if (result != CUDA_SUCCESS || !free || !total || !gs_slot() || !gs_here(&here))
        return result;
    struct answer answer = own_memory(here.dev, *free, *total);
    *free = answer.free;
    *total = answer.total;
    return result;
}

static unsigned int clamp(uint64_t bytes) {
    return bytes > UINT32_MAX ? UINT32_MAX : (unsigned int)bytes;
}

/* The 32-bit form: computed from the 64-bit one, since clamped numbers are useless. */
GS_EXPORT CUresult CUDAAPI cuMemGetInfo(unsigned int *free, unsigned int *total) {
    GS_NEED(real, cuMemGetInfo);
    struct gs_here here;
    size_t free_real, total_real;
    __typeof__(&cuMemGetInfo_v2) wide = GS_REAL(cuMemGetInfo_v2);
    CUresult result = real(free, total);
    if (result != CUDA_SUCCESS || !free || !total || !gs_slot() || !gs_here(&here))
        return result;
    if (!wide || wide(&free_real, &total_real) != CUDA_SUCCESS) {
        free_real = *free;
        total_real = *total;
    }
    struct answer answer = own_memory(here.dev, free_real, total_real);
    *free = clamp(answer.free);
    *total = clamp(answer.total);
    return result;
}

static uint64_t own_total(CUdevice device, uint64_t real) {
    struct gs_whole whole = gs_whole(gs_dev_of(device));
    return whole.oversubscribed || whole.limit < real ? whole.limit : real;
}

GS_EXPORT CUresult CUDAAPI cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev) {
    GS_NEED(real, cuDeviceTotalMem_v2);
    CUresult result = real(bytes, dev);
    if (result == CUDA_SUCCESS && bytes && gs_slot())
        *bytes = own_total(dev, *bytes);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuDeviceTotalMem(unsigned int *bytes, CUdevice dev) {
    GS_NEED(real, cuDeviceTotalMem);
    CUresult result = real(bytes, dev);
    if (result == CUDA_SUCCESS && bytes && gs_slot())
        *bytes = clamp(own_total(dev, *bytes));
    return result;
}
