/* Events: Xid errors, which a test writes into the device's file (simhost.raise_xid). */
#include <stdlib.h>
#include <time.h>

#include "simnvml.h"

#define LOOK_NS 5000000

struct nvmlEventSet_st {
    bool registered[2 * SIM_NVML_MAX];
    uint32_t seen[2 * SIM_NVML_MAX]; /* config.xid when it was registered or last reported */
};

EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    ENTER();
    if (!set)
        return NVML_ERROR_INVALID_ARGUMENT;
    *set = calloc(1, sizeof **set);
    return *set ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

EXPORT nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
    ENTER();
    if (!set)
        return NVML_ERROR_INVALID_ARGUMENT;
    free(set);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device,
                                                     unsigned long long *types) {
    ENTER_DEVICE(device, types);
    *types = nvmlEventTypeXidCriticalError;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types,
                                             nvmlEventSet_t set) {
    ENTER_DEVICE(device, set);
    if (types & ~(unsigned long long)nvmlEventTypeXidCriticalError)
        return NVML_ERROR_NOT_SUPPORTED;
    for (unsigned i = 0; i < nvml_count(); i++)
        if (nvml_device(i) == device) {
            set->registered[i] = types != 0;
            set->seen[i] = __atomic_load_n(&device->sim.state->config.xid, __ATOMIC_ACQUIRE);
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_SUPPORTED; /* a MIG device: events are those of its GPU */
}

static bool take(nvmlEventSet_t set, nvmlEventData_t *data) {
    for (unsigned i = 0; i < nvml_count(); i++) {
        uint32_t xid = __atomic_load_n(&nvml_device(i)->sim.state->config.xid, __ATOMIC_ACQUIRE);
        if (!set->registered[i] || xid == set->seen[i])
            continue;
        set->seen[i] = xid;
        *data = (nvmlEventData_t){.device = nvml_device(i),
                                  .eventType = nvmlEventTypeXidCriticalError,
                                  .eventData = xid & 0xffff,
                                  .gpuInstanceId = ~0u,
                                  .computeInstanceId = ~0u};
        return true;
    }
    return false;
}

EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data,
                                        unsigned int timeout_ms) {
    ENTER();
    if (!set || !data)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (uint64_t end_ns = sim_now_ns() + timeout_ms * 1000000ull;;) {
        if (take(set, data))
            return NVML_SUCCESS;
        if (sim_now_ns() >= end_ns)
            return NVML_ERROR_TIMEOUT;
        nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, NULL);
    }
}
