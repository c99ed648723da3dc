/* NVML's private table. The real library calls many of its own exports through its PLT or
 * through tables of pointers, where they can be interposed; this makes the simulated library
 * behave alike. A test gets the table for SIM_TABLE_ID from nvmlInternalGetExportTable and tries
 * each call. */
#include <string.h>

#include "simnvml.h"

#define SIM_TABLE_ID "gpushare sim tbl"

nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *id);

/* Calls the public function that returns one scalar of a device. */
#define CALL(name, ...) \
    static nvmlReturn_t call_##name(nvmlDevice_t device, void *out) { \
        (void)device; \
        (void)out; \
        return name(__VA_ARGS__); \
    }
CALL(nvmlDeviceGetMemoryInfo_v2, device, out)
CALL(nvmlDeviceGetArchitecture, device, out)
CALL(nvmlDeviceGetBusType, device, out)
CALL(nvmlDeviceGetComputeInstanceId, device, out)
CALL(nvmlDeviceGetGpuInstanceId, device, out)
CALL(nvmlDeviceGetMaxMigDeviceCount, device, out)
CALL(nvmlDeviceGetPciInfo, device, out)
CALL(nvmlDeviceGetPciInfo_v2, device, out)
CALL(nvmlDeviceGetMaxClockInfo, device, NVML_CLOCK_SM, out)
CALL(nvmlDeviceGetGpuInstanceProfileInfo, device, 0, out)
CALL(nvmlDeviceGetGpuInstances, device, 0, NULL, out)
CALL(nvmlDeviceGetMigDeviceHandleByIndex, device, 0, out)
CALL(nvmlComputeInstanceGetInfo_v2, NULL, out)
CALL(nvmlGpuInstanceGetComputeInstanceProfileInfo, NULL, 0, 0, out)
CALL(nvmlGpuInstanceGetComputeInstances, NULL, 0, NULL, out)
CALL(nvmlGpuInstanceGetInfo, NULL, out)
CALL(nvmlSystemGetConfComputeState, out)

static nvmlReturn_t call_nvmlErrorString(nvmlDevice_t device, void *out) {
    (void)device;
    *(const char **)out = nvmlErrorString(NVML_SUCCESS);
    return NVML_SUCCESS;
}

struct entry {
    const char *name;
    nvmlReturn_t (*call)(nvmlDevice_t device, void *out); /* calls it through the PLT */
    void *function;                                       /* or the address that the loader bound */
};

#define VIA_PLT(name) \
    { #name, call_##name, NULL }
#define VIA_POINTER(name) \
    { #name, NULL, (void *)name }

static const struct entry entries[] = {
    VIA_PLT(nvmlDeviceGetMemoryInfo_v2),
    VIA_PLT(nvmlDeviceGetArchitecture),
    VIA_PLT(nvmlDeviceGetBusType),
    VIA_PLT(nvmlDeviceGetComputeInstanceId),
    VIA_PLT(nvmlDeviceGetGpuInstanceId),
    VIA_PLT(nvmlDeviceGetMaxMigDeviceCount),
    VIA_PLT(nvmlDeviceGetPciInfo),
    VIA_PLT(nvmlDeviceGetPciInfo_v2),
    VIA_PLT(nvmlDeviceGetMaxClockInfo),
    VIA_PLT(nvmlDeviceGetGpuInstanceProfileInfo),
    VIA_PLT(nvmlDeviceGetGpuInstances),
    VIA_PLT(nvmlDeviceGetMigDeviceHandleByIndex),
    VIA_PLT(nvmlComputeInstanceGetInfo_v2),
    VIA_PLT(nvmlGpuInstanceGetComputeInstanceProfileInfo),
    VIA_PLT(nvmlGpuInstanceGetComputeInstances),
    VIA_PLT(nvmlGpuInstanceGetInfo),
    VIA_PLT(nvmlSystemGetConfComputeState),
    VIA_PLT(nvmlErrorString),
    VIA_POINTER(nvmlDeviceGetGpuOperationMode),
    VIA_POINTER(nvmlDeviceSetGpuOperationMode),
    VIA_POINTER(nvmlDeviceGetDisplayActive),
    VIA_POINTER(nvmlDeviceGetPowerManagementLimitConstraints),
    VIA_POINTER(nvmlDeviceGetPowerManagementDefaultLimit),
    VIA_POINTER(nvmlDeviceSetPowerManagementLimit),
    VIA_POINTER(nvmlDeviceGetCurrentClocksThrottleReasons),
    VIA_POINTER(nvmlDeviceGetSupportedClocksThrottleReasons),
    VIA_POINTER(nvmlDeviceGetEnforcedPowerLimit),
    VIA_POINTER(nvmlDeviceGetBoardPartNumber),
    {NULL, NULL, NULL},
};

EXPORT nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *id) {
    if (!table || !id)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (memcmp(id, SIM_TABLE_ID, 16) != 0)
        return NVML_ERROR_NOT_FOUND;
    *table = entries;
    return NVML_SUCCESS;
}
