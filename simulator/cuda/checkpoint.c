/* Checkpoints of this process: its own thread does what callers (checkpointapi.c) ask for.
 *
 * A lock closes the gate in sim_enter and waits until no thread is inside the driver and all work
 * has ended. The content of device memory is in this process's host memory anyway, so a checkpoint
 * gives the memory back to the device and takes the time of the copy. */
#include "checkpoint.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define QUIET_INTERVAL_NS 100000u

static struct control *control;
static CUprocessState state = CU_PROCESS_STATE_RUNNING;
static struct sim_held held[SIM_MAX_DEVICES];
static bool spoiled; /* a restore found no room, and the driver cannot restore again */
static void *copy;   /* with the cost saved_whole */
static uint64_t copy_bytes;

struct control *checkpoint_control(void) {
    return sim_is_ready() ? control : NULL;
}

void control_wait(uint32_t *word, uint32_t value, unsigned ms) {
    struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000l};
    syscall(SYS_futex, word, FUTEX_WAIT, value, ms ? &t : NULL, NULL, 0);
}

void control_wake(uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static void sleep_ns(uint64_t ns) {
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL);
}

static const struct sim_costs *costs(void) {
    return costs_of(0);
}

/* Call with the process lock held. */
static void set_gate(enum gate gate) {
    sim.gate = gate;
    pthread_cond_broadcast(&sim.gate_opened);
}

static bool is_quiet(void) {
    bool busy = sim.inside;
    for (struct context *ctx = sim.contexts; ctx; ctx = ctx->next) {
        engine_progress(ctx);
        busy |= ctx->pending;
    }
    return !busy;
}

static CUresult lock(unsigned timeout_ms) {
    uint64_t end_ns = timeout_ms ? sim_now_ns() + timeout_ms * 1000000ull : UINT64_MAX;
    CHECK(state == CU_PROCESS_STATE_RUNNING, CUDA_ERROR_ILLEGAL_STATE);
    CHECK(!mps_is_client(), CUDA_ERROR_NOT_SUPPORTED);
    pthread_mutex_lock(&sim.lock);
    set_gate(GATE_SHUT);
    bool quiet = is_quiet();
    while (!quiet && sim_now_ns() < end_ns) {
        pthread_mutex_unlock(&sim.lock);
        sleep_ns(QUIET_INTERVAL_NS);
        pthread_mutex_lock(&sim.lock);
        quiet = is_quiet();
    }
    if (!quiet)
        set_gate(GATE_OPEN);
    pthread_mutex_unlock(&sim.lock);
    CHECK(quiet, CUDA_ERROR_NOT_READY);
    state = CU_PROCESS_STATE_LOCKED;
    return CUDA_SUCCESS;
}

static CUresult unlock(void) {
    CHECK(state == CU_PROCESS_STATE_LOCKED, CUDA_ERROR_ILLEGAL_STATE);
    state = CU_PROCESS_STATE_RUNNING;
    pthread_mutex_lock(&sim.lock);
    set_gate(GATE_OPEN);
    pthread_mutex_unlock(&sim.lock);
    return CUDA_SUCCESS;
}

/* As documented, the driver does not try to keep a process usable after an error. */
static CUresult fail(CUresult error) {
    state = CU_PROCESS_STATE_FAILED;
    pthread_mutex_lock(&sim.lock);
    set_gate(GATE_FAILED);
    pthread_mutex_unlock(&sim.lock);
    return error;
}

/* True if the process has managed memory, or memory that another process may have, too. */
static bool has_unsupported(void) {
    for (int i = 0; i < sim.n_devices; i++) {
        const struct device *d = &sim.device[i];
        for (uint64_t b = 0; b < (d->base ? d->n_blocks : 0); b++) {
            const struct mem *m = d->head[b];
            if (m && (m->kind == MEM_MANAGED || m->kind == MEM_FOREIGN || m->shared_id))
                return true;
            b += m ? m->span / SIM_BLOCK - 1 : 0;
        }
    }
    return vmm_is_shared();
}

static bool is_client(int device) {
    return sim.device[device].sim.client != 0;
}

/* Takes as long as a copy between host and device. In the middle it fails if a test wants that
 * (simhost.fail_next). */
static CUresult move(uint64_t bytes, enum sim_fault fault) {
    uint64_t rate = costs()->host_rate;
    uint64_t ns = rate ? (uint64_t)((double)bytes * 1e9 / (double)rate) : 0;
    sleep_ns(ns / 2);
    uint32_t wanted = fault;
    if (__atomic_compare_exchange_n(&sim.device[0].sim.state->config.fault, &wanted, 0, false,
                                    __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        return CUDA_ERROR_UNKNOWN;
    sleep_ns(ns - ns / 2);
    return CUDA_SUCCESS;
}

/* With the cost saved_whole, memory that the program never wrote to takes host memory, too. */
static bool make_copy(uint64_t bytes) {
    if (!costs()->saved_whole || !bytes)
        return true;
    copy = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1,
                0);
    copy_bytes = copy == MAP_FAILED ? 0 : bytes;
    return copy_bytes;
}

static void drop_copy(void) {
    if (copy_bytes)
        munmap(copy, copy_bytes);
    copy_bytes = 0;
}

static CUresult checkpoint(void) {
    uint64_t bytes = 0;
    CHECK(state == CU_PROCESS_STATE_LOCKED, CUDA_ERROR_ILLEGAL_STATE);
    if (has_unsupported())
        return fail(CUDA_ERROR_NOT_SUPPORTED);
    for (int d = 0; d < sim.n_devices; d++)
        if (is_client(d))
            bytes += sim_held_bytes(&sim.device[d].sim);
    if (!make_copy(bytes))
        return fail(CUDA_ERROR_OUT_OF_MEMORY);
    CUresult result = move(bytes, SIM_FAULT_CHECKPOINT);
    if (result != CUDA_SUCCESS)
        return fail(result);
    for (int d = 0; d < sim.n_devices; d++)
        if (is_client(d))
            sim_set_aside(&sim.device[d].sim, &held[d]);
    state = CU_PROCESS_STATE_CHECKPOINTED;
    return CUDA_SUCCESS;
}

static CUresult restore(void) {
    uint64_t bytes = 0;
    CHECK(state == CU_PROCESS_STATE_CHECKPOINTED, CUDA_ERROR_ILLEGAL_STATE);
    CHECK(!spoiled, CUDA_ERROR_OPERATING_SYSTEM);
    for (int d = 0; d < sim.n_devices; d++) {
        if (!is_client(d))
            continue;
        if (sim_take_back(&sim.device[d].sim, &held[d]) != SIM_OK) {
            while (--d >= 0)
                if (is_client(d))
                    sim_set_aside(&sim.device[d].sim, &held[d]);
            spoiled = costs()->restore_once;
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        bytes += held[d].bytes;
    }
    CUresult result = move(bytes, SIM_FAULT_RESTORE);
    if (result != CUDA_SUCCESS)
        return fail(result);
    drop_copy();
    state = CU_PROCESS_STATE_LOCKED;
    return CUDA_SUCCESS;
}

static CUresult perform(uint32_t *answer) {
    switch (control->operation) {
    case CONTROL_STATE:
        *answer = (uint32_t)state;
        return CUDA_SUCCESS;
    case CONTROL_THREAD:
        *answer = (uint32_t)syscall(SYS_gettid);
        return CUDA_SUCCESS;
    case CONTROL_LOCK:
        return lock(control->timeout_ms);
    case CONTROL_CHECKPOINT:
        return checkpoint();
    case CONTROL_RESTORE:
        return restore();
    case CONTROL_UNLOCK:
        return unlock();
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

static void *serve(void *unused) {
    (void)unused;
    prctl(PR_SET_NAME, "sim-checkpoint");
    for (uint32_t finished = 0;;) {
        if (__atomic_load_n(&control->requested, __ATOMIC_ACQUIRE) == finished) {
            control_wait(&control->requested, finished, 0);
            continue;
        }
        control->result = perform(&control->answer);
        __atomic_store_n(&control->finished, ++finished, __ATOMIC_RELEASE);
        control_wake(&control->finished);
    }
    return NULL;
}

static struct control *map_control(void) {
    struct flock life = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
    int fd = memfd_create(SIM_CONTROL_NAME, MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, SIM_CONTROL_BYTES) || fcntl(fd, F_SETLK, &life))
        return NULL;
    void *map = mmap(NULL, SIM_CONTROL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED || madvise(map, SIM_CONTROL_BYTES, MADV_DONTFORK))
        return NULL;
    pthread_mutexattr_t a;
    pthread_mutexattr_init(&a);
    pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&((struct control *)map)->callers, &a);
    return map;
}

CUresult checkpoint_open(void) {
    pthread_t thread;
    sigset_t all, before;
    if (sim_cuda_version < SIM_CHECKPOINT_CUDA)
        return CUDA_SUCCESS;
    control = map_control();
    CHECK(control, CUDA_ERROR_OUT_OF_MEMORY);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&thread, NULL, serve, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    CHECK(!failed, CUDA_ERROR_OUT_OF_MEMORY);
    pthread_detach(thread);
    return CUDA_SUCCESS;
}

void checkpoint_before_wait(void) {
    if (state == CU_PROCESS_STATE_CHECKPOINTED && costs()->sync_crashes)
        raise(SIGSEGV);
}
