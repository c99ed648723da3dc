/* Measures what the shim adds to an allocation and its free, to a launch, to a timed launch, and
 * to the start of a process, over an empty driver.
 *
 *   shim_bench              one line of JSON: {"shim.alloc_added_ns": {median, p99, n, unit}, ...}
 *
 * It expects libcuda-stub.so beside itself and build/shim/libcuda.so. Both are mounted where a
 * container has them, in a private mount namespace (needs root). Each figure is from short
 * batches that alternate between the driver alone and the shim, so that other load affects both. */
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
#define STARTS 300
#define UUID "GPU-5a5a5a5a-5a5a-5a5a-5a5a-5a5a5a5a5a5a"

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

/* Creates /usr/lib/gpushare as in a container with one device of 64 GiB and the empty driver. */
static void build_view(const char *directory) {
    static struct gs_limits limits = {
        .magic = GS_LIMITS_MAGIC, .version = GS_ABI_VERSION, .nonce = 1, .generation = 1};
    static struct gs_pages pages = {.magic = GS_PAGES_MAGIC,
                                    .version = GS_ABI_VERSION,
                                    .size = sizeof(pages),
                                    .n_pages = GS_MAX_PAGES};
    static struct gs_peers peers = {.magic = GS_PEERS_MAGIC,
                                    .version = GS_ABI_VERSION,
                                    .size = sizeof(peers),
                                    .generation = 1,
                                    .used = {1}};
    static struct gs_usage usage = {.magic = GS_USAGE_MAGIC, .version = GS_ABI_VERSION, .nonce = 1};
    char path[PATH_MAX];
    limits.size = sizeof(limits);
    limits.n_devices = 1;
    memset(limits.device[0].uuid, 0x5a, sizeof(limits.device[0].uuid));
    limits.device[0].memory_limit_bytes = 64ull << 30;
    limits.device[0].granularity_bytes = 2u << 20;
    limits.device[0].compute_percent = GS_NO_PERCENT;
    strcpy(limits.device[0].uuid_text, UUID);
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
    if (mkdir(PRIVATE "/pages", 0755) || mkdir(PRIVATE "/peers", 0755) ||
        mkdir(PRIVATE "/peers/" UUID, 0755))
        fail("cannot make", PRIVATE "/peers/" UUID);
    write_file(PRIVATE "/peers/" UUID "/index", &peers, sizeof(peers), sizeof(peers), 0444);
    write_file(PRIVATE "/peers/" UUID "/0", &pages, sizeof(pages), sizeof(pages), 0666);
    write_file(PRIVATE "/pages/" UUID, "", 0, 0, 0666);
    if (mount(PRIVATE "/peers/" UUID "/0", PRIVATE "/pages/" UUID, NULL, MS_BIND, NULL))
        fail("cannot mount", PRIVATE "/pages/" UUID);
    snprintf(path, sizeof(path), "%s/libcuda-stub.so", directory);
    bind_file(path, PRIVATE "/driver/libcuda-real.so.1");
    snprintf(path, sizeof(path), "%s/../shim/libcuda.so", directory);
    bind_file(path, PRIVATE "/driver/shim.so");
}

struct functions {
    __typeof__(&cuMemAlloc_v2) allocate;
    __typeof__(&cuMemFree_v2) release;
    __typeof__(&cuDriverGetVersion) version;
    __typeof__(&cuLaunchKernel) launch;
};

static void *symbol(void *handle, const char *name) {
    void *function = dlsym(handle, name);
    if (!function)
        fail("no function", name);
    return function;
}

static struct functions functions_of(void *handle) {
    return (struct functions){symbol(handle, "cuMemAlloc_v2"), symbol(handle, "cuMemFree_v2"),
                              symbol(handle, "cuDriverGetVersion"),
                              symbol(handle, "cuLaunchKernel")};
}

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

/* Allocates and frees sizes that share a block, of medium size, and with blocks of their own. */
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

static void launch(const struct functions *f, int function, unsigned grid) {
    static char functions[8];
    if (f->launch((CUfunction)&functions[function], grid, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL))
        fail("a launch was refused", "");
}

/* Launches four functions in rotation. */
static double launch_ns(const struct functions *f) {
    double begin = now_ns();
    for (int i = 0; i < BATCH; i++)
        launch(f, i % 4, 1);
    return (now_ns() - begin) / BATCH;
}

/* Every launch has another grid, so the shim times each one: it records an event before and
 * after. */
static double marked_ns(const struct functions *f) {
    static unsigned grid;
    double begin = now_ns();
    for (int i = 0; i < BATCH; i++)
        launch(f, 0, ++grid);
    return (now_ns() - begin) / BATCH;
}

/* Measures the thread time of a process from opening the library to its first launch, in
 * microseconds. */
static void start_process(double *took_us) {
    struct timespec begin, end;
    CUcontext context;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
    void *shim = dlopen(PRIVATE "/driver/shim.so", RTLD_NOW);
    if (!shim)
        fail(dlerror(), "");
    if (((__typeof__(&cuInit))symbol(shim, "cuInit"))(0) ||
        ((__typeof__(&cuCtxCreate_v2))symbol(shim, "cuCtxCreate_v2"))(&context, 0, 0))
        fail("the shim refused to start", "");
    struct functions ours = functions_of(shim);
    launch(&ours, 0, 1);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
    *took_us =
        (double)(end.tv_sec - begin.tv_sec) * 1e6 + (double)(end.tv_nsec - begin.tv_nsec) / 1e3;
}

/* Sets added[i] to the time under the shim minus the time alone, for BATCHES pairs of batches. */
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

static void print(const char *key, double *added, int n, const char *unit, const char *end) {
    qsort(added, (size_t)n, sizeof(*added), ascending);
    printf("\"%s\": {\"median\": %.2f, \"p99\": %.2f, \"n\": %d, \"unit\": \"%s\"}%s", key,
           added[n / 2], added[n * 99 / 100], n, unit, end);
    fflush(stdout);
}

/* Runs `processes` processes, released together by closing a pipe. With `batch` NULL each only
 * starts. */
static void run(const char *key, int processes, double (*batch)(const struct functions *),
                const char *end) {
    int each = batch ? BATCHES : 1;
    size_t bytes = sizeof(double) * (size_t)each * (size_t)processes;
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
            if (batch)
                measure(added + (size_t)i * BATCHES, batch);
            else
                start_process(added + i);
            _exit(0);
        }
    close(gate[0]);
    close(gate[1]);
    for (int i = 0, status; i < processes; i++)
        if (wait(&status) < 0 || status)
            fail("a process of the measurement failed for", key);
    print(key, added, each * processes, batch ? "ns" : "us", end);
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
    run("shim.alloc_added_ns_8p", PROCESSES, pair_ns, ", ");
    run("shim.passthrough_added_ns", 1, version_ns, ", ");
    run("shim.launch_added_ns", 1, launch_ns, ", ");
    run("shim.marker_added_ns", 1, marked_ns, ", ");
    run("shim.init_added_us", STARTS, NULL, "}\n");
    return 0;
}
