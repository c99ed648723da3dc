/* A simulated device's node: opening it, its lock, and its table of clients. memory.c accounts
 * for what each client holds. */
#include "device.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_NODES 64

uint64_t sim_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Returns "/dev", or <root>/dev when this library was loaded from a marked simulated root. */
const char *sim_device_dir(void) {
    static char dir[PATH_MAX];
    if (dir[0])
        return dir;
    Dl_info info;
    char path[PATH_MAX];
    if (dladdr((void *)sim_device_dir, &info) && info.dli_fname && realpath(info.dli_fname, path)) {
        for (char *end = strrchr(path, '/'); end; end = strrchr(path, '/')) {
            char marker[PATH_MAX + 32];
            *end = '\0';
            snprintf(marker, sizeof marker, "%s/.gpushare-sim", path);
            if (access(marker, F_OK) == 0) {
                snprintf(dir, sizeof dir, "%.4000s/dev", path);
                return dir;
            }
        }
    }
    return strcpy(dir, "/dev");
}

static void init_lock(struct sim_device *device) {
    struct flock l = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = SIM_INIT_OFFSET, .l_len = 1};
    while (fcntl(device->fd, F_OFD_SETLKW, &l) && errno == EINTR) {
    }
    if (!device->state->lock_ready) {
        pthread_mutexattr_t a;
        pthread_mutexattr_init(&a);
        pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&device->state->lock, &a);
        device->state->device_ns = sim_now_ns();
        device->state->schedule.random = device->state->config.seed;
        __atomic_store_n(&device->state->lock_ready, 1, __ATOMIC_RELEASE);
    }
    l.l_type = F_UNLCK;
    fcntl(device->fd, F_OFD_SETLK, &l);
}

static bool open_device(struct sim_device *device, const char *path) {
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    struct stat st;
    if (fd < 0)
        return false;
    void *map = MAP_FAILED;
    if (!fstat(fd, &st) && S_ISREG(st.st_mode) && st.st_size >= (off_t)SIM_STATE_BYTES)
        map = mmap(NULL, SIM_STATE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map != MAP_FAILED) {
        madvise(map, SIM_STATE_BYTES, MADV_DONTFORK);
        *device = (struct sim_device){.state = map, .fd = fd};
        const struct sim_config *c = &device->state->config;
        if (c->magic == SIM_MAGIC && c->version == SIM_VERSION &&
            c->state_bytes == SIM_STATE_BYTES) {
            if (!__atomic_load_n(&device->state->lock_ready, __ATOMIC_ACQUIRE))
                init_lock(device);
            return true;
        }
        munmap(map, SIM_STATE_BYTES);
    }
    close(fd);
    return false;
}

void sim_uuid_text(const struct sim_config *c, char text[41]) {
    char *at = text + sprintf(text, SIM_MIG(c->index) ? "MIG-" : "GPU-");
    for (unsigned i = 0; i < sizeof c->uuid; i++)
        at += sprintf(at, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", c->uuid[i]);
}

static int by_index(const void *a, const void *b) {
    const struct sim_device *x = a, *y = b;
    unsigned i = x->state->config.index, j = y->state->config.index;
    return SIM_GPU(i) != SIM_GPU(j) ? (int)SIM_GPU(i) - (int)SIM_GPU(j)
                                    : (int)SIM_MIG(i) - (int)SIM_MIG(j);
}

static unsigned open_nodes(const char *name, struct sim_device *devices, unsigned max) {
    char path[PATH_MAX + 32];
    unsigned n = 0;
    for (unsigned minor = 0; minor < MAX_NODES && n < max; minor++) {
        snprintf(path, sizeof path, "%s/%s%u", sim_device_dir(), name, minor);
        if (open_device(&devices[n], path))
            n++;
    }
    qsort(devices, n, sizeof *devices, by_index);
    return n;
}

unsigned sim_open_devices(struct sim_device *devices, unsigned max) {
    return open_nodes("nvidia", devices, max);
}

unsigned sim_open_mig(struct sim_device *devices, unsigned max) {
    return open_nodes("nvidia-caps/nvidia-cap", devices, max);
}

/* After a process died while it held the lock: compute the sums again from the counts of each
 * client. */
static void recover(struct sim_state *s) {
    for (unsigned g = 0; g < SIM_MAX_GROUPS; g++)
        s->group[g].current_bytes = 0;
    s->used_bytes = 0;
    for (unsigned i = 0; i < s->clients_high && i < SIM_MAX_CLIENTS; i++) {
        struct sim_client *c = &s->client[i];
        if (c->state == SIM_CLIENT_FREE)
            continue;
        s->used_bytes += c->bytes;
        if (c->state == SIM_CLIENT_LIVE)
            s->group[c->group].current_bytes += c->bytes;
    }
    if (s->sequence & 1)
        __atomic_store_n(&s->sequence, s->sequence + 1, __ATOMIC_RELEASE);
}

void sim_lock(struct sim_device *device) {
    struct sim_state *s = device->state;
    if (pthread_mutex_lock(&s->lock) == EOWNERDEAD) {
        recover(s);
        pthread_mutex_consistent(&s->lock);
    }
    __atomic_store_n(&s->sequence, s->sequence + 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
}

void sim_unlock(struct sim_device *device) {
    struct sim_state *s = device->state;
    __atomic_store_n(&s->sequence, s->sequence + 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&s->lock);
}

static uint64_t namespace_inode(const char *name) {
    char path[64];
    struct stat st;
    snprintf(path, sizeof path, "/proc/self/ns/%s", name);
    return stat(path, &st) ? 0 : st.st_ino;
}

/* Field 22 of /proc/1/stat: tells apart two namespaces that had the same inode number one after
 * the other. */
static uint64_t init_start_ticks(void) {
    unsigned long long ticks = 0;
    char text[1024] = "";
    int fd = open("/proc/1/stat", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    const char *rest = n > 0 ? strrchr(text, ')') : NULL;
    if (rest)
        sscanf(rest + 1,
               " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
               &ticks);
    return ticks;
}

static struct sim_group *find_group(struct sim_state *s, uint64_t pidns, uint32_t *index) {
    uint64_t ticks = init_start_ticks();
    int idle = -1;
    for (unsigned g = 0; g < SIM_MAX_GROUPS; g++) {
        if (s->group[g].pidns == pidns && s->group[g].init_ticks == ticks)
            return *index = g, &s->group[g];
        if (idle < 0 && s->group[g].pidns == 0)
            idle = (int)g;
    }
    for (unsigned g = 0; g < SIM_MAX_GROUPS; g++)
        if (s->group[g].current_bytes == 0 && (idle < 0 || s->group[g].pidns == pidns))
            idle =
                /* A stale group of a namespace with the same inode number, or any empty group
                 * when the table is full */
                (int)g;
    if (idle < 0)
        return NULL;
    s->group[idle] = (struct sim_group){.pidns = pidns, .init_ticks = ticks};
    *index = (uint32_t)idle;
    return &s->group[idle];
}

enum sim_result sim_join(struct sim_device *device) {
    uint64_t pidns = namespace_inode("pid"), mntns = namespace_inode("mnt");
    enum sim_result result = SIM_NO_SLOT;
    sim_lock(device);
    sim_reap(device);
    struct sim_state *s = device->state;
    for (unsigned i = 0; i < SIM_MAX_CLIENTS; i++) {
        struct sim_client *c = &s->client[i];
        if (c->state != SIM_CLIENT_FREE)
            continue;
        uint32_t group = 0;
        struct flock l = {.l_type = F_WRLCK,
                          .l_whence = SEEK_SET,
                          .l_start = (off_t)(SIM_LIFE_OFFSET + i),
                          .l_len = 1};
        if (fcntl(device->fd, F_SETLK, &l))
            continue;
        if (!find_group(s, pidns ? pidns : 1, &group))
            break;
        *c = (struct sim_client){.pid = (uint32_t)getpid(),
                                 .pidns = pidns,
                                 .mntns = mntns,
                                 .generation = ++s->generation,
                                 .started_ns = sim_now_ns(),
                                 .host_pid = pidns == s->config.host_pidns ? (uint32_t)getpid() : 0,
                                 .group = group};
        c->state = SIM_CLIENT_LIVE;
        if (i >= s->clients_high)
            s->clients_high = i + 1;
        device->client = i + 1;
        device->generation = c->generation;
        result = SIM_OK;
        break;
    }
    sim_unlock(device);
    return result;
}

/* The caller's pid namespace. The kernel reuses inode numbers, and the first process of every
 * container has pid 1, so the start time of the namespace's init identifies it, too. */
static uint64_t own_pidns(uint64_t *ticks) {
    static uint64_t pidns, init_ticks;
    if (!pidns) {
        pidns = namespace_inode("pid");
        init_ticks = init_start_ticks();
    }
    *ticks = init_ticks;
    return pidns;
}

bool sim_on_host(const struct sim_device *device) {
    uint64_t ticks;
    return own_pidns(&ticks) == device->state->config.host_pidns;
}

/* Stores the client's pid as the caller sees it, 0 if it does not. False: the client is dead. */
static bool find_process(struct sim_device *device, uint32_t index, uint32_t *pid) {
    struct sim_client *c = &device->state->client[index];
    struct flock l = {.l_type = F_WRLCK,
                      .l_whence = SEEK_SET,
                      .l_start = (off_t)(SIM_LIFE_OFFSET + index),
                      .l_len = 1};
    uint64_t ticks;
    *pid = 0;
    if (c->state != SIM_CLIENT_LIVE)
        return false;
    if (fcntl(device->fd, F_GETLK, &l))
        return true;
    if (l.l_type != F_UNLCK) {
        *pid = l.l_pid > 0 ? (uint32_t)l.l_pid : 0;
    } else {
        /* F_GETLK does not report the caller's own locks, so an own client would look dead. */
        if (c->pid != (uint32_t)getpid() || c->pidns != own_pidns(&ticks) ||
            device->state->group[c->group].init_ticks != ticks)
            return false;
        *pid = c->pid;
    }
    if (sim_on_host(device))
        c->host_pid = *pid;
    return true;
}

bool sim_client_lives(struct sim_device *device, uint32_t index) {
    uint32_t pid;
    return find_process(device, index, &pid);
}

uint32_t sim_client_pid(struct sim_device *device, uint32_t index) {
    uint32_t pid;
    return find_process(device, index, &pid) ? pid : 0;
}

uint32_t sim_host_pid(const struct sim_device *device, uint32_t index) {
    uint32_t pid = device->state->client[index].host_pid;
    return pid ? pid : SIM_UNSEEN_PID + index;
}

static void bury(struct sim_device *device, uint32_t index, uint64_t now_ns) {
    struct sim_state *s = device->state;
    struct sim_client *c = &s->client[index];
    c->state = SIM_CLIENT_DEAD;
    c->return_ns = now_ns + s->config.late_return_ns;
    c->contexts = 0;
    s->group[c->group].current_bytes -= c->bytes;
    s->deaths++;
    sim_bury_shared(device, index);
    for (unsigned q = 0; q < s->queues_high; q++)
        if (s->queue[q].client == index + 1)
            s->queue[q].client = 0;
}

void sim_reap(struct sim_device *device) {
    struct sim_state *s = device->state;
    uint64_t now_ns = sim_now_ns();
    s->last_reap_ns = now_ns;
    for (unsigned i = 0; i < s->clients_high; i++) {
        struct sim_client *c = &s->client[i];
        if (c->state == SIM_CLIENT_LIVE && !sim_client_lives(device, i))
            bury(device, i, now_ns);
        if (c->state == SIM_CLIENT_DEAD && now_ns >= c->return_ns) {
            s->used_bytes -= c->bytes;
            c->bytes = 0;
            c->state = SIM_CLIENT_FREE;
        }
    }
}
