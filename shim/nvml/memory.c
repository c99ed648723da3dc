/* Memory as the container has it: total is the limit, used is what its processes hold. The driver
 * is asked first, into a copy: its errors stay what they are, its numbers do not get out. */
#include "nvml_shim.h"

struct numbers {
    uint64_t total, used, free;
};

/* The same sums as cuMemGetInfo: free is never more than the device itself has, used never more
 * than total. */
static nvmlReturn_t share(nvmlDevice_t device, uint64_t total_real, uint64_t free_real,
                          struct numbers *n) {
    int dev;
    nvmlReturn_t result = gs_nvml_dev(device, &dev);
    if (result != NVML_SUCCESS)
        return result;
    struct gs_whole whole = gs_whole(dev);
    if (whole.oversubscribed) /* the part on the host is no part of what the device has */
        total_real = free_real = UINT64_MAX;
    n->total = whole.limit < total_real ? whole.limit : total_real;
    n->used = whole.used < n->total ? whole.used : n->total;
    n->free = n->total - n->used < free_real ? n->total - n->used : free_real;
    return NVML_SUCCESS;
}

GS_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    GS_NVML_ENTER(real, nvmlDeviceGetMemoryInfo, device, memory);
    nvmlMemory_t whole;
    struct numbers n;
    if (!memory) /* what the driver says to that */
        return GS_NVML_CALL(real, device, NULL);
    nvmlReturn_t result = GS_NVML_CALL(real, device, &whole);
    if (result != NVML_SUCCESS ||
        (result = share(device, whole.total, whole.free, &n)) != NVML_SUCCESS)
        return result;
    *memory = (nvmlMemory_t){.total = n.total, .free = n.free, .used = n.used};
    return NVML_SUCCESS;
}

/* `reserved` is what is neither used nor free: nothing, unless the device itself has less left than
 * the share. */
GS_EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    GS_NVML_ENTER(real, nvmlDeviceGetMemoryInfo_v2, device, memory);
    if (!memory)
        return GS_NVML_CALL(real, device, NULL);
    nvmlMemory_v2_t whole = {.version = memory->version};
    struct numbers n;
    nvmlReturn_t result = GS_NVML_CALL(real, device, &whole);
    if (result != NVML_SUCCESS ||
        (result = share(device, whole.total, whole.free, &n)) != NVML_SUCCESS)
        return result;
    memory->total = n.total;
    memory->used = n.used;
    memory->free = n.free;
    memory->reserved = n.total - n.used - n.free;
    return NVML_SUCCESS;
}
