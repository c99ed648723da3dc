/* An empty driver: addresses by increment, no memory, no locks. A measurement of the shim over
 * it is the shim's own cost. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <string.h>
#include <time.h>

static CUcontext current;
static CUdeviceptr next_address = 0x700000000000;

CUresult cuInit(unsigned int flags) {
    return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    *version = 12020;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    *count = 1;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    (void)device;
    memset(uuid->bytes, 0x5a, sizeof(uuid->bytes));
    return CUDA_SUCCESS;
}

CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device) {
    (void)flags, (void)device;
    *context = current = (CUcontext)&current;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = current;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    *device = 0;
    return CUDA_SUCCESS;
}

/* Reuses the same 1 GiB of addresses, as a real driver reuses addresses. */
CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    if (bytes >= 2u << 20)
        next_address = (next_address + (2u << 20) - 1) & ~(CUdeviceptr)((2u << 20) - 1);
    *address = next_address;
    next_address += (bytes + 511) & ~(size_t)511;
    if (next_address > 0x700040000000)
        next_address = 0x700000000000;
    return CUDA_SUCCESS;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    return address ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- launches: they complete at once --------------------------------------------------------- */

CUresult cuLaunchKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz,
                        unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared,
                        CUstream stream, void **params, void **extra) {
    (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)stream;
    (void)params, (void)extra;
    return f && gx ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    current = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    *context = current;
    return CUDA_SUCCESS;
}

#define EVENTS 1024
static struct { struct timespec at; } events[EVENTS];
static unsigned next_event;

CUresult cuEventCreate(CUevent *event, unsigned int flags) {
    *event = (CUevent)&events[next_event++ % EVENTS];
    return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent event) {
    (void)event;
    return CUDA_SUCCESS;
}

#ifndef STUB_RECORDS
#define STUB_RECORDS 1 /* 0: a driver without events, so launches cannot be timed */
#endif

CUresult cuEventRecord(CUevent event, CUstream stream) {
    (void)stream;
    if (!STUB_RECORDS)
        return CUDA_ERROR_INVALID_HANDLE;
    clock_gettime(CLOCK_MONOTONIC, (struct timespec *)event);
    return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event) {
    return event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuEventElapsedTime(float *ms, CUevent start, CUevent end) {
    const struct timespec *a = (struct timespec *)start, *b = (struct timespec *)end;
    *ms = (float)((double)(b->tv_sec - a->tv_sec) * 1e3 + (double)(b->tv_nsec - a->tv_nsec) / 1e6);
    return CUDA_SUCCESS;
}
