/* A driver's libnvidia-ml for tests without hardware: two devices of 16 GiB, 10 GiB in use by
 * other containers, two foreign processes. Like NVIDIA's library, its functions call each other
 * by name through its PLT, and so reach whichever library defines the name first. */
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>
#include <stdio.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default"), noipa))
#define GIB (1ull << 30)
#define TOTAL (16 * GIB)
#define FREE (6 * GIB)

static int started;
static struct { int index; } device[2] = {{0}, {1}};

static int index_of(nvmlDevice_t handle) {
    return (void *)handle == &device[0] ? 0 : (void *)handle == &device[1] ? 1 : -1;
}

#define CHECK(handle, pointer) \
    if (!started) \
        return NVML_ERROR_UNINITIALIZED; \
    if (index_of(handle) < 0 || !(pointer)) \
    return NVML_ERROR_INVALID_ARGUMENT

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    started = 1;
    return flags ? NVML_ERROR_INVALID_ARGUMENT : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlInit_v2(void) {
    return nvmlInitWithFlags(0);
}

EXPORT nvmlReturn_t nvmlInit(void) {
    return nvmlInit_v2();
}

/* Starts NVML on its own, as some of NVIDIA's helpers do; the shim passes it through. */
EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    nvmlReturn_t result = nvmlInit_v2();
    snprintf(version, length, "%d", result);
    return result;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *handle) {
    if (index > 1)
        return NVML_ERROR_INVALID_ARGUMENT;
    *handle = (nvmlDevice_t)&device[index];
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t handle, char *uuid, unsigned int length) {
    CHECK(handle, uuid);
    snprintf(uuid, length, "GPU-00000000-0000-0000-0000-00000000000%d", index_of(handle) + 1);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t handle, nvmlMemory_v2_t *memory) {
    CHECK(handle, memory);
    if (memory->version != nvmlMemory_v2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    memory->total = TOTAL;
    memory->reserved = GIB / 2;
    memory->free = FREE;
    memory->used = TOTAL - FREE - GIB / 2;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t handle, nvmlMemory_t *memory) {
    CHECK(handle, memory);
    nvmlMemory_v2_t own = {.version = nvmlMemory_v2};
    nvmlReturn_t result =
        nvmlDeviceGetMemoryInfo_v2(handle, &own); /* a wrapped function calls a wrapped function */
    *memory = (nvmlMemory_t){.total = own.total, .free = own.free, .used = own.total - own.free};
    return result;
}

/* A function that the shim passes through calls a wrapped one: it returns that one's total. */
EXPORT nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t handle, nvmlBAR1Memory_t *memory) {
    CHECK(handle, memory);
    nvmlMemory_v2_t own = {.version = nvmlMemory_v2};
    nvmlReturn_t result = nvmlDeviceGetMemoryInfo_v2(handle, &own);
    *memory =
        (nvmlBAR1Memory_t){.bar1Total = own.total, .bar1Free = own.free, .bar1Used = own.used};
    return result;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t handle,
                                                            unsigned int *count,
                                                            nvmlProcessInfo_t *infos) {
    CHECK(handle, count);
    unsigned room = *count;
    *count = 2;
    if (room < 2)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    infos[0] = (nvmlProcessInfo_t){.pid = 7001, .usedGpuMemory = GIB};
    infos[1] = (nvmlProcessInfo_t){.pid = 7002, .usedGpuMemory = GIB};
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t handle,
                                                            unsigned int *count,
                                                            nvmlProcessInfo_v2_t *infos) {
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, infos);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t handle, unsigned int *count,
                                                         nvmlProcessInfo_v1_t *infos) {
    CHECK(handle, count);
    (void)infos;
    *count = 2;
    return NVML_ERROR_INSUFFICIENT_SIZE;
}

EXPORT nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t handle,
                                                             unsigned int *count,
                                                             nvmlProcessInfo_t *infos) {
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, infos);
}

EXPORT nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t handle,
                                                               unsigned int *count,
                                                               nvmlProcessInfo_t *infos) {
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, infos);
}

EXPORT nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t handle,
                                                          nvmlProcessDetailList_t *list) {
    CHECK(handle, list);
    if (list->version != nvmlProcessDetailList_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    unsigned room = list->numProcArrayEntries;
    list->numProcArrayEntries = 2;
    return room < 2 ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

/* Returns samples of a foreign process and of processes 101 and 102. */
EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t handle,
                                                    nvmlProcessUtilizationSample_t *samples,
                                                    unsigned int *count, unsigned long long since) {
    static const unsigned pid[3] = {7001, 101, 102};
    CHECK(handle, count);
    (void)since;
    unsigned room = *count;
    *count = 3;
    if (!samples || room < 3)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < 3; i++)
        samples[i] =
            (nvmlProcessUtilizationSample_t){.pid = pid[i], .timeStamp = 5, .smUtil = 10 + i};
    return NVML_SUCCESS;
}
