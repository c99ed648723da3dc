/* The limiter common in the field, for comparison: each process has a bucket of launches. Every
 * 120 ms it gets more or fewer launches, by the distance between its share and NVML's utilisation.
 */
#define _GNU_SOURCE
#include "busy.h"

#include <dlfcn.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

enum { TICK_NS = 120000000, SAMPLES = 128 };

struct sample { /* nvmlProcessUtilizationSample_t */
    unsigned pid;
    unsigned long long stamp_us;
    unsigned processors, memory, encoder, decoder;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double tokens, refill = 10;
static uint64_t tick_ns;

static void *nvml(const char *name) {
    static void *library;
    if (!library)
        library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    return library ? dlsym(library, name) : NULL;
}

/* Return the percentage of the device that this process used lately; -1: unknown. */
static double used(unsigned device) {
    static void *handle;
    struct sample sample[SAMPLES];
    unsigned n = SAMPLES;
    double percent = 0;
    int (*init)() = nvml("nvmlInit_v2"), (*find)() = nvml("nvmlDeviceGetHandleByIndex_v2"),
        (*read)() = nvml("nvmlDeviceGetProcessUtilization");
    if (!init || !find || !read || (!handle && (init() || find(device, &handle))) ||
        read(handle, sample, &n, 0ull))
        return -1;
    for (unsigned i = 0; i < n; i++)
        if (sample[i].pid == (unsigned)getpid())
            percent += sample[i].processors;
    return percent;
}

void classic_wait(const struct options *o, const struct shared *shared) {
    pthread_mutex_lock(&lock);
    if (!tick_ns)
        tick_ns = now_ns();
    while (!__atomic_load_n(&shared->stop, __ATOMIC_RELAXED)) {
        while (now_ns() >= tick_ns) {
            double share = (double)o->classic, off = (share - used((unsigned)o->device)) / share;
            off = off > 1 ? 1 : off < -0.5 ? -0.5 : off;
            refill *= 1 + 0.5 * off;
            refill = refill < 1 ? 1 : refill;
            tokens = (tokens > 0 ? 0 : tokens) + refill;
            tick_ns += TICK_NS;
        }
        tokens -= tokens > 0;
        if (tokens > 0)
            break;
        struct timespec t = {.tv_sec = (time_t)(tick_ns / 1000000000u),
                             .tv_nsec = (long)(tick_ns % 1000000000u)};
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
    }
    pthread_mutex_unlock(&lock);
}
