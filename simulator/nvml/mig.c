/* MIG: divided GPUs and their MIG devices. */
#include "simnvml.h"

#define MAX_MIG 7u
#define INDEX(device) ((device)->sim.state->config.index)

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current,
                                         unsigned int *pending) {
    ENTER_DEVICE(device, current && pending);
    if (!(INDEX(device) & SIM_DIVIDED))
        return NVML_ERROR_NOT_SUPPORTED;
    *current = *pending = NVML_DEVICE_MIG_ENABLE;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count) {
    ENTER_DEVICE(device, count);
    *count = INDEX(device) & SIM_DIVIDED ? MAX_MIG : 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig) {
    ENTER_DEVICE(device, is_mig);
    *is_mig = SIM_MIG(INDEX(device)) != 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index,
                                                        nvmlDevice_t *mig) {
    ENTER_DEVICE(device, mig && index < MAX_MIG);
    for (unsigned i = nvml_count(); i < nvml_count_all(); i++) {
        uint32_t one = INDEX(nvml_device(i));
        if (SIM_GPU(one) == SIM_GPU(INDEX(device)) && SIM_MIG(one) == index + 1)
            return *mig = nvml_device(i), NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig,
                                                                 nvmlDevice_t *device) {
    ENTER_DEVICE(mig, device && SIM_MIG(INDEX(mig)));
    for (unsigned i = 0; i < nvml_count(); i++)
        if (SIM_GPU(INDEX(nvml_device(i))) == SIM_GPU(INDEX(mig)))
            return *device = nvml_device(i), NVML_SUCCESS;
    return NVML_ERROR_NOT_FOUND;
}

/* The real driver reports the attributes of MIG devices only. */
static nvmlReturn_t attributes_of(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes) {
    ENTER_DEVICE(device, attributes);
    const struct sim_config *c = &device->sim.state->config;
    if (!SIM_MIG(c->index))
        return NVML_ERROR_NOT_SUPPORTED;
    *attributes =
        (nvmlDeviceAttributes_t){.multiprocessorCount = c->sm_count,
                                 .gpuInstanceSliceCount = 1,
                                 .computeInstanceSliceCount = 1,
                                 .memorySizeMB = (c->total_bytes + c->reserved_bytes) >> 20};
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetAttributes(nvmlDevice_t device,
                                            nvmlDeviceAttributes_t *attributes) {
    return attributes_of(device, attributes);
}

EXPORT nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device,
                                               nvmlDeviceAttributes_t *attributes) {
    return attributes_of(device, attributes);
}

#define INSTANCE(name, number) \
    EXPORT nvmlReturn_t name(nvmlDevice_t mig, unsigned int *id) { \
        ENTER_DEVICE(mig, id &&SIM_MIG(INDEX(mig))); \
        *id = number(INDEX(mig)); \
        return NVML_SUCCESS; \
    }
INSTANCE(nvmlDeviceGetGpuInstanceId, SIM_GI)
INSTANCE(nvmlDeviceGetComputeInstanceId, SIM_CI)
