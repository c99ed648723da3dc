/* Memory, processes, utilisation. */
#include "simnvml.h"

#include <string.h>
#include <time.h>

#define NO_INSTANCE 0xffffffffu
#define MAX_LISTED (2 * SIM_MAX_CLIENTS)
#define SAMPLE_NS 166666667u /* documented: between 1/6 and 1 second, by product */

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    ENTER_DEVICE(device, memory);
    if (memory->version != (unsigned)nvmlMemory_v2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    const struct sim_config *c = &device->sim.state->config;
    memory->total = c->total_bytes + c->reserved_bytes;
    memory->reserved = c->reserved_bytes;
    memory->used = sim_used_bytes(&device->sim);
    memory->free = c->total_bytes - memory->used;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    ENTER_DEVICE(device, memory);
    nvmlMemory_v2_t v2 = {.version = nvmlMemory_v2};
    nvmlReturn_t result = nvmlDeviceGetMemoryInfo_v2(device, &v2);
    if (result != NVML_SUCCESS)
        return result;
    *memory = (nvmlMemory_t){.total = v2.total, .free = v2.free, .used = v2.used + v2.reserved};
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *bar1) {
    ENTER_DEVICE(device, bar1);
    *bar1 = (nvmlBAR1Memory_t){
        .bar1Total = 256ull << 20, .bar1Free = 254ull << 20, .bar1Used = 2ull << 20};
    return NVML_SUCCESS;
}

static uint64_t processor_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Uses the processor for as long as a query takes the real driver. */
static void spend(uint64_t ns) {
    uint64_t end_ns = processor_ns() + ns;
    while (ns && processor_ns() < end_ns) {
    }
}

/* Lists clients with a context: fills up to *count entries, then sets *count to the total.
 *
 * As in NVIDIA's open kernel modules (gpuGetProcWithObject), a process has the pid of the caller's
 * pid namespace, and is not listed if it has none there. The driver keeps a process from being
 * listed again by comparing its host pid with the pids listed so far, which fails in a container.
 * Drivers before 535.113 list host pids. */
static nvmlReturn_t processes(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *infos) {
    struct sim_device *d = &device->sim;
    const struct sim_costs *costs = &d->state->config.costs;
    unsigned times = costs->duplicates && !costs->host_pids && !sim_on_host(d) ? 2 : 1;
    unsigned n = 0, room = infos ? *count : 0;
    spend(costs->query_ns);
    sim_lock(d);
    sim_reap(d);
    for (unsigned i = 0; i < d->state->clients_high; i++) {
        const struct sim_client *c = &d->state->client[i];
        if (c->state != SIM_CLIENT_LIVE || !c->contexts)
            continue;
        uint32_t pid = costs->host_pids ? sim_host_pid(d, i) : sim_client_pid(d, i);
        uint64_t bytes =
            sim_listed_bytes(c) + (costs->imports_listed ? sim_imported_bytes(d, i) : 0);
        for (unsigned k = 0; pid && k < times; k++, n++)
            if (n < room)
                infos[n] = (nvmlProcessInfo_t){.pid = pid,
                                               .usedGpuMemory = bytes,
                                               .gpuInstanceId = NO_INSTANCE,
                                               .computeInstanceId = NO_INSTANCE};
    }
    sim_unlock(d);
    *count = n;
    return n > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device,
                                                            unsigned int *count,
                                                            nvmlProcessInfo_t *infos) {
    ENTER_DEVICE(device, count && (infos || !*count));
    return processes(device, count, infos);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device,
                                                            unsigned int *count,
                                                            nvmlProcessInfo_v2_t *infos) {
    ENTER_DEVICE(device, count && (infos || !*count));
    return processes(device, count, infos);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned int *count,
                                                         nvmlProcessInfo_v1_t *infos) {
    nvmlProcessInfo_t full[MAX_LISTED];
    ENTER_DEVICE(device, count && (infos || !*count));
    unsigned room = *count < MAX_LISTED ? *count : MAX_LISTED;
    *count = room;
    nvmlReturn_t result = processes(device, count, full);
    for (unsigned i = 0; i < room && i < *count; i++)
        infos[i] =
            (nvmlProcessInfo_v1_t){.pid = full[i].pid, .usedGpuMemory = full[i].usedGpuMemory};
    return result;
}

/* The simulator has no graphics processes and reports no MPS clients. */
#define NO_PROCESSES(name, type) \
    EXPORT nvmlReturn_t name(nvmlDevice_t device, unsigned int *count, type *infos) { \
        ENTER_DEVICE(device, count && (infos || !*count)); \
        *count = 0; \
        return NVML_SUCCESS; \
    }
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t)
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_v2_t)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t)

EXPORT nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device,
                                                          nvmlProcessDetailList_t *list) {
    nvmlProcessInfo_t full[MAX_LISTED];
    ENTER_DEVICE(device, list);
    if (list->version != nvmlProcessDetailList_v1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    unsigned room = list->numProcArrayEntries, n = MAX_LISTED;
    if (room && !list->procArray)
        return NVML_ERROR_INVALID_ARGUMENT;
    processes(device, &n, full);
    list->numProcArrayEntries = n;
    for (unsigned i = 0; i < n && i < room; i++)
        list->procArray[i] = (nvmlProcessDetail_v1_t){.pid = full[i].pid,
                                                      .usedGpuMemory = full[i].usedGpuMemory,
                                                      .gpuInstanceId = NO_INSTANCE,
                                                      .computeInstanceId = NO_INSTANCE};
    return n > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

static void remember_clients(nvmlDevice_t device, uint64_t now_ns) {
    const struct sim_state *s = device->sim.state;
    for (unsigned i = 0; i < s->clients_high; i++) {
        device->client[i].generation = s->client[i].generation;
        device->client[i].busy_ns = s->client[i].busy_ns;
    }
    device->client_sample_ns = now_ns;
}

/* Starts a sample now: earlier use does not count. */
void nvml_begin_samples(nvmlDevice_t device) {
    uint64_t now_ns = sim_now_ns();
    sim_lock(&device->sim);
    sim_advance(&device->sim, now_ns);
    device->sample_ns = now_ns;
    device->sample_busy_ns = device->sim.state->busy_ns;
    remember_clients(device, now_ns);
    sim_unlock(&device->sim);
}

/* Utilisation: the fraction of time since the last sample in which the device had work. */
static nvmlReturn_t rates(nvmlDevice_t device, nvmlUtilization_t *utilization) {
    ENTER_DEVICE(device, utilization);
    struct sim_device *d = &device->sim;
    uint64_t now_ns = sim_now_ns();
    sim_lock(d);
    sim_advance(d, now_ns);
    uint64_t elapsed_ns = now_ns - device->sample_ns;
    if (elapsed_ns >= SAMPLE_NS) {
        uint64_t busy_ns = d->state->busy_ns - device->sample_busy_ns;
        device->utilization_percent =
            (unsigned)(busy_ns >= elapsed_ns ? 100 : busy_ns * 100 / elapsed_ns);
        device->sample_ns = now_ns;
        device->sample_busy_ns = d->state->busy_ns;
    }
    sim_unlock(d);
    *utilization = (nvmlUtilization_t){.gpu = device->utilization_percent,
                                       .memory = device->utilization_percent / 2};
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device,
                                                  nvmlUtilization_t *utilization) {
    return rates(device, utilization);
}

/* Records what each process used since the last sample. Call locked. */
static void sample_clients(nvmlDevice_t device, uint64_t now_ns) {
    const struct sim_state *s = device->sim.state;
    uint64_t elapsed_ns = now_ns - device->client_sample_ns;
    if (elapsed_ns < SAMPLE_NS)
        return;
    for (unsigned i = 0; i < s->clients_high; i++) {
        const struct sim_client *c = &s->client[i];
        bool known = device->client[i].generation == c->generation;
        uint64_t busy_ns = c->busy_ns - (known ? device->client[i].busy_ns : 0);
        device->client[i].percent =
            (unsigned)(busy_ns >= elapsed_ns ? 100 : busy_ns * 100 / elapsed_ns);
    }
    remember_clients(device, now_ns);
}

/* Newer drivers translate a pid if the caller's pid namespace has the process, and leave the host
 * pid otherwise (kern_perf_ctrl.c). */
EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device,
                                                    nvmlProcessUtilizationSample_t *samples,
                                                    unsigned int *count,
                                                    unsigned long long last_seen) {
    ENTER_DEVICE(device, count);
    (void)last_seen;
    struct sim_device *d = &device->sim;
    unsigned n = 0, room = samples ? *count : 0;
    uint64_t now_ns = sim_now_ns();
    sim_lock(d);
    sim_advance(d, now_ns);
    sample_clients(device, now_ns);
    for (unsigned i = 0; i < d->state->clients_high; i++) {
        const struct sim_client *c = &d->state->client[i];
        if (c->state != SIM_CLIENT_LIVE || !c->contexts)
            continue;
        uint32_t pid = sim_client_pid(d, i);
        if (n < room)
            samples[n] =
                (nvmlProcessUtilizationSample_t){.pid = pid ? pid : sim_host_pid(d, i),
                                                 .timeStamp = device->client_sample_ns / 1000,
                                                 .smUtil = device->client[i].percent};
        n++;
    }
    sim_unlock(d);
    *count = n;
    return n > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}
