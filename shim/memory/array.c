/* CUDA arrays and mipmapped arrays. They have no address. The charge is the size that the driver
 * reports (cuArrayGetMemoryRequirements); without a report it is an upper bound computed from the
 * shape. */
#include "memory.h"

#define ROW_ALIGN 512u

/* Bytes of one channel; for formats with several samples per element, bytes of all of them. */
static uint64_t format_bytes(CUarray_format format) {
    switch ((int)format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
    case CU_AD_FORMAT_UNORM_INT8X1:
    case CU_AD_FORMAT_SNORM_INT8X1:
        return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
    case CU_AD_FORMAT_UNORM_INT8X2:
    case CU_AD_FORMAT_SNORM_INT8X2:
    case CU_AD_FORMAT_UNORM_INT16X1:
    case CU_AD_FORMAT_SNORM_INT16X1:
    case CU_AD_FORMAT_NV12:
        return 2;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
        return 4;
    default:
        return 16; /* the largest element that any format has */
    }
}

static uint64_t product(uint64_t a, uint64_t b) {
    uint64_t bytes;
    return __builtin_mul_overflow(a, b, &bytes) ? UINT64_MAX : bytes;
}

/* With mipmaps each level is at most half of the one above, so all together at most twice. */
static uint64_t bound_of_shape(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels) {
    if (!d || d->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING))
        return 0; /* physical memory comes later, from cuMemCreate */
    uint64_t bytes =
        gs_round_up(product(product(format_bytes(d->Format), d->NumChannels), d->Width), ROW_ALIGN);
    bytes = product(product(bytes, d->Height ? d->Height : 1), d->Depth ? d->Depth : 1);
    return levels > 1 ? product(bytes, 2) : bytes;
}

static CUDA_ARRAY3D_DESCRIPTOR shape_of(size_t width, size_t height, size_t depth,
                                        CUarray_format format, unsigned int channels,
                                        unsigned int flags) {
    return (CUDA_ARRAY3D_DESCRIPTOR){width, height, depth, format, channels, flags};
}

/* Return the size that the driver reports, else the reserved bound. */
static uint64_t reported_bytes(const struct gs_charge *charge, CUarray array,
                               CUmipmappedArray mipmap) {
    __typeof__(&cuArrayGetMemoryRequirements) of_array = GS_REAL(cuArrayGetMemoryRequirements);
    __typeof__(&cuMipmappedArrayGetMemoryRequirements) of_mipmap =
        GS_REAL(cuMipmappedArrayGetMemoryRequirements);
    CUDA_ARRAY_MEMORY_REQUIREMENTS need = {0};
    struct gs_here here;
    CUresult result = CUDA_ERROR_NOT_SUPPORTED;
    if (!charge->bytes || !gs_here(&here))
        return charge->bytes;
    if (array && of_array)
        result = of_array(&need, array, here.device);
    else if (mipmap && of_mipmap)
        result = of_mipmap(&need, mipmap, here.device);
    return result == CUDA_SUCCESS && need.size ? need.size : charge->bytes;
}

static void destroy_array(CUarray array, CUmipmappedArray mipmap) {
    if (array)
        GS_REAL(cuArrayDestroy)(array);
    else
        GS_REAL(cuMipmappedArrayDestroy)(mipmap);
}

#define GS_CREATE(shape, levels, array, mipmap, handle, ...) \
    GS_CHANGES; \
    struct gs_charge charge; \
    CUresult result = gs_charge_begin(&charge, bound_of_shape(shape, levels)); \
    if (result != CUDA_SUCCESS) \
        return result; \
    GS_WITH_RECLAIM(result, charge.dev, charge.bytes, real(__VA_ARGS__)); \
    if (result != CUDA_SUCCESS || !(handle)) { \
        gs_charge_abort(&charge); \
        return result; \
    } \
    result = gs_charge_object(&charge, &gs_objects, (uint64_t)(uintptr_t) * (handle), \
                              reported_bytes(&charge, array, mipmap)); \
    if (result != CUDA_SUCCESS) \
        destroy_array(array, mipmap); \
    return result

GS_EXPORT CUresult CUDAAPI cuArrayCreate_v2(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR *d) {
    GS_NEED(real, cuArrayCreate_v2);
    CUDA_ARRAY3D_DESCRIPTOR shape = {0};
    if (d)
        shape = shape_of(d->Width, d->Height, 0, d->Format, d->NumChannels, 0);
    GS_CREATE(&shape, 1, *pHandle, NULL, pHandle, pHandle, d);
}

GS_EXPORT CUresult CUDAAPI cuArrayCreate(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR_v1 *d) {
    GS_NEED(real, cuArrayCreate);
    CUDA_ARRAY3D_DESCRIPTOR shape = {0};
    if (d)
        shape = shape_of(d->Width, d->Height, 0, d->Format, d->NumChannels, 0);
    GS_CREATE(&shape, 1, *pHandle, NULL, pHandle, pHandle, d);
}

GS_EXPORT CUresult CUDAAPI cuArray3DCreate_v2(CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *d) {
    GS_NEED(real, cuArray3DCreate_v2);
    GS_CREATE(d, 1, *pHandle, NULL, pHandle, pHandle, d);
}

GS_EXPORT CUresult CUDAAPI cuArray3DCreate(CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR_v1 *d) {
    GS_NEED(real, cuArray3DCreate);
    CUDA_ARRAY3D_DESCRIPTOR shape = {0};
    if (d)
        shape = shape_of(d->Width, d->Height, d->Depth, d->Format, d->NumChannels, d->Flags);
    GS_CREATE(&shape, 1, *pHandle, NULL, pHandle, pHandle, d);
}

GS_EXPORT CUresult CUDAAPI cuMipmappedArrayCreate(CUmipmappedArray *pHandle,
                                                  const CUDA_ARRAY3D_DESCRIPTOR *d,
                                                  unsigned int levels) {
    GS_NEED(real, cuMipmappedArrayCreate);
    GS_CREATE(d, levels, NULL, *pHandle, pHandle, pHandle, d, levels);
}

GS_EXPORT CUresult CUDAAPI cuArrayDestroy(CUarray hArray) {
    GS_NEED(real, cuArrayDestroy);
    return GS_FREE(gs_objects, (uintptr_t)hArray, real(hArray));
}

GS_EXPORT CUresult CUDAAPI cuMipmappedArrayDestroy(CUmipmappedArray hMipmappedArray) {
    GS_NEED(real, cuMipmappedArrayDestroy);
    return GS_FREE(gs_objects, (uintptr_t)hMipmappedArray, real(hMipmappedArray));
}
