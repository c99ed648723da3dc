/* Utilisation. For a device: the container's own part of its time in the last second, which its
 * compute limit refers to; the time of other containers is not included. For processes: the
 * driver's samples of this container's processes only. The driver reports pids as far as it can see
 * into this pid namespace; samples of other pids are left out. */
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "nvml_shim.h"

#define WINDOWS UINT64_C(8) /* one second in total */

/* Processes account for their time only on devices with activity files. */
static bool is_accounted(int dev) {
    static _Atomic uint32_t known, asked;
    uint32_t bit = UINT32_C(1) << dev;
    if (!(atomic_load(&asked) & bit)) {
        const struct gs_device_limit *limit = &gs_region()->limits->device[dev];
        char path[160];
        snprintf(path, sizeof(path), "/usr/lib/gpushare/pages/%.*s",
                 (int)sizeof(limit->uuid_text) - 1, limit->uuid_text);
        if (access(path, F_OK) == 0)
            atomic_fetch_or(&known, bit);
        atomic_fetch_or(&asked, bit);
    }
    return atomic_load(&known) & bit;
}

/* Percent of the device's time in the last complete windows, for all processes together. */
static unsigned own_percent(int dev) {
    const struct gs_bucket *bucket = &gs_region()->usage->bucket[dev];
    uint64_t now = gs_now_ns(), charged = 0;
    uint64_t last = now / GS_RECENT_NS;
    for (uint64_t w = last > WINDOWS ? last - WINDOWS : 0; w < last; w++) {
        uint64_t cell = atomic_load(&bucket->recent[w % GS_RECENT]);
        if (cell >> 40 == (w & (UINT64_MAX >> 40)))
            charged += cell & GS_RECENT_MASK;
    }
    uint64_t percent = (charged * 100 + WINDOWS * GS_RECENT_NS / 2) / (WINDOWS * GS_RECENT_NS);
    return percent < 100 ? (unsigned)percent : 100;
}

GS_EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device,
                                                     nvmlUtilization_t *utilization) {
    GS_NVML_ENTER(real, nvmlDeviceGetUtilizationRates, device, utilization);
    nvmlReturn_t result = GS_NVML_CALL(real, device, utilization);
    int dev;
    if (result != NVML_SUCCESS || !utilization ||
        (result = gs_nvml_dev(device, &dev)) != NVML_SUCCESS || !is_accounted(dev))
        return result;
    utilization->gpu = own_percent(dev);
    if (utilization->memory > utilization->gpu) /* memory time is never more than busy time */
        utilization->memory = utilization->gpu;
    return NVML_SUCCESS;
}

struct own {
    unsigned n;
    uint32_t pid[GS_MAX_SLOTS];
};

static void add_pid(uint32_t pid, uint64_t bytes, void *arg) {
    struct own *own = arg;
    (void)bytes;
    if (own->n < GS_MAX_SLOTS)
        own->pid[own->n++] = pid;
}

static bool has_pid(const struct own *own, uint32_t pid) {
    for (unsigned i = 0; i < own->n; i++)
        if (own->pid[i] == pid)
            return true;
    return false;
}

/* Keep the samples of own processes, in place; if none is left, return NVML_ERROR_NOT_FOUND, as
 * NVML does. */
#define GS_KEEP_OWN(device, samples, count) \
    ({ \
        int dev_; \
        unsigned kept_ = 0; \
        struct own own_ = {.n = 0}; \
        nvmlReturn_t checked_ = gs_nvml_dev(device, &dev_); \
        if (checked_ == NVML_SUCCESS) { \
            gs_processes(dev_, add_pid, &own_); \
            for (unsigned i_ = 0; i_ < (count); i_++) \
                if (has_pid(&own_, (samples)[i_].pid)) \
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
