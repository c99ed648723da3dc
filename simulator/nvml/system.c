/* Initialisation and system queries. NVML reads the devices but is not a client of them. */
#include "simnvml.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The descriptors stay open even after shutdown: closing one would drop the record locks that
 * mark this process's libcuda as alive. */
static struct nvmlDevice_st devices[2 * SIM_NVML_MAX];
static unsigned n_devices, n_mig;
static int references;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pid_t opened_by;

nvmlReturn_t nvml_enter(void) {
    return __atomic_load_n(&references, __ATOMIC_ACQUIRE) > 0 ? NVML_SUCCESS
                                                              : NVML_ERROR_UNINITIALIZED;
}

unsigned nvml_count(void) {
    return n_devices;
}

unsigned nvml_count_all(void) {
    return n_devices + n_mig;
}

struct nvmlDevice_st *nvml_device(unsigned index) {
    return &devices[index];
}

bool nvml_is_device(nvmlDevice_t device) {
    return device >= devices && device < devices + nvml_count_all() &&
           ((const char *)device - (const char *)devices) % sizeof *devices == 0;
}

/* A forked child does not inherit the maps of the state, so it opens its own. */
static void open_devices(void) {
    struct sim_device found[2 * SIM_NVML_MAX];
    if (n_devices && opened_by == getpid())
        return;
    n_devices = sim_open_devices(found, SIM_NVML_MAX);
    n_mig = sim_open_mig(found + n_devices, SIM_NVML_MAX);
    for (unsigned i = 0; i < n_devices + n_mig; i++) {
        devices[i] = (struct nvmlDevice_st){.sim = found[i]};
        nvml_begin_samples(&devices[i]);
    }
    opened_by = getpid();
}

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    open_devices();
    nvmlReturn_t result = n_devices ? NVML_SUCCESS : NVML_ERROR_DRIVER_NOT_LOADED;
    if (n_devices)
        __atomic_add_fetch(&references, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT nvmlReturn_t nvmlInit_v2(void) {
    return nvmlInitWithFlags(0);
}

/* The oldest version fails when the first device cannot be opened, and undoes its
 * initialisation. */
EXPORT nvmlReturn_t nvmlInit(void) {
    nvmlReturn_t result = nvmlInit_v2();
    if (result == NVML_SUCCESS && !nvml_count()) {
        nvmlShutdown();
        return NVML_ERROR_DRIVER_NOT_LOADED;
    }
    return result;
}

EXPORT nvmlReturn_t nvmlShutdown(void) {
    pthread_mutex_lock(&lock);
    nvmlReturn_t result = references > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
    if (references > 0)
        references--;
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT const char *nvmlErrorString(nvmlReturn_t result) {
    static const char *const texts[] = {"Success",
                                        "Uninitialized",
                                        "Invalid Argument",
                                        "Not Supported",
                                        "Insufficient Permissions",
                                        "Already Initialized",
                                        "Not Found",
                                        "Insufficient Size",
                                        "Insufficient External Power",
                                        "Driver Not Loaded",
                                        "Timeout",
                                        "Interrupt Request Issue",
                                        "NVML Shared Library Not Found",
                                        "Function Not Found",
                                        "Corrupted infoROM",
                                        "GPU is lost",
                                        "GPU requires reset",
                                        "GPU access blocked by the operating system",
                                        "Driver/library version mismatch",
                                        "In use by another client",
                                        "Insufficient Memory",
                                        "No data",
                                        "vGPU ECC not supported",
                                        "Insufficient Resources",
                                        "Invalid Frequency",
                                        "Argument version mismatch",
                                        "Requested functionality has been deprecated",
                                        "System is not in ready state"};
    return (unsigned)result < sizeof texts / sizeof *texts ? texts[result] : "Unknown Error";
}

nvmlReturn_t nvml_put_text(char *buffer, unsigned length, const char *text) {
    if (!buffer)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) + 1 > length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    ENTER();
    return nvml_put_text(version, length, devices[0].sim.state->config.driver_version);
}

/* Of the first device; before initialisation, of the oldest driver that is simulated. */
static const struct sim_config *config(void) {
    static const struct sim_config none = {.cuda_version = 12020, .driver_version = "535.261.03"};
    return devices[0].sim.state ? &devices[0].sim.state->config : &none;
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length) {
    char text[64];
    const struct sim_config *c = config();
    snprintf(text, sizeof text, "%u.%.40s", c->cuda_version / 1000, c->driver_version);
    return nvml_put_text(version, length, text);
}

static nvmlReturn_t cuda_version(int *version) {
    if (!version)
        return NVML_ERROR_INVALID_ARGUMENT;
    *version = (int)config()->cuda_version;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    return cuda_version(version);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
    return cuda_version(version);
}

EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length) {
    char path[32], text[256] = "";
    ENTER();
    if (!name || !length)
        return NVML_ERROR_INVALID_ARGUMENT;
    snprintf(path, sizeof path, "/proc/%u/comm", pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return NVML_ERROR_NOT_FOUND;
    if (fgets(text, sizeof text, file))
        text[strcspn(text, "\n")] = '\0';
    fclose(file);
    return nvml_put_text(name, length, text);
}

EXPORT nvmlReturn_t nvmlUnitGetCount(unsigned int *count) {
    ENTER();
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetHicVersion(unsigned int *count, nvmlHwbcEntry_t *entries) {
    ENTER();
    (void)entries;
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlGetExcludedDeviceCount(unsigned int *count) {
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}
