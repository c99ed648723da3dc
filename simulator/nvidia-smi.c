/* A small nvidia-smi: it queries the same NVML functions and prints less.
 *
 *   nvidia-smi        a table        nvidia-smi -L        one line per device */
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <dlfcn.h>
#include <nvml.h>
#include <stdio.h>
#include <string.h>

#define MAX_PROCESSES 256
#define NVML(name) ((__typeof__(&name))need(#name))

static void *library;
static int missing;

static void *need(const char *name) {
    void *function = dlsym(library, name);
    if (!function) {
        fprintf(stderr, "nvidia-smi: libnvidia-ml.so.1 has no %s\n", name);
        missing = 1;
    }
    return function;
}

static void print_device(unsigned index, nvmlDevice_t device, int list) {
    char name[96] = "", uuid[96] = "";
    nvmlMemory_v2_t memory = {.version = nvmlMemory_v2};
    nvmlUtilization_t utilization = {0};
    NVML(nvmlDeviceGetName)(device, name, sizeof name);
    NVML(nvmlDeviceGetUUID)(device, uuid, sizeof uuid);
    if (list) {
        printf("GPU %u: %s (UUID: %s)\n", index, name, uuid);
        return;
    }
    NVML(nvmlDeviceGetMemoryInfo_v2)(device, &memory);
    NVML(nvmlDeviceGetUtilizationRates)(device, &utilization);
    printf("| %3u  %-28s %7lluMiB / %7lluMiB | %3u%% |\n", index, name, memory.used >> 20,
           memory.total >> 20, utilization.gpu);
}

static void print_processes(unsigned index, nvmlDevice_t device) {
    nvmlProcessInfo_t infos[MAX_PROCESSES];
    unsigned n = MAX_PROCESSES;
    if (NVML(nvmlDeviceGetComputeRunningProcesses_v3)(device, &n, infos) != NVML_SUCCESS)
        return;
    for (unsigned i = 0; i < n; i++)
        printf("| %3u  pid %-10u %10lluMiB\n", index, infos[i].pid, infos[i].usedGpuMemory >> 20);
}

static int run(int list) {
    char version[80] = "";
    unsigned count = 0;
    NVML(nvmlSystemGetDriverVersion)(version, sizeof version);
    NVML(nvmlDeviceGetCount_v2)(&count);
    if (!list)
        printf("NVIDIA-SMI (simulated)    Driver Version: %s\n", version);
    for (unsigned i = 0; i < count; i++) {
        nvmlDevice_t device;
        if (NVML(nvmlDeviceGetHandleByIndex_v2)(i, &device) == NVML_SUCCESS)
            print_device(i, device, list);
    }
    for (unsigned i = 0; i < count && !list; i++) {
        nvmlDevice_t device;
        if (NVML(nvmlDeviceGetHandleByIndex_v2)(i, &device) == NVML_SUCCESS)
            print_processes(i, device);
    }
    return missing;
}

int main(int argc, char **argv) {
    int list = argc > 1 && strcmp(argv[1], "-L") == 0;
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "nvidia-smi: %s\n", dlerror());
        return 12;
    }
    nvmlReturn_t result = NVML(nvmlInit_v2)();
    if (result != NVML_SUCCESS) {
        fprintf(stderr, "Failed to initialize NVML: %s\n", NVML(nvmlErrorString)(result));
        return (int)result;
    }
    int failed = run(list);
    NVML(nvmlShutdown)();
    return failed;
}
