/* Properties with one value each, as monitoring tools query them, of an idle card. */
#include "simnvml.h"

#include <string.h>

#define VALUE(name, type, value) \
    EXPORT nvmlReturn_t name(nvmlDevice_t device, type *out) { \
        ENTER_DEVICE(device, out); \
        *out = (value); \
        return NVML_SUCCESS; \
    }
#define CONFIG (device->sim.state->config)

VALUE(nvmlDeviceGetPowerUsage, unsigned int, 31000)
VALUE(nvmlDeviceGetPowerManagementLimit, unsigned int, 70000)
VALUE(nvmlDeviceGetPowerManagementDefaultLimit, unsigned int, 70000)
VALUE(nvmlDeviceGetEnforcedPowerLimit, unsigned int, 70000)
VALUE(nvmlDeviceGetPowerManagementMode, nvmlEnableState_t, NVML_FEATURE_ENABLED)
VALUE(nvmlDeviceGetPersistenceMode, nvmlEnableState_t, NVML_FEATURE_ENABLED)
VALUE(nvmlDeviceGetDisplayMode, nvmlEnableState_t, NVML_FEATURE_DISABLED)
VALUE(nvmlDeviceGetDisplayActive, nvmlEnableState_t, NVML_FEATURE_DISABLED)
VALUE(nvmlDeviceGetPerformanceState, nvmlPstates_t, NVML_PSTATE_0)
VALUE(nvmlDeviceGetPowerState, nvmlPstates_t, NVML_PSTATE_0)
VALUE(nvmlDeviceGetComputeMode, nvmlComputeMode_t, (nvmlComputeMode_t)CONFIG.compute_mode)
VALUE(nvmlDeviceGetBrand, nvmlBrandType_t, NVML_BRAND_NVIDIA)
VALUE(nvmlDeviceGetBusType, nvmlBusType_t, NVML_BUS_TYPE_PCIE)
VALUE(nvmlDeviceGetArchitecture, nvmlDeviceArchitecture_t, NVML_DEVICE_ARCH_AMPERE)
VALUE(nvmlDeviceGetMaxPcieLinkGeneration, unsigned int, 4)
VALUE(nvmlDeviceGetGpuMaxPcieLinkGeneration, unsigned int, 4)
VALUE(nvmlDeviceGetMaxPcieLinkWidth, unsigned int, 16)
VALUE(nvmlDeviceGetCurrPcieLinkGeneration, unsigned int, 4)
VALUE(nvmlDeviceGetCurrPcieLinkWidth, unsigned int, 16)
VALUE(nvmlDeviceGetNumGpuCores, unsigned int, CONFIG.sm_count *CONFIG.cores_per_sm)
VALUE(nvmlDeviceGetMemoryBusWidth, unsigned int, CONFIG.bus_width_bits)
VALUE(nvmlDeviceGetMultiGpuBoard, unsigned int, 0)
VALUE(nvmlDeviceGetBoardId, unsigned int, CONFIG.pci_bus << 8)
VALUE(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, 1)
VALUE(nvmlDeviceGetSupportedClocksEventReasons, unsigned long long, 0x1ff)
VALUE(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, 1)
VALUE(nvmlDeviceGetSupportedClocksThrottleReasons, unsigned long long, 0x1ff)
VALUE(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, sim_now_ns() / 1000000 * 31)

EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device,
                                                                 unsigned int *low,
                                                                 unsigned int *high) {
    ENTER_DEVICE(device, low && high);
    *low = 40000;
    *high = 70000;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major,
                                                       int *minor) {
    ENTER_DEVICE(device, major && minor);
    *major = (int)CONFIG.cc_major;
    *minor = (int)CONFIG.cc_minor;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor,
                                             unsigned int *celsius) {
    ENTER_DEVICE(device, celsius && sensor == NVML_TEMPERATURE_GPU);
    *celsius = 41;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device,
                                                      nvmlTemperatureThresholds_t threshold,
                                                      unsigned int *celsius) {
    ENTER_DEVICE(device, celsius && threshold < NVML_TEMPERATURE_THRESHOLD_COUNT);
    *celsius = threshold == NVML_TEMPERATURE_THRESHOLD_SHUTDOWN ? 98 : 95;
    return NVML_SUCCESS;
}

static unsigned clock_mhz(const struct sim_config *c, nvmlClockType_t type) {
    return (type == NVML_CLOCK_MEM ? c->memory_clock_khz : c->clock_khz) / 1000;
}

#define CLOCK(name) \
    EXPORT nvmlReturn_t name(nvmlDevice_t device, nvmlClockType_t type, unsigned int *mhz) { \
        ENTER_DEVICE(device, mhz &&type < NVML_CLOCK_COUNT); \
        *mhz = clock_mhz(&CONFIG, type); \
        return NVML_SUCCESS; \
    }
CLOCK(nvmlDeviceGetClockInfo)
CLOCK(nvmlDeviceGetMaxClockInfo)
CLOCK(nvmlDeviceGetApplicationsClock)

EXPORT nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current,
                                         nvmlEnableState_t *pending) {
    ENTER_DEVICE(device, current && pending);
    *current = *pending = NVML_FEATURE_ENABLED;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t error,
                                                nvmlEccCounterType_t counter,
                                                unsigned long long *count) {
    ENTER_DEVICE(device, count && error < NVML_MEMORY_ERROR_TYPE_COUNT &&
                             counter < NVML_ECC_COUNTER_TYPE_COUNT);
    *count = 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, nvmlPcieUtilCounter_t counter,
                                                unsigned int *kib) {
    ENTER_DEVICE(device, kib && counter < NVML_PCIE_UTIL_COUNT);
    *kib = 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPcieReplayCounter(nvmlDevice_t device, unsigned int *count) {
    ENTER_DEVICE(device, count);
    *count = 0;
    return NVML_SUCCESS;
}

#define IDLE_ENGINE(name) \
    EXPORT nvmlReturn_t name(nvmlDevice_t device, unsigned int *percent, \
                             unsigned int *period_us) { \
        ENTER_DEVICE(device, percent &&period_us); \
        *percent = 0; \
        *period_us = 167000; \
        return NVML_SUCCESS; \
    }
IDLE_ENGINE(nvmlDeviceGetEncoderUtilization)
IDLE_ENGINE(nvmlDeviceGetDecoderUtilization)
IDLE_ENGINE(nvmlDeviceGetJpgUtilization)
IDLE_ENGINE(nvmlDeviceGetOfaUtilization)

EXPORT nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t device, char *version,
                                              unsigned int length) {
    ENTER_DEVICE(device, version);
    return nvml_put_text(version, length, "90.02.2E.00.0C");
}

EXPORT nvmlReturn_t nvmlDeviceGetBoardPartNumber(nvmlDevice_t device, char *number,
                                                 unsigned int length) {
    ENTER_DEVICE(device, number);
    return nvml_put_text(number, length, "900-00000-0000-000");
}
