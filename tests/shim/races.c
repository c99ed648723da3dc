/* Threads of one program that run concurrently.
 *
 *   races bounds     allocates memory for which there is room, while others allocate out of pools
 *   races release    two references of one handle are released at once; then it is used again
 *   races cancel     threads are cancelled while they launch; then another one launches
 *
 * Prints a number: 0 on success, or how many calls of a thousand were refused. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cuda.h>

#define MIB (1ull << 20)
#define OTHERS 2
#define THREADS 2

static CUcontext context;

static void start(void) {
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context))
        _exit(3);
}

static void *churn(void *arg) {
    CUstream stream;
    CUdeviceptr address;
    cuCtxSetCurrent(context);
    cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
    for (;;)
        if (cuMemAllocAsync(&address, 4096, stream) == CUDA_SUCCESS)
            cuMemFreeAsync(address, stream);
    return arg;
}

static void other(_Atomic int *ready) {
    CUmemoryPool pool;
    CUdeviceptr address;
    pthread_t thread;
    cuuint64_t keep = UINT64_MAX;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    start();
    cuDeviceGetDefaultMemPool(&pool, 0);
    cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep);
    while (cuMemAllocAsync(&address, 4096, NULL)) /* let the other thread find its pool's step */
        usleep(1000);
    ++*ready;
    for (int i = 0; i < THREADS; i++)
        pthread_create(&thread, NULL, churn, NULL);
    for (;;)
        pause();
}

static int bounds(void) {
    _Atomic int *ready =
        mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t pid[OTHERS];
    CUdeviceptr address;
    size_t unused, total;
    int refused = 0;
    for (int i = 0; i < OTHERS; i++)
        if ((pid[i] = fork()) == 0)
            other(ready);
    while (*ready < OTHERS)
        usleep(1000);
    start();
    cuMemGetInfo(&unused, &total);
    size_t bytes = total - (OTHERS + 1) * 300 * MIB - OTHERS * 32 * MIB - 2 * MIB;
    for (int i = 0; i < 1000; i++, usleep(50))
        if (cuMemAlloc(&address, bytes) == CUDA_SUCCESS)
            cuMemFree(address);
        else
            refused++;
    for (int i = 0; i < OTHERS; i++)
        kill(pid[i], SIGKILL);
    return refused;
}

static CUmemGenericAllocationHandle shared;
static _Atomic unsigned steps;

/* Waits for the other thread; both spin, so that they continue at the same time. */
static void meet(void) {
    for (unsigned mine = ++steps; steps < mine + mine % 2;)
        ;
}

static void *releaser(void *arg) {
    for (;;) {
        meet();
        if (cuMemRelease(shared))
            _exit(4);
        meet();
    }
    return arg;
}

static int release(void) {
    CUmemAllocationProp props = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    CUdeviceptr at;
    CUmemGenericAllocationHandle again;
    pthread_t thread;
    start();
    cuMemAddressReserve(&at, 2 * MIB, 0, 0, 0);
    pthread_create(&thread, NULL, releaser, NULL);
    for (int i = 0; i < 20000; i++) {
        if (cuMemCreate(&shared, 2 * MIB, &props, 0) || cuMemMap(at, 2 * MIB, 0, shared, 0) ||
            cuMemRetainAllocationHandle(&again, (void *)at) || cuMemUnmap(at, 2 * MIB))
            return 3;
        meet();
        if (cuMemRelease(again))
            return 4;
        meet();
        if (cuMemMap(at, 2 * MIB, 0, shared, 0) == CUDA_SUCCESS)
            return 5;
    }
    return 0;
}

static CUfunction kernel;

static CUresult launch(CUstream stream) {
    return cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
}

static void *launcher(void *arg) {
    CUstream stream;
    if (cuCtxSetCurrent(context) || cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING))
        _exit(3);
    while (launch(stream) == CUDA_SUCCESS)
        pthread_testcancel();
    return arg;
}

static int cancel(void) {
    CUmodule module;
    pthread_t thread;
    start();
    if (cuModuleLoadData(&module, "SIMMOD globals=0 code=1\n") ||
        cuModuleGetFunction(&kernel, module, "spin_us_100"))
        return 3;
    for (int i = 0; i < 12; i++) {
        pthread_create(&thread, NULL, launcher, NULL);
        usleep(5000 + 37 * (unsigned)i);
        pthread_cancel(thread);
        pthread_join(thread, NULL);
        if (launch(NULL) || cuCtxSynchronize())
            return 4;
    }
    return 0;
}

int main(int argc, char **argv) {
    int result = 2;
    if (argc == 2 && strcmp(argv[1], "bounds") == 0)
        result = bounds();
    else if (argc == 2 && strcmp(argv[1], "cancel") == 0)
        result = cancel();
    else if (argc == 2)
        result = release();
    printf("%d\n", result);
    fflush(stdout);
    _exit(0);
}
