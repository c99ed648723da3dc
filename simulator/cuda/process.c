/* Initialisation, fork, and the current context. */
#include "sim.h"

#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct process sim = {.lock = PTHREAD_MUTEX_INITIALIZER, .gate_opened = PTHREAD_COND_INITIALIZER};

/* A word that a forked child reads as zero (MADV_WIPEONFORK), since the driver does not work
 * there. */
static uint32_t *alive;
static bool was_initialised;

bool sim_is_ready(void) {
    return alive && *alive == 1;
}

CUresult sim_enter(void) {
    if (!sim_is_ready())
        return CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&sim.lock);
    while (sim.gate == GATE_SHUT)
        pthread_cond_wait(&sim.gate_opened, &sim.lock);
    if (sim.gate == GATE_FAILED) {
        pthread_mutex_unlock(&sim.lock);
        return CUDA_ERROR_UNKNOWN;
    }
    sim.inside++;
    return CUDA_SUCCESS;
}

void sim_leave(int *entered) {
    if (!*entered)
        return;
    sim.inside--;
    pthread_mutex_unlock(&sim.lock);
}

/* True if CUDA_VISIBLE_DEVICES names the device by its uuid, or names none by uuid. Numbers are
 * not simulated. */
static bool is_visible(const struct sim_device *device) {
    const char *names = getenv("CUDA_VISIBLE_DEVICES");
    char uuid[41];
    if (!names || (!strstr(names, "GPU-") && !strstr(names, "MIG-")))
        return true;
    sim_uuid_text(&device->state->config, uuid);
    return strstr(names, uuid) != NULL;
}

/* Opens whole GPUs, and the first MIG device, since a process can use only one. */
static unsigned open_devices(struct sim_device *found) {
    struct sim_device mig[SIM_MAX_DEVICES];
    unsigned all = sim_open_devices(found, SIM_MAX_DEVICES - 1), n = 0;
    for (unsigned i = 0; i < all; i++)
        if (!(found[i].state->config.index & SIM_DIVIDED) && is_visible(&found[i]))
            found[n++] = found[i];
    all = sim_open_mig(mig, SIM_MAX_DEVICES);
    for (unsigned i = 0, taken = 0; i < all && !taken; i++)
        if (is_visible(&mig[i]))
            taken = 1, found[n++] = mig[i];
    return n;
}

const struct sim_costs *costs_of(int device) {
    return &sim.device[device].sim.state->config.costs;
}

/* Takes the memory that cuInit takes of each device, before any context. */
static CUresult take_init(int device) {
    uint64_t bytes = costs_of(device)->init_bytes;
    if (!bytes)
        return CUDA_SUCCESS;
    CUresult result = join_device(device);
    if (result == CUDA_SUCCESS)
        result = charge(device, bytes);
    if (result == CUDA_SUCCESS)
        sim_unlist(&sim.device[device].sim, (int64_t)bytes);
    return result;
}

static int uvm = -1;

/* The driver opens this node in cuInit and keeps it open. A simulated host may lack it. */
static void open_uvm(void) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%.4000s/nvidia-uvm", sim_device_dir());
    uvm = open(path, O_RDWR | O_CLOEXEC);
}

static CUresult initialise(void) {
    if (was_initialised)
        return sim_is_ready() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = mps_connect(); /* before opening devices */
    if (result != CUDA_SUCCESS)
        return result;
    struct sim_device found[SIM_MAX_DEVICES];
    unsigned n = open_devices(found);
    if (n == 0)
        return CUDA_ERROR_NO_DEVICE;
    uint32_t *word = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (word == MAP_FAILED || madvise(word, 4096, MADV_WIPEONFORK))
        return CUDA_ERROR_OUT_OF_MEMORY;
    open_uvm();
    for (unsigned d = 0; d < n; d++)
        sim.device[d].sim = found[d];
    sim.n_devices = (int)n;
    sim.next_id = 1;
    for (int d = 0; d < sim.n_devices && result == CUDA_SUCCESS; d++)
        result = take_init(d);
    if (result == CUDA_SUCCESS)
        result = checkpoint_open();
    if (result != CUDA_SUCCESS)
        return result;
    *word = 1;
    alive = word;
    was_initialised = true;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuInit(unsigned flags) {
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (was_initialised && !sim_is_ready())
        return CUDA_ERROR_NOT_INITIALIZED; /* in a forked child */
    pthread_mutex_lock(&once);
    CUresult result = initialise();
    pthread_mutex_unlock(&once);
    return result;
}

/* Makes this process a client of the device, before its first context there. */
CUresult join_device(int device) {
    struct sim_device *d = &sim.device[device].sim;
    if (!d->client && sim_join(d) != SIM_OK)
        return CUDA_ERROR_OUT_OF_MEMORY;
    return space_open(device);
}

CUresult charge(int device, uint64_t bytes) {
    if (!mps_charge(bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    int result = sim_charge(&sim.device[device].sim, bytes);
    if (result == SIM_OK)
        return CUDA_SUCCESS;
    mps_uncharge(bytes);
    /* another error: the program closed the descriptor, and the client was torn down */
    return result == SIM_NO_MEMORY ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_UNKNOWN;
}

void uncharge(int device, uint64_t bytes) {
    mps_uncharge(bytes);
    sim_uncharge(&sim.device[device].sim, bytes);
}

#define BURIED 8192u

void sim_bury(void *object, bool by_program) {
    static void *buried[BURIED];
    static unsigned next;
    *(uint32_t *)object = by_program ? OBJ_DESTROYED : 0;
    free(buried[next]);
    buried[next] = object;
    next = (next + 1) % BURIED;
}

bool sim_is(const void *object, enum object_kind kind) {
    if (object && *(const uint32_t *)object == OBJ_DESTROYED) {
        static const char text[] = "simulated libcuda: a destroyed handle was used\n";
        if (write(STDERR_FILENO, text, sizeof text - 1) > 0)
            raise(SIGSEGV);
    }
    return object && *(const uint32_t *)object == (uint32_t)kind;
}
