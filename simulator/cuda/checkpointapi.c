/* The checkpoint API, as a caller uses it: it asks the thread of the process (checkpoint.c) and
 * waits, without end if the process is stopped. */
#include "checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LIFE_CHECK_MS 20u

struct target {
    int pid;
    int fd; /* -1: this process */
    struct control *control;
};

/* Reads a number after a name in /proc/PID/status; the last one of its line if there are several.
 */
static int status_of(const char *directory, const char *name) {
    char path[96], line[512];
    int number = 0;
    snprintf(path, sizeof path, "%s/status", directory);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file)) {
        if (strncmp(line, name, strlen(name)) == 0) {
            char *last = strrchr(line, '\t');
            number = last ? atoi(last + 1) : 0;
            break;
        }
    }
    if (file)
        fclose(file);
    return number;
}

/* True if the process that opened the file exists and has this pid here. */
static bool lives(int fd, int pid) {
    struct flock l = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
    return fcntl(fd, F_GETLK, &l) == 0 && l.l_type != F_UNLCK && l.l_pid == pid;
}

static int open_control(int pid) {
    static const char name[] = "/memfd:" SIM_CONTROL_NAME " (deleted)";
    char path[64], link[sizeof name + 1];
    snprintf(path, sizeof path, "/proc/%d/fd", pid);
    DIR *directory = opendir(path);
    int found = -1;
    for (struct dirent *e; directory && found < 0 && (e = readdir(directory));) {
        ssize_t n = readlinkat(dirfd(directory), e->d_name, link, sizeof link);
        if (n != (ssize_t)sizeof name - 1 || memcmp(link, name, (size_t)n) != 0)
            continue;
        found = openat(dirfd(directory), e->d_name, O_RDWR | O_CLOEXEC);
        if (found >= 0 && !lives(found, pid)) {
            close(found);
            found = -1;
        }
    }
    if (directory)
        closedir(directory);
    return found;
}

/* Finds a process by its pid, or a thread's, in the caller's pid namespace. */
static CUresult find(int pid, struct target *t) {
    char directory[32];
    CHECK_VALUE(pid > 0);
    snprintf(directory, sizeof directory, "/proc/%d", pid);
    *t = (struct target){.pid = status_of(directory, "Tgid:"), .fd = -1};
    CHECK(t->pid, CUDA_ERROR_OPERATING_SYSTEM);
    if (t->pid == getpid()) {
        t->control = checkpoint_control();
        return CUDA_SUCCESS;
    }
    snprintf(directory, sizeof directory, "/proc/%d/fd", t->pid);
    CHECK(!access(directory, R_OK | X_OK) || errno == ENOENT, CUDA_ERROR_OPERATING_SYSTEM);
    t->fd = open_control(t->pid);
    CHECK(t->fd >= 0, CUDA_ERROR_NOT_INITIALIZED);
    t->control = mmap(NULL, SIM_CONTROL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, t->fd, 0);
    if (t->control != MAP_FAILED)
        return CUDA_SUCCESS;
    close(t->fd);
    return CUDA_ERROR_OPERATING_SYSTEM;
}

static void leave(struct target *t) {
    if (t->fd < 0)
        return;
    munmap(t->control, SIM_CONTROL_BYTES);
    close(t->fd);
}

/* Waits until the process has done what earlier callers asked for. False: it ended. */
static bool wait_finished(const struct target *t, uint32_t requested) {
    for (;;) {
        uint32_t finished = __atomic_load_n(&t->control->finished, __ATOMIC_ACQUIRE);
        if (finished == requested)
            return true;
        if (t->fd >= 0 && !lives(t->fd, t->pid))
            return false;
        control_wait(&t->control->finished, finished, LIFE_CHECK_MS);
    }
}

static CUresult ask(const struct target *t, enum control_operation operation, unsigned timeout_ms,
                    uint32_t *answer) {
    struct control *c = t->control;
    CUresult result = CUDA_ERROR_OPERATING_SYSTEM; /* the process was killed meanwhile */
    if (pthread_mutex_lock(&c->callers) == EOWNERDEAD)
        pthread_mutex_consistent(&c->callers);
    if (wait_finished(t, c->requested)) {
        c->operation = operation;
        c->timeout_ms = timeout_ms;
        __atomic_store_n(&c->requested, c->requested + 1, __ATOMIC_RELEASE);
        control_wake(&c->requested);
        if (wait_finished(t, c->requested)) {
            result = (CUresult)c->result;
            *answer = c->answer;
        }
    }
    pthread_mutex_unlock(&c->callers);
    return result;
}

static CUresult request(int pid, enum control_operation operation, unsigned timeout_ms,
                        uint32_t *answer) {
    struct target target;
    uint32_t ignored;
    CHECK(checkpoint_control(), CUDA_ERROR_NOT_INITIALIZED);
    CUresult result = find(pid, &target);
    if (result == CUDA_SUCCESS) {
        result = ask(&target, operation, timeout_ms, answer ? answer : &ignored);
        leave(&target);
    }
    return result;
}

static bool is_zero(const void *bytes, size_t n) {
    const char *at = bytes;
    while (n && !*at)
        at++, n--;
    return !n;
}

/* The id, in the caller's pid namespace, of the thread with this id in its own one. */
static int thread_here(int pid, int tid) {
    char path[64], task[sizeof path + NAME_MAX];
    int found = 0;
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *directory = opendir(path);
    for (struct dirent *e; directory && !found && (e = readdir(directory));) {
        snprintf(task, sizeof task, "%s/%.16s", path, e->d_name);
        if (atoi(e->d_name) && status_of(task, "NSpid:") == tid)
            found = atoi(e->d_name);
    }
    if (directory)
        closedir(directory);
    return found;
}

EXPORT CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid) {
    uint32_t own;
    CHECK_VALUE(tid);
    CUresult result = request(pid, CONTROL_THREAD, 0, &own);
    if (result != CUDA_SUCCESS)
        return result;
    *tid = thread_here(pid, (int)own);
    return *tid ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

EXPORT CUresult cuCheckpointProcessGetState(int pid, CUprocessState *out) {
    uint32_t state;
    CHECK_VALUE(out);
    CUresult result = request(pid, CONTROL_STATE, 0, &state);
    if (result == CUDA_SUCCESS)
        *out = (CUprocessState)state;
    return result;
}

EXPORT CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args) {
    CHECK_VALUE(!args || (!args->reserved0 && is_zero(args->reserved1, sizeof args->reserved1)));
    return request(pid, CONTROL_LOCK, args ? args->timeoutMs : 0, NULL);
}

EXPORT CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args) {
    CHECK_VALUE(!args || is_zero(args, sizeof *args)); /* custom storage is not simulated */
    return request(pid, CONTROL_CHECKPOINT, 0, NULL);
}

static const uint8_t *uuid_of(int device) {
    return sim.device[device].sim.state->config.uuid;
}

/* Checks the pairs against the devices of the caller, which are taken for the process's. Moving to
 * another device is not simulated. */
static CUresult check_pairs(const CUcheckpointGpuPair *pairs, unsigned n) {
    for (int d = 0; n && d < sim.n_devices; d++) {
        unsigned i = 0;
        while (i < n && memcmp(&pairs[i].oldUuid, uuid_of(d), sizeof pairs[i].oldUuid) != 0)
            i++;
        CHECK_VALUE(i < n);
        CHECK(memcmp(&pairs[i].newUuid, uuid_of(d), sizeof pairs[i].newUuid) == 0,
              CUDA_ERROR_NOT_SUPPORTED);
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args) {
    CHECK(checkpoint_control(), CUDA_ERROR_NOT_INITIALIZED);
    if (args) {
        CHECK_VALUE(!args->padding0 && !args->customStorageInfo_out &&
                    is_zero(args->reserved, sizeof args->reserved));
        CHECK_VALUE(!args->gpuPairsCount == !args->gpuPairs);
        CUresult result = check_pairs(args->gpuPairs, args->gpuPairsCount);
        CHECK(result == CUDA_SUCCESS, result);
    }
    return request(pid, CONTROL_RESTORE, 0, NULL);
}

EXPORT CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args) {
    CHECK_VALUE(!args || is_zero(args, sizeof *args));
    return request(pid, CONTROL_UNLOCK, 0, NULL);
}
