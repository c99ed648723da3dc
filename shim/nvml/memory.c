/* Memory as the container sees it: total is the limit, used is what its processes have allocated.
 * The driver is called first, with a copy: its errors are passed on, its numbers are not. */
#include "nvml_shim.h"

struct numbers {
    uint64_t total, used, free;
};

/* Compute the same numbers as cuMemGetInfo; used is never more than total. */
static nvmlReturn_t own_numbers(nvmlDevice_t device, uint64_t total_real, uint64_t free_real,
                                struct numbers *n) {
    int dev;
    nvmlReturn_t result = gs_nvml_dev(device, &dev);
    if (result != NVML_SUCCESS)
        return result;
    struct gs_whole whole = gs_whole(dev);
    /* The device's numbers do not include the host part. */
    n->total = whole.oversubscribed || whole.limit < total_real ? whole.limit : total_real;
    n->used = whole.used < n->total ? whole.used : n->total;
    uint64_t free = gs_free_now(dev, &whole, free_real), left = n->total - n->used;
    n->free = free < left ? free : left;
    return NVML_SUCCESS;
}

GS_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    GS_NVML_ENTER(real, nvmlDeviceGetMemoryInfo, device, memory);
    nvmlMemory_t whole;
    struct numbers n;
    if (!memory) /* return the driver's error */
        return GS_NVML_CALL(real, device, NULL);
    nvmlReturn_t result = GS_NVML_CALL(real, device, &whole);
    if (result != NVML_SUCCESS ||
        (result = own_numbers(device, whole.total, whole.free, &n)) != NVML_SUCCESS)
        return result;
    *memory = (nvmlMemory_t){.total = n.total, .free = n.free, .used = n.used};
    return NVML_SUCCESS;
}

/* `reserved` is what is neither used nor free: 0, unless the device has less free memory than the
 * share. */
GS_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    GS_NVML_ENTER(real, nvmlDeviceGetMemoryInfo_v2, device, memory);
    if (!memory)
        return GS_NVML_CALL(real, device, NULL);
    nvmlMemory_v2_t whole = {.version = memory->version};
    struct numbers n;
    nvmlReturn_t result = GS_NVML_CALL(real, device, &whole);
    if (result != NVML_SUCCESS ||
        (result = own_numbers(device, whole.total, whole.free, &n)) != NVML_SUCCESS)
        return result;
    memory->total = n.total;
    memory->used = n.used;
    memory->free = n.free;
    memory->reserved = n.total - n.used - n.free;
    return NVML_SUCCESS;
}
