/* Process lists: the container's own processes, with the pids and bytes that the container sees.
 * The driver is called for its errors only. All processes are compute processes; the lists of
 * graphics and MPS clients are empty. */
#include "nvml_shim.h"

#define NO_INSTANCE 0xffffffffu /* what NVML reports outside MIG */

struct list {
    unsigned room, n; /* n counts further when there is no room left */
    unsigned gpu_instance, compute_instance;
    nvmlProcessInfo_v1_t *v1; /* one of the three is set */
    nvmlProcessInfo_v2_t *v2;
    nvmlProcessDetail_v1_t *detail;
};

static void add_process(uint32_t pid, uint64_t bytes, void *arg) {
    struct list *list = arg;
    unsigned i = list->n++;
    if (i >= list->room)
        return;
    if (list->v1)
        list->v1[i] = (nvmlProcessInfo_v1_t){pid, bytes};
    if (list->v2)
        list->v2[i] =
            (nvmlProcessInfo_v2_t){pid, bytes, list->gpu_instance, list->compute_instance};
    if (list->detail)
        list->detail[i] =
            (nvmlProcessDetail_v1_t){pid, bytes, list->gpu_instance, list->compute_instance, 0};
}

static void set_instances(nvmlDevice_t device, struct list *list) {
    __typeof__(&nvmlDeviceGetGpuInstanceId) gpu = GS_REAL(nvmlDeviceGetGpuInstanceId);
    __typeof__(&nvmlDeviceGetComputeInstanceId) compute = GS_REAL(nvmlDeviceGetComputeInstanceId);
    if (!gpu || GS_NVML_CALL(gpu, device, &list->gpu_instance) != NVML_SUCCESS)
        list->gpu_instance = NO_INSTANCE;
    if (!compute || GS_NVML_CALL(compute, device, &list->compute_instance) != NVML_SUCCESS)
        list->compute_instance = NO_INSTANCE;
}

/* NVML's protocol: `*count` is the room on entry and the number of processes on return. If there is
 * too little room, return NVML_ERROR_INSUFFICIENT_SIZE, also to a caller that passes no room to get
 * the number. */
static nvmlReturn_t fill_list(nvmlDevice_t device, bool compute, unsigned *count,
                              struct list *list) {
    int dev;
    nvmlReturn_t result = gs_nvml_dev(device, &dev);
    if (result != NVML_SUCCESS)
        return result;
    list->room = *count;
    if (list->room && !list->v1 && !list->v2 && !list->detail)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (compute) {
        set_instances(device, list);
        gs_processes(dev, add_process, list);
    }
    *count = list->n;
    return list->n > list->room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

/* The driver's results for a caller without room; any other result is an error of the driver. */
static bool is_expected(nvmlReturn_t result) {
    return result == NVML_SUCCESS || result == NVML_ERROR_INSUFFICIENT_SIZE;
}

#define GS_LIST(fn, compute, type, member) \
    GS_EXPORT nvmlReturn_t fn(nvmlDevice_t device, unsigned int *infoCount, type *infos) { \
        GS_NVML_ENTER(real, fn, device, infoCount, infos); \
        unsigned none = 0; \
        nvmlReturn_t result = GS_NVML_CALL(real, device, infoCount ? &none : NULL, NULL); \
        if (!is_expected(result) || !infoCount) \
            return result; \
        return fill_list(device, compute, infoCount, &(struct list){.member = infos}); \
    }

GS_LIST(nvmlDeviceGetComputeRunningProcesses, true, nvmlProcessInfo_v1_t, v1)
GS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, true, nvmlProcessInfo_v2_t, v2)
GS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, true, nvmlProcessInfo_t, v2)
GS_LIST(nvmlDeviceGetGraphicsRunningProcesses, false, nvmlProcessInfo_v1_t, v1)
GS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, false, nvmlProcessInfo_v2_t, v2)
GS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, false, nvmlProcessInfo_t, v2)
GS_LIST(nvmlDeviceGetMPSComputeRunningProcesses, false, nvmlProcessInfo_v1_t, v1)
GS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, false, nvmlProcessInfo_v2_t, v2)
GS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, false, nvmlProcessInfo_t, v2)

GS_EXPORT nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device,
                                                             nvmlProcessDetailList_t *plist) {
    GS_NVML_ENTER(real, nvmlDeviceGetRunningProcessDetailList, device, plist);
    nvmlProcessDetailList_t none = {0};
    if (plist)
        none = (nvmlProcessDetailList_t){.version = plist->version, .mode = plist->mode};
    nvmlReturn_t result = GS_NVML_CALL(real, device, plist ? &none : NULL);
    if (!is_expected(result) || !plist)
        return result;
    bool compute = plist->mode == 0; /* 0 compute, 1 graphics, 2 MPS */
    return fill_list(device, compute, &plist->numProcArrayEntries,
                     &(struct list){.detail = plist->procArray});
}
