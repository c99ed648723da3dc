/* Utilisation by process: the driver's samples, those of this container's processes only. The
 * driver names processes by pid as far as it can see into this pid namespace; a sample of a pid
 * that is none of ours is left out. Utilisation of the whole device (nvmlDeviceGetUtilizationRates)
 * is passed: it is true of the device, and nobody can say which part of it is this container's. */
#include "nvml_shim.h"

struct own {
    unsigned n;
    uint32_t pid[GS_MAX_SLOTS];
};

static void add(uint32_t pid, uint64_t bytes, void *arg) {
    struct own *own = arg;
    (void)bytes;
    if (own->n < GS_MAX_SLOTS)
        own->pid[own->n++] = pid;
}

static bool has(const struct own *own, uint32_t pid) {
    for (unsigned i = 0; i < own->n; i++)
        if (own->pid[i] == pid)
            return true;
    return false;
}

/* Keep the samples of own processes, in place; none left is NVML_ERROR_NOT_FOUND, as NVML has it.
 */
#define GS_KEEP_OWN(device, samples, count) \
    ({ \
        int dev_; \
        unsigned kept_ = 0; \
        struct own own_ = {.n = 0}; \
        nvmlReturn_t checked_ = gs_nvml_dev(device, &dev_); \
        if (checked_ == NVML_SUCCESS) { \
            gs_processes(dev_, add, &own_); \
            for (unsigned i_ = 0; i_ < (count); i_++) \
                if (has(&own_, (samples)[i_].pid)) \
                    (samples)[kept_++] = (samples)[i_]; \
        } \
        for (unsigned i_ = kept_; i_ < (count); i_++) \
            (samples)[i_] = (__typeof__((samples)[0])){0}; \
        (count) = kept_; \
        checked_ != NVML_SUCCESS ? checked_ : kept_ ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND; \
    })

GS_EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device,
                                                       nvmlProcessUtilizationSample_t *utilization,
                                                       unsigned int *processSamplesCount,
                                                       unsigned long long lastSeenTimeStamp) {
    GS_NVML_ENTER(real, nvmlDeviceGetProcessUtilization, device, utilization, processSamplesCount,
                  lastSeenTimeStamp);
    nvmlReturn_t result =
        GS_NVML_CALL(real, device, utilization, processSamplesCount, lastSeenTimeStamp);
    if (result != NVML_SUCCESS || !utilization)
        return result;
    return GS_KEEP_OWN(device, utilization, *processSamplesCount);
}

GS_EXPORT nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(
    nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *procesesUtilInfo) {
    GS_NVML_ENTER(real, nvmlDeviceGetProcessesUtilizationInfo, device, procesesUtilInfo);
    nvmlReturn_t result = GS_NVML_CALL(real, device, procesesUtilInfo);
    if (result != NVML_SUCCESS || !procesesUtilInfo->procUtilArray)
        return result;
    return GS_KEEP_OWN(device, procesesUtilInfo->procUtilArray,
                       procesesUtilInfo->processSamplesCount);
}
