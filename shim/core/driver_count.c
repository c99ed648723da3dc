/* The driver's own count of this process's memory on a device: NVML's list of compute processes.
 *
 * The real libnvidia-ml is used through its private path. The shim's libnvidia-ml is opened first,
 * so that a program that opens libnvidia-ml.so.1 later finds that one: the dynamic linker takes the
 * first library with this name.
 *
 * In a pid namespace of its own a process finds itself under its own pid. NVIDIA's open kernel
 * modules translate pids to the namespace of the caller (os_find_ns_pid, since driver 535.113) and
 * leave out processes that are not visible there. They can list a process twice. Older drivers
 * report the host's pids, so overhead.c requires that the process appears with its first context.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "overhead.h"

#define REAL_NVML "/usr/lib/gpushare/driver/libnvidia-ml-real.so.1"
#define OWN_NVML "/usr/lib/gpushare/driver/libnvidia-ml.so.1" /* only where no other is visible */
#define NVML_NAME "libnvidia-ml.so.1"
#define NO_VALUE UINT64_MAX
#define ROOM_MAX 65536u

/* nvml.h, which a machine that compiles the shim may lack. */
enum { NVML_SUCCESS = 0, NVML_ERROR_UNINITIALIZED = 1, NVML_ERROR_INSUFFICIENT_SIZE = 7 };
typedef struct nvmlDevice_st *nvmlDevice_t;
struct process { /* nvmlProcessInfo_v2_t */
    uint32_t pid;
    uint64_t bytes;
    uint32_t gpu_instance, compute_instance;
};
_Static_assert(sizeof(struct process) == 24, "nvmlProcessInfo_v2_t");

typedef int init_fn(void);
typedef int by_uuid_fn(const char *uuid, nvmlDevice_t *device);
typedef int list_fn(nvmlDevice_t device, unsigned *count, struct process *processes);

static _Atomic int state;
enum { UNOPENED, OPENING, OPEN, CLOSED };

/* Under lock_count, once it is open. */
static struct {
    init_fn *init;
    by_uuid_fn *by_uuid;
    list_fn *list[2]; /* compute processes, clients of MPS */
    nvmlDevice_t device[GS_MAX_DEVICES];
    struct process *process;
    unsigned room;
} nvml;

/* ---- the library ----------------------------------------------------------------------------- */

/* Open the shim's libnvidia-ml, whose dependency is the real one. Return false if that is not what
 * the name stands for here. */
static bool open_through(const char *name) {
    void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    void *real = handle ? dlopen(REAL_NVML, RTLD_NOLOAD | RTLD_NOW | RTLD_LOCAL) : NULL;
    if (real)
        return true; /* both stay open */
    if (handle)
        dlclose(handle);
    return false;
}

/* The path of a library beside the shim's libcuda, where the hook places both. */
static bool open_beside(void) {
    char path[512];
    Dl_info info;
    if (!dladdr((void *)open_beside, &info) || !info.dli_fname)
        return false;
    const char *end = strrchr(info.dli_fname, '/');
    size_t length = end ? (size_t)(end - info.dli_fname) + 1 : 0;
    if (!end || length + sizeof(NVML_NAME) > sizeof(path))
        return false;
    memcpy(path, info.dli_fname, length);
    memcpy(path + length, NVML_NAME, sizeof(NVML_NAME));
    return open_through(path);
}

/* A fork while another thread is in NVML would leave NVML's locks held in the child. */
static void before_fork(void) {
    gs_lock(&gs_self()->lock_count);
}

static void in_parent(void) {
    gs_unlock(&gs_self()->lock_count);
}

/* The lock itself is in memory that the kernel has wiped. */
static void in_child(void) {
    gs_cancel_again();
}

static bool load_library(void) {
    if (!open_beside() && !open_through(NVML_NAME) && !open_through(OWN_NVML))
        return false;
    void *real = dlopen(REAL_NVML, RTLD_NOLOAD | RTLD_NOW | RTLD_LOCAL);
    static const char *const lists[2][2] = {
        {"nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"},
        {"nvmlDeviceGetMPSComputeRunningProcesses_v3",
         "nvmlDeviceGetMPSComputeRunningProcesses_v2"}};
    for (unsigned i = 0; i < 2; i++)
        for (unsigned v = 0; v < 2 && !nvml.list[i]; v++)
            *(void **)&nvml.list[i] = dlsym(real, lists[i][v]);
    init_fn *init;
    by_uuid_fn *by_uuid;
    *(void **)&init = dlsym(real, "nvmlInit_v2");
    *(void **)&by_uuid = dlsym(real, "nvmlDeviceGetHandleByUUID");
    if (!init || !by_uuid || !nvml.list[0] || init() != NVML_SUCCESS)
        return false;
    nvml.init = init;
    nvml.by_uuid = by_uuid;
    return true;
}

/* Comparisons end before NVML's own destructors run. */
static void at_exit(void) {
    atomic_store(&state, CLOSED);
}

void gs_driver_count_open(void) {
    int none = UNOPENED, saved = errno;
    if (!atomic_compare_exchange_strong(&state, &none, OPENING))
        return;
    bool opened = load_library();
    (void)dlerror(); /* clear our failure, which the program could take for its own */
    if (opened) {
        pthread_atfork(before_fork, in_parent, in_child);
        atexit(at_exit);
    }
    atomic_store(&state, opened ? OPEN : CLOSED);
    errno = saved;
}

/* ---- the count ------------------------------------------------------------------------------- */

static bool find_device(int dev) {
    const struct gs_view *view = gs_region();
    if (!view || dev < 0 || (uint32_t)dev >= view->limits->n_devices || atomic_load(&state) != OPEN)
        return false;
    return nvml.device[dev] ||
           nvml.by_uuid(view->limits->device[dev].uuid_text, &nvml.device[dev]) == NVML_SUCCESS;
}

/* Fill nvml.process and return how many there are; -1: no answer. */
static int list(list_fn *which, int dev) {
    for (bool again = false;;) {
        unsigned n = nvml.room;
        int result = which && find_device(dev) ? which(nvml.device[dev], &n, nvml.process) : -1;
        if (result == NVML_ERROR_UNINITIALIZED && !again) {
            /* The program has shut NVML down more often than it has initialised it. */
            again = nvml.init() == NVML_SUCCESS;
            nvml.device[dev] = NULL;
            if (again)
                continue;
        }
        if (result == NVML_SUCCESS)
            return n <= nvml.room ? (int)n : -1;
        if (result != NVML_ERROR_INSUFFICIENT_SIZE || n <= nvml.room || n > ROOM_MAX)
            return -1;
        struct process *more = realloc(nvml.process, 2 * (size_t)n * sizeof(*more));
        if (!more)
            return -1;
        nvml.process = more;
        nvml.room = 2 * n;
    }
}

static enum gs_counted count(int dev, uint64_t *bytes) {
    uint32_t pid = (uint32_t)getpid();
    *bytes = 0;
    enum gs_counted found = GS_NOT_COUNTED;
    for (unsigned i = 0; i < 2 && found != GS_LISTED; i++) {
        int n = list(nvml.list[i], dev);
        if (n >= 0)
            found = GS_NOT_LISTED;
        for (int at = 0; at < n; at++) {
            const struct process *one = &nvml.process[at];
            if (one->pid != pid || one->bytes == NO_VALUE)
                continue;
            found = GS_LISTED;
            *bytes = one->bytes > *bytes ? one->bytes : *bytes;
        }
    }
    return found;
}

enum gs_counted gs_driver_count(int dev, uint64_t *bytes) {
    int saved = errno;
    gs_lock(&gs_self()->lock_count);
    enum gs_counted found = count(dev, bytes);
    gs_unlock(&gs_self()->lock_count);
    errno = saved;
    return found;
}
