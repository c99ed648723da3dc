/* The position of a device in the machine. */
#include <string.h>

#include "simnvml.h"

EXPORT nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned int words,
                                             unsigned long *set) {
    ENTER_DEVICE(device, words && set);
    memset(set, 0, words * sizeof *set);
    set[0] = 3;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceSetCpuAffinity(nvmlDevice_t device) {
    unsigned long set[16];
    nvmlPciInfo_t pci;
    nvmlReturn_t result = nvmlDeviceGetPciInfo_v3(device, &pci);
    return result == NVML_SUCCESS ? nvmlDeviceGetCpuAffinity(device, 16, set) : result;
}

EXPORT nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t device, nvmlDevice_t other,
                                                        nvmlGpuTopologyLevel_t *level) {
    unsigned multi = 0;
    nvmlPciInfo_t a, b;
    ENTER_DEVICE(device, nvml_is_device(other) && level);
    nvmlReturn_t result = nvmlDeviceGetMultiGpuBoard(device, &multi);
    if (result == NVML_SUCCESS)
        result = nvmlDeviceGetPciInfo_v3(device, &a);
    if (result == NVML_SUCCESS)
        result = nvmlDeviceGetPciInfo_v3(other, &b);
    if (result == NVML_SUCCESS)
        *level = multi            ? NVML_TOPOLOGY_INTERNAL
                 : a.bus == b.bus ? NVML_TOPOLOGY_SINGLE
                                  : NVML_TOPOLOGY_NODE;
    return result;
}

EXPORT nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device,
                                                     nvmlGpuTopologyLevel_t level,
                                                     unsigned int *count, nvmlDevice_t *devices) {
    unsigned all = 0, found = 0;
    ENTER_DEVICE(device, count && (devices || !*count));
    nvmlReturn_t result = nvmlDeviceGetCount(&all);
    for (unsigned i = 0; result == NVML_SUCCESS && i < all; i++) {
        nvmlDevice_t other;
        nvmlGpuTopologyLevel_t common;
        result = nvmlDeviceGetHandleByIndex(i, &other);
        if (result != NVML_SUCCESS || other == device)
            continue;
        result = nvmlDeviceGetTopologyCommonAncestor(device, other, &common);
        if (result != NVML_SUCCESS || common != level)
            continue;
        if (found < *count)
            devices[found] = other;
        found++;
    }
    if (result == NVML_SUCCESS)
        *count = found;
    return result;
}

EXPORT nvmlReturn_t nvmlSystemGetTopologyGpuSet(unsigned int cpu, unsigned int *count,
                                                nvmlDevice_t *devices) {
    unsigned found = 0;
    ENTER();
    if (!count || (*count && !devices))
        return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned i = 0; cpu < 2 && i < nvml_count(); i++) {
        nvmlDevice_t device;
        nvmlReturn_t result =
            nvmlDeviceGetHandleByPciBusId(nvml_device(i)->sim.state->config.bus_id, &device);
        if (result != NVML_SUCCESS)
            return result;
        if (found < *count)
            devices[found] = device;
        found++;
    }
    *count = found;
    return NVML_SUCCESS;
}
