/* Measures the duration of single driver calls, as a program sees it. It uses no CUDA headers:
 * it must compile on any machine with a C compiler.
 *
 *     latency LIBCUDA [NAME]     one line of JSON: {"launch": {"median_ns": ..., "p99_ns": ...,
 *                                "n": ...}, ...}; with NAME only this call */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_CALLS 4000
#define DRAIN 64 /* launches between two synchronisations, far fewer than the queue holds */
#define GRAPH_KERNELS 10

typedef uint64_t handle;
typedef int (*call)();

static const char PTX[] = ".version 6.0\n.target sm_50\n.address_size 64\n"
                          ".visible .entry empty_spin_us_1()\n{\n    ret;\n}\n";

static void *library;
static handle function, stream, event, graph, flag, empty, look;

static call find(const char *name) {
    char newer[64];
    snprintf(newer, sizeof newer, "%s_v2", name);
    void *at = dlsym(library, newer);
    if (!at)
        at = dlsym(library, name);
    if (!at) {
        printf("{\"failed\": \"no %s\"}\n", name);
        exit(0);
    }
    return (call)at;
}

static void check(int code, const char *what) {
    if (code) {
        printf("{\"failed\": \"%s gave %d\"}\n", what, code);
        exit(0);
    }
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static int by_value(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* ---- one function for each row of the table: the timed call ------------------------------ */

typedef int (*launch_call)(handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                           unsigned, handle, void **, void **);
typedef int (*one_handle)(handle);
typedef int (*two_handles)(handle, handle);
typedef int (*value_call)(handle, handle, uint32_t, unsigned);
typedef int (*alloc_call)(handle *, size_t);
typedef int (*async_alloc_call)(handle *, size_t, handle);
typedef int (*info_call)(size_t *, size_t *);

static launch_call launch_kernel;
static one_handle query, synchronize, mem_free;
static two_handles record, launch_graph, free_async;
static value_call wait_value, write_value;
static alloc_call alloc;
static async_alloc_call alloc_async;
static info_call info;

static int do_launch(void) {
    return launch_kernel(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
}
static int do_launch_and_wait(void) {
    int code = do_launch();
    return code ? code : synchronize(stream);
}
static int do_record(void) {
    return record(event, stream);
}
static int do_query(void) {
    int code = query(event);
    return code == 600 ? 0 : code; /* NOT_READY */
}
/* A probe as in the rate limiter: a timing event in its own stream, queried at once */
static int do_look(void) {
    int code = record(look, empty);
    if (code)
        return code;
    code = query(look);
    return code == 600 ? 0 : code;
}
static int do_wait_value(void) {
    return wait_value(stream, flag, 0, 0); /* flag >= 0 already holds */
}
static int do_write_value(void) {
    return write_value(stream, flag, 1, 0);
}
static int do_graph(void) {
    return launch_graph(graph, stream);
}
static int do_info(void) {
    size_t free_bytes, total;
    return info(&free_bytes, &total);
}
static int alloc_free(size_t bytes) {
    handle address;
    int code = alloc(&address, bytes);
    return code ? code : mem_free(address);
}
static int do_alloc_1k(void) {
    return alloc_free(1024);
}
static int do_alloc_2m(void) {
    return alloc_free(2u << 20);
}
static int do_alloc_64m(void) {
    return alloc_free(64u << 20);
}
static int do_alloc_async(void) {
    handle address;
    int code = alloc_async(&address, 1 << 20, stream);
    return code ? code : free_async(address, stream);
}

static const struct {
    const char *name;
    int (*run)(void);
    int n;
} CALLS[] = {
    {"launch", do_launch, 4000},
    {"launch_and_synchronize", do_launch_and_wait, 1000},
    {"event_record", do_record, 4000},
    {"event_query", do_query, 4000},
    {"look", do_look, 4000},
    {"wait_value", do_wait_value, 2000},
    {"write_value", do_write_value, 2000},
    {"graph_launch_10_kernels", do_graph, 1000},
    {"mem_get_info", do_info, 1000},
    {"alloc_free_1_KiB", do_alloc_1k, 500},
    {"alloc_free_2_MiB", do_alloc_2m, 200},
    {"alloc_free_64_MiB", do_alloc_64m, 100},
    {"alloc_free_async_1_MiB", do_alloc_async, 1000},
};
#define N_CALLS (sizeof CALLS / sizeof *CALLS)

static void measure(unsigned i) {
    static int64_t took[MAX_CALLS];
    static const char *before_it = "{";
    const char *start = before_it;
    before_it = ", ";
    for (int k = -DRAIN; k < CALLS[i].n; k++) { /* warm-up, not counted */
        if (k % DRAIN == 0)
            check(synchronize(stream), "cuStreamSynchronize");
        int64_t before = now_ns();
        int code = CALLS[i].run();
        int64_t after = now_ns();
        if (code && k < 0) { /* not every device supports it */
            printf("%s\"%s\": {\"code\": %d}", start, CALLS[i].name, code);
            return;
        }
        check(code, CALLS[i].name);
        if (k >= 0)
            took[k] = after - before;
    }
    check(synchronize(stream), "cuStreamSynchronize");
    qsort(took, (size_t)CALLS[i].n, sizeof *took, by_value);
    printf("%s\"%s\": {\"median_ns\": %lld, \"p99_ns\": %lld, \"n\": %d}", start, CALLS[i].name,
           (long long)took[CALLS[i].n / 2], (long long)took[CALLS[i].n * 99 / 100], CALLS[i].n);
}

static void find_all(void) {
    launch_kernel = (launch_call)find("cuLaunchKernel");
    query = (one_handle)find("cuEventQuery");
    synchronize = (one_handle)find("cuStreamSynchronize");
    mem_free = (one_handle)find("cuMemFree");
    record = (two_handles)find("cuEventRecord");
    launch_graph = (two_handles)find("cuGraphLaunch");
    free_async = (two_handles)find("cuMemFreeAsync");
    wait_value = (value_call)find("cuStreamWaitValue32");
    write_value = (value_call)find("cuStreamWriteValue32");
    alloc = (alloc_call)find("cuMemAlloc");
    alloc_async = (async_alloc_call)find("cuMemAllocAsync");
    info = (info_call)find("cuMemGetInfo");
}

static void set_up(void) {
    handle context, module, captured;
    check(((int (*)(unsigned))find("cuInit"))(0), "cuInit");
    check(((int (*)(handle *, int))find("cuDevicePrimaryCtxRetain"))(&context, 0), "retain");
    check(((one_handle)find("cuCtxSetCurrent"))(context), "cuCtxSetCurrent");
    check(((int (*)(handle *, const void *))find("cuModuleLoadData"))(&module, PTX), "module");
    check(((int (*)(handle *, handle, const char *))find("cuModuleGetFunction"))(&function, module,
                                                                                 "empty_spin_us_1"),
          "cuModuleGetFunction");
    check(((int (*)(handle *, unsigned))find("cuStreamCreate"))(&stream, 1), "cuStreamCreate");
    check(((int (*)(handle *, unsigned))find("cuStreamCreate"))(&empty, 1), "cuStreamCreate");
    check(((int (*)(handle *, unsigned))find("cuEventCreate"))(&event, 2), "cuEventCreate");
    check(((int (*)(handle *, unsigned))find("cuEventCreate"))(&look, 0), "cuEventCreate");
    check(alloc(&flag, 4096), "cuMemAlloc");
    check(((int (*)(handle, unsigned char, size_t))find("cuMemsetD8"))(flag, 0, 4096),
          "cuMemsetD8");
    check(((int (*)(handle, int))find("cuStreamBeginCapture"))(stream, 2), "capture");
    for (int i = 0; i < GRAPH_KERNELS; i++)
        check(do_launch(), "cuLaunchKernel");
    check(((int (*)(handle, handle *))find("cuStreamEndCapture"))(stream, &captured), "capture");
    check(((int (*)(handle *, handle, uint64_t))find("cuGraphInstantiateWithFlags"))(&graph,
                                                                                     captured, 0),
          "cuGraphInstantiateWithFlags");
}

int main(int argc, char **argv) {
    library = argc >= 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (!library) {
        printf("{\"failed\": \"%s cannot be loaded\"}\n", argc >= 2 ? argv[1] : "nothing");
        return 0;
    }
    find_all();
    set_up();
    for (unsigned i = 0; i < N_CALLS; i++)
        if (argc < 3 || !strcmp(argv[2], CALLS[i].name))
            measure(i);
    printf("}\n");
    return 0;
}
