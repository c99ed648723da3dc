/* Page-locked host memory: uses no device memory. */
#include "sim.h"

#include <stdlib.h>
#include <sys/mman.h>

struct host_mem {
    uint64_t va, size;
    unsigned flags;
    bool registered;
    struct host_mem *next;
};

static struct host_mem *all;

static struct host_mem **find(uint64_t va) {
    for (struct host_mem **p = &all; *p; p = &(*p)->next)
        if (va >= (*p)->va && va - (*p)->va < (*p)->size)
            return p;
    return NULL;
}

bool host_range(uint64_t va, uint64_t *start, uint64_t *size) {
    struct host_mem **p = find(va);
    if (!p)
        return false;
    *start = (*p)->va;
    *size = (*p)->size;
    return true;
}

static CUresult add(uint64_t va, uint64_t size, unsigned flags, bool registered) {
    struct host_mem *h = malloc(sizeof *h);
    CHECK(h, CUDA_ERROR_OUT_OF_MEMORY);
    *h = (struct host_mem){
        .va = va, .size = size, .flags = flags, .registered = registered, .next = all};
    all = h;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostAlloc(void **pp, size_t bytesize, unsigned int flags) {
    ENTER_CONTEXT(ctx);
    (void)ctx;
    CHECK_VALUE(pp && bytesize && !(flags & ~7u));
    CHECK(capture_allows_call(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    void *p = mmap(NULL, bytesize, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(p != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    *pp = p;
    return add((uint64_t)p, bytesize, flags, false);
}

EXPORT CUresult cuMemAllocHost_v2(void **pp, size_t bytesize) {
    return cuMemHostAlloc(pp, bytesize, 0);
}

static CUresult drop(uint64_t va, bool registered, CUresult unknown) {
    struct host_mem **p = find(va);
    CHECK(p && (*p)->va == va && (*p)->registered == registered, unknown);
    struct host_mem *h = *p;
    *p = h->next;
    if (!registered)
        munmap((void *)h->va, h->size);
    free(h);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemFreeHost(void *p) {
    ENTER_CONTEXT(ctx);
    CUresult waited = engine_wait_context(ctx);
    return waited == CUDA_SUCCESS ? drop((uint64_t)p, false, CUDA_ERROR_INVALID_VALUE) : waited;
}

EXPORT CUresult cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int flags) {
    ENTER_CONTEXT(ctx);
    (void)ctx;
    CHECK_VALUE(p && bytesize && !(flags & ~15u));
    CHECK(!find((uint64_t)p), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    return add((uint64_t)p, bytesize, flags, true);
}

EXPORT CUresult cuMemHostUnregister(void *p) {
    ENTER_CONTEXT(ctx);
    (void)ctx;
    return drop((uint64_t)p, true, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *pdptr, void *p, unsigned int flags) {
    ENTER_CONTEXT(ctx);
    (void)ctx;
    CHECK_VALUE(pdptr && !flags && find((uint64_t)p));
    *pdptr = (CUdeviceptr)p;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostGetFlags(unsigned int *flags, void *p) {
    ENTER_CONTEXT(ctx);
    (void)ctx;
    struct host_mem **h = find((uint64_t)p);
    CHECK_VALUE(flags && h);
    *flags = (*h)->flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAllocHost(void **pp, unsigned int bytesize) {
    return cuMemHostAlloc(pp, bytesize, 0);
}

EXPORT CUresult cuMemHostRegister(void *p, size_t bytesize, unsigned int flags) {
    return cuMemHostRegister_v2(p, bytesize, flags);
}
