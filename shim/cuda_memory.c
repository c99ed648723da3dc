/* Plain, pitched and managed memory. */
#include "cuda_shim.h"

#define PITCH_ALIGN 512u /* no GPU so far wants more (textureAlignment) */

/* After a successful call that gave `address`: charge it, or give it back. */
static CUresult settle(struct gs_charge *charge, uint64_t address, uint64_t bytes) {
    CUresult result = gs_charge_linear(charge, address, bytes);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        GS_REAL(cuMemFree_v2)((CUdeviceptr)address);
    return result;
}

/* `bound`: at most what the call takes; `got`: what it gave, valid when the call succeeded. */
#define GS_ALLOCATE(bound, out, got, ...) \
    struct gs_charge charge; \
    CUresult result = gs_charge_begin(&charge, bound); \
    if (result != CUDA_SUCCESS) \
        return result; \
    result = real(__VA_ARGS__); \
    if (result != CUDA_SUCCESS || !(out)) { \
        gs_charge_abort(&charge); \
        return result; \
    } \
    if ((result = settle(&charge, *(out), got)) != CUDA_SUCCESS) \
        *(out) = 0; \
    return result

static uint64_t product(uint64_t a, uint64_t b) {
    uint64_t bytes;
    return __builtin_mul_overflow(a, b, &bytes) ? UINT64_MAX : bytes;
}

GS_EXPORT CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize) {
    GS_NEED(real, cuMemAlloc_v2);
    GS_ALLOCATE(bytesize, dptr, bytesize, dptr, bytesize);
}

GS_EXPORT CUresult CUDAAPI cuMemAlloc(CUdeviceptr_v1 *dptr, unsigned int bytesize) {
    GS_NEED(real, cuMemAlloc);
    GS_ALLOCATE(bytesize, dptr, bytesize, dptr, bytesize);
}

GS_EXPORT CUresult CUDAAPI cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t width,
                                              size_t height, unsigned int element) {
    GS_NEED(real, cuMemAllocPitch_v2);
    GS_ALLOCATE(product(gs_round_up(width, PITCH_ALIGN), height), dptr, product(*pPitch, height),
                dptr, pPitch, width, height, element);
}

GS_EXPORT CUresult CUDAAPI cuMemAllocPitch(CUdeviceptr_v1 *dptr, unsigned int *pPitch,
                                           unsigned int width, unsigned int height,
                                           unsigned int element) {
    GS_NEED(real, cuMemAllocPitch);
    GS_ALLOCATE(product(gs_round_up(width, PITCH_ALIGN), height), dptr, product(*pPitch, height),
                dptr, pPitch, width, height, element);
}

/* Charged in full, wherever its pages are: it may move to the device at any access. */
GS_EXPORT CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize,
                                             unsigned int flags) {
    GS_NEED(real, cuMemAllocManaged);
    GS_ALLOCATE(bytesize, dptr, bytesize, dptr, bytesize, flags);
}

GS_EXPORT CUresult CUDAAPI cuMemFree_v2(CUdeviceptr dptr) {
    GS_NEED(real, cuMemFree_v2);
    return GS_FREE(gs_memory, dptr, real(dptr));
}

GS_EXPORT CUresult CUDAAPI cuMemFree(CUdeviceptr_v1 dptr) {
    GS_NEED(real, cuMemFree);
    return GS_FREE(gs_memory, dptr, real(dptr));
}
