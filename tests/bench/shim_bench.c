/* What the shim adds to an allocation and its free, over an empty driver, in nanoseconds.
 *
 *   shim_bench              one line of JSON: {"shim.alloc_added_ns": {median, p99, n, unit}, ...}
 *
 * It expects build/bench/libcuda-stub.so beside itself and build/shim/libcuda.so; both are put
 * where a container has them, in a mount namespace of its own (needs root). Each figure is from
 * short batches, driver alone and under the shim in turn, so that what slows the machine down slows
 * both. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include "gpushare_abi.h"

#define PRIVATE "/usr/lib/gpushare"
#define BATCH 300
#define BATCHES 2000
#define PROCESSES 8

static void fail(const char *what, const char *which) {
    fprintf(stderr, "shim_bench: %s %s: %s\n", what, which, strerror(errno));
    exit(1);
}

static void write_file(const char *path, const void *data, size_t size, size_t total, mode_t mode) {
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (fd < 0 || write(fd, data, size) != (ssize_t)size || ftruncate(fd, (off_t)total) ||
        fchmod(fd, mode))
        fail("cannot write", path);
    close(fd);
}

static void bind_file(const char *source, const char *target) {
    write_file(target, "", 0, 0, 0755);
    if (mount(source, target, NULL, MS_BIND, NULL))
        fail("cannot mount", source);
}

/* /usr/lib/gpushare as in a container: one device, 64 GiB, the empty driver. */
static void build_view(const char *directory) {
    static struct gs_limits limits = {
        .magic = GS_LIMITS_MAGIC, .version = GS_ABI_VERSION, .nonce = 1};
    static struct gs_usage usage = {.magic = GS_USAGE_MAGIC, .version = GS_ABI_VERSION, .nonce = 1};
    char path[PATH_MAX];
    limits.size = sizeof(limits);
    limits.n_devices = 1;
    memset(limits.device[0].uuid, 0x5a, sizeof(limits.device[0].uuid));
    limits.device[0].memory_limit_bytes = 64ull << 30;
    limits.device[0].granularity_bytes = 2u << 20;
    usage.size = sizeof(usage);
    usage.n_slots = GS_MAX_SLOTS;
    usage.n_devices = 1;
    if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL))
        fail("cannot enter", "a mount namespace");
    if (mount("tmpfs", "/mnt", "tmpfs", 0, NULL) || mkdir("/mnt/upper", 0755) ||
        mkdir("/mnt/work", 0755) ||
        mount("overlay", "/usr/lib", "overlay", 0,
              "lowerdir=/usr/lib,upperdir=/mnt/upper,workdir=/mnt/work"))
        fail("cannot mount over", "/usr/lib");
    if ((mkdir(PRIVATE, 0755) && errno != EEXIST) || mount("tmpfs", PRIVATE, "tmpfs", 0, NULL) ||
        mkdir(PRIVATE "/driver", 0755) || mkdir(PRIVATE "/rw", 0755))
        fail("cannot make", PRIVATE);
    write_file(PRIVATE "/limits", &limits, sizeof(limits), sizeof(limits), 0444);
    write_file(PRIVATE "/rw/usage", &usage, sizeof(usage), sizeof(usage), 0666);
    snprintf(path, sizeof(path), "%s/libcuda-stub.so", directory);
    bind_file(path, PRIVATE "/driver/libcuda-real.so.1");
    snprintf(path, sizeof(path), "%s/../shim/libcuda.so", directory);
    bind_file(path, PRIVATE "/driver/shim.so");
}

struct functions {
    __typeof__(&cuMemAlloc_v2) allocate;
    __typeof__(&cuMemFree_v2) release;
    __typeof__(&cuDriverGetVersion) version;
};

static void *symbol(void *handle, const char *name) {
    void *function = dlsym(handle, name);
    if (!function)
        fail("no function", name);
    return function;
}

static struct functions functions_of(void *handle) {
    return (struct functions){symbol(handle, "cuMemAlloc_v2"), symbol(handle, "cuMemFree_v2"),
                              symbol(handle, "cuDriverGetVersion")};
}

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

/* Small ones that share a block, middling ones, and one with blocks of its own. */
static double pair_ns(const struct functions *f) {
    static const size_t bytes[] = {512, 64 << 10, 8 << 20};
    double begin = now_ns();
    for (int i = 0; i < BATCH; i++) {
        CUdeviceptr address;
        if (f->allocate(&address, bytes[i % 3]) || f->release(address))
            fail("an allocation was refused", "");
    }
    return (now_ns() - begin) / BATCH;
}

static double version_ns(const struct functions *f) {
    double begin = now_ns();
    int version;
    for (int i = 0; i < BATCH; i++)
        f->version(&version);
    return (now_ns() - begin) / BATCH;
}

/* added[i] = under the shim minus alone, for BATCHES pairs of batches. */
static void measure(double *added, double (*batch)(const struct functions *)) {
    void *shim = dlopen(PRIVATE "/driver/shim.so", RTLD_NOW);
    void *stub = dlopen(PRIVATE "/driver/libcuda-real.so.1", RTLD_NOW | RTLD_NOLOAD);
    CUcontext context;
    if (!shim || !stub)
        fail(dlerror(), "");
    if (((__typeof__(&cuInit))symbol(shim, "cuInit"))(0) ||
        ((__typeof__(&cuCtxCreate_v2))symbol(shim, "cuCtxCreate_v2"))(&context, 0, 0))
        fail("the shim refused to start", "");
    struct functions ours = functions_of(shim), theirs = functions_of(stub);
    for (int i = -BATCHES / 10; i < BATCHES; i++) {
        double alone = batch(&theirs), under = batch(&ours);
        if (i >= 0)
            added[i] = under - alone;
    }
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print(const char *key, double *added, int n, const char *end) {
    qsort(added, (size_t)n, sizeof(*added), ascending);
    printf("\"%s\": {\"median\": %.2f, \"p99\": %.2f, \"n\": %d, \"unit\": \"ns\"}%s", key,
           added[n / 2], added[n * 99 / 100], n, end);
}

/* `processes` at once, each in its own process, all started by the same event. */
static void run(const char *key, int processes, double (*batch)(const struct functions *),
                const char *end) {
    size_t bytes = sizeof(double) * BATCHES * (size_t)processes;
    double *added = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int gate[2];
    if (added == MAP_FAILED || pipe(gate))
        fail("no memory", "");
    for (int i = 0; i < processes; i++)
        if (fork() == 0) {
            char go;
            close(gate[1]);
            if (read(gate[0], &go, 1) != 0)
                _exit(1);
            measure(added + (size_t)i * BATCHES, batch);
            _exit(0);
        }
    close(gate[0]);
    close(gate[1]);
    for (int i = 0, status; i < processes; i++)
        if (wait(&status) < 0 || status)
            fail("a process of the measurement failed for", key);
    print(key, added, BATCHES * processes, end);
    munmap(added, bytes);
}

int main(void) {
    char self[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    if (n < 0)
        fail("cannot read", "/proc/self/exe");
    self[n] = '\0';
    build_view(dirname(self));
    fputs("{", stdout);
    fflush(stdout);
    run("shim.alloc_added_ns", 1, pair_ns, ", ");
    fflush(stdout);
    run("shim.alloc_added_ns_8p", PROCESSES, pair_ns, ", ");
    fflush(stdout);
    run("shim.passthrough_added_ns", 1, version_ns, "}\n");
    return 0;
}
