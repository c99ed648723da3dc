/* Threads that allocate and free, or make and destroy streams, while the main thread reads the free
 * memory. usage: crowd SECONDS STREAMS BYTES THREADS: a
 * thousand reads per second, or fewer where they are slow, in four times as long. Prints the least
 * and the most free bytes seen, and how many allocations were refused, and waits for a line. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef int call_fn(void *, ...);
static call_fn *find(const char *name) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    call_fn *found = NULL;
    *(void **)&found = cuda ? dlsym(cuda, name) : NULL;
    if (!found)
        exit(2);
    return found;
}

static call_fn *set_current, *allocate, *release, *create, *destroy, *get_info;
static void *context;
static size_t bytes;
static _Atomic int stop;
static _Atomic long refused;

static void *allocates(void *unused) {
    set_current(context);
    while (!stop) {
        void *address;
        if (allocate(&address, bytes) != 0)
            refused++;
        else
            release(address);
    }
    return unused;
}

static void *makes_streams(void *unused) {
    const struct timespec nap = {.tv_nsec = 200000};
    set_current(context);
    while (!stop) {
        void *stream;
        if (create(&stream, 1) != 0 || destroy(stream) != 0)
            exit(3);
        nanosleep(&nap, NULL);
    }
    return unused;
}

int main(int argc, char **argv) {
    const struct timespec nap = {.tv_nsec = 1000000};
    size_t least = (size_t)-1, most = 0, now, total;
    pthread_t thread[65];
    if (argc != 5)
        return 2;
    int streams = atoi(argv[2]), threads = atoi(argv[4]);
    bytes = (size_t)atol(argv[3]);
    set_current = find("cuCtxSetCurrent");
    allocate = find("cuMemAlloc_v2");
    release = find("cuMemFree_v2");
    create = find("cuStreamCreate");
    destroy = find("cuStreamDestroy_v2");
    get_info = find("cuMemGetInfo_v2");
    if (find("cuInit")(NULL) != 0 || find("cuDevicePrimaryCtxRetain")(&context, 0) != 0)
        return 3;
    set_current(context);
    for (int i = 0; i < streams; i++)
        create(&(void *){NULL}, 1);
    for (int i = 0; i < threads && i < 64; i++)
        pthread_create(&thread[i], NULL, allocates, NULL);
    pthread_create(&thread[threads], NULL, makes_streams, NULL);
    const time_t end = time(NULL) + 4 * atoi(argv[1]);
    for (int i = 0; i < atoi(argv[1]) * 1000 && time(NULL) < end; i++) {
        get_info(&now, &total);
        least = now < least ? now : least;
        most = now > most ? now : most;
        nanosleep(&nap, NULL);
    }
    stop = 1;
    for (int i = 0; i <= threads; i++)
        pthread_join(thread[i], NULL);
    get_info(&now, &total);
    printf("%zu %zu %zu %ld\n", least, most, now, refused);
    fflush(stdout);
    return getchar() == EOF;
}
