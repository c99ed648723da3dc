/* A faulty driver: it allocates for a thread without a context. It is also slow to list its
 * devices, so that another thread can run in between. */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <unistd.h>

static int live; /* objects that were created and not destroyed */

int oddLive(void) {
    return live;
}

CUresult cuInit(unsigned int flags) {
    return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    sleep(1);
    *count = 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    (void)uuid, (void)device;
    return CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = NULL;
    return CUDA_SUCCESS;
}

static CUresult give(void **handle) {
    *handle = (void *)(0x700000000000 + 0x200000ll * ++live);
    return CUDA_SUCCESS;
}

static CUresult take(void) {
    live--;
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    (void)bytes;
    return give((void **)address);
}
CUresult cuMemFree_v2(CUdeviceptr address) {
    (void)address;
    return take();
}
CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream) {
    (void)bytes, (void)stream;
    return give((void **)address);
}
CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    (void)address, (void)stream;
    return take();
}
CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *descriptor) {
    (void)descriptor;
    return give((void **)array);
}
CUresult cuArrayDestroy(CUarray array) {
    (void)array;
    return take();
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    (void)image;
    return give((void **)module);
}
CUresult cuModuleUnload(CUmodule module) {
    (void)module;
    return take();
}
