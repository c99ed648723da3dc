/* Plain, pitched and managed memory. */
#include "memory.h"

#define PITCH_ALIGN 512u /* the largest textureAlignment of any GPU so far */

/* After a successful call that returned `address`: charge it, or free it again. */
static CUresult charge_or_free(struct gs_charge *charge, uint64_t address, uint64_t bytes) {
    CUresult result = gs_charge_linear(charge, address, bytes);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        GS_REAL(cuMemFree_v2)((CUdeviceptr)address);
    return result;
}

/* For callers that cannot get host memory: the oldest functions, whose addresses have 32 bits. */
static CUresult count_and_refuse(void) {
    struct gs_here here;
    if (gs_here(&here))
        gs_count_refusal(here.dev);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* `bound`: upper bound of what the call allocates; `got`: what it did allocate, valid if the call
 * succeeded; `instead`: the expression to return if the share or the device has no room. */
#define GS_ALLOCATE(bound, out, got, instead, ...) \
    GS_ALLOCATE_AS(false, bound, out, got, instead, __VA_ARGS__)

/* `is_managed`: the driver counts the memory for no process. */
#define GS_ALLOCATE_AS(is_managed, bound, out, got, instead, ...) \
    GS_CHANGES; \
    struct gs_charge charge; \
    CUresult result = gs_charge_try(&charge, bound); \
    charge.managed = is_managed; \
    if (result == CUDA_ERROR_OUT_OF_MEMORY) \
        return instead; \
    if (result != CUDA_SUCCESS) \
        return result; \
    GS_WITH_RECLAIM(result, charge.dev, charge.bytes, real(__VA_ARGS__)); \
    if (result == CUDA_ERROR_OUT_OF_MEMORY && !charge.passed && gs_virtual_has(charge.dev)) { \
        gs_charge_abort(&charge); \
        return instead; \
    } \
    if (result != CUDA_SUCCESS || !(out)) { \
        gs_charge_abort(&charge); \
        return result; \
    } \
    if ((result = charge_or_free(&charge, *(out), got)) != CUDA_SUCCESS) \
        *(out) = 0; \
    return result

static uint64_t product(uint64_t a, uint64_t b) {
    uint64_t bytes;
    return __builtin_mul_overflow(a, b, &bytes) ? UINT64_MAX : bytes;
}

GS_EXPORT CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize) {
    GS_NEED(real, cuMemAlloc_v2);
    GS_ALLOCATE(bytesize, dptr, bytesize, gs_virtual_alloc(dptr, bytesize, CU_MEM_ATTACH_GLOBAL),
                dptr, bytesize);
}

GS_EXPORT CUresult CUDAAPI cuMemAlloc(CUdeviceptr_v1 *dptr, unsigned int bytesize) {
    GS_NEED(real, cuMemAlloc);
    GS_ALLOCATE(bytesize, dptr, bytesize, count_and_refuse(), dptr, bytesize);
}

/* Allocate rows with the driver's pitch. */
static CUresult alloc_pitched(CUdeviceptr *out, size_t *pitch, size_t width, size_t height,
                              unsigned int element) {
    size_t row = gs_round_up(width, PITCH_ALIGN);
    if (!pitch || !width || !height || (element != 4 && element != 8 && element != 16))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = gs_virtual_alloc(out, product(row, height), CU_MEM_ATTACH_GLOBAL);
    if (result == CUDA_SUCCESS)
        *pitch = row;
    return result;
}

GS_EXPORT CUresult CUDAAPI cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t width,
                                              size_t height, unsigned int element) {
    GS_NEED(real, cuMemAllocPitch_v2);
    GS_ALLOCATE(product(gs_round_up(width, PITCH_ALIGN), height), dptr, product(*pPitch, height),
                alloc_pitched(dptr, pPitch, width, height, element), dptr, pPitch, width, height,
                element);
}

GS_EXPORT CUresult CUDAAPI cuMemAllocPitch(CUdeviceptr_v1 *dptr, unsigned int *pPitch,
                                           unsigned int width, unsigned int height,
                                           unsigned int element) {
    GS_NEED(real, cuMemAllocPitch);
    GS_ALLOCATE(product(gs_round_up(width, PITCH_ALIGN), height), dptr, product(*pPitch, height),
                count_and_refuse(), dptr, pPitch, width, height, element);
}

/* Charged in full, wherever its pages are, since any access may move them to the device. Memory
 * beyond the device part of the share stays on the host. */
GS_EXPORT CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize,
                                             unsigned int flags) {
    GS_NEED(real, cuMemAllocManaged);
    gs_does(GS_DOES_MANAGE);
    GS_ALLOCATE_AS(true, bytesize, dptr, bytesize, gs_virtual_alloc(dptr, bytesize, flags), dptr,
                   bytesize, flags);
}

GS_EXPORT CUresult CUDAAPI cuMemFree_v2(CUdeviceptr dptr) {
    GS_NEED(real, cuMemFree_v2);
    return GS_FREE(gs_memory, dptr, real(dptr));
}

GS_EXPORT CUresult CUDAAPI cuMemFree(CUdeviceptr_v1 dptr) {
    GS_NEED(real, cuMemFree);
    return GS_FREE(gs_memory, dptr, real(dptr));
}
