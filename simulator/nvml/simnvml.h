/* Declarations shared by the parts of the simulated libnvidia-ml. */
#ifndef SIM_NVML_H
#define SIM_NVML_H

#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>

#include "device.h"

#define EXPORT __attribute__((visibility("default")))
#define SIM_NVML_MAX 16u /* GPUs, and equally many MIG devices */

struct nvmlDevice_st {
    struct sim_device sim;
    uint64_t sample_ns, sample_busy_ns; /* start of the device's utilisation sample */
    uint64_t client_sample_ns;          /* start of the processes' utilisation sample */
    struct {
        uint64_t generation, busy_ns;
        unsigned percent;
    } client[SIM_MAX_CLIENTS];
    unsigned utilization_percent;
};

nvmlReturn_t nvml_enter(void);
unsigned nvml_count(void);     /* number of GPUs */
unsigned nvml_count_all(void); /* number of GPUs and MIG devices; MIG devices come last */
struct nvmlDevice_st *nvml_device(unsigned index);
void nvml_begin_samples(nvmlDevice_t device); /* starts samples of utilisation */
bool nvml_is_device(nvmlDevice_t device);
nvmlReturn_t nvml_put_text(char *buffer, unsigned length, const char *text);

#define ENTER() \
    do { \
        nvmlReturn_t entry = nvml_enter(); \
        if (entry != NVML_SUCCESS) \
            return entry; \
    } while (0)
#define ENTER_DEVICE(device, condition) \
    ENTER(); \
    if (!nvml_is_device(device) || !(condition)) \
    return NVML_ERROR_INVALID_ARGUMENT
#endif
