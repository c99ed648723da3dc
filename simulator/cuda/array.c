/* Arrays and mipmapped arrays. Each occupies whole blocks. */
#include "array.h"

#include <stdlib.h>
#include <string.h>

#define MAX_LEVELS 20u
#define MAX_DIMENSION 131072u

struct mipmap {
    uint32_t magic;
    struct mem *mem;
    unsigned levels;
    struct array level[MAX_LEVELS];
};

unsigned array_element_bytes(CUarray_format format, unsigned channels) {
    unsigned bytes = 0;
    switch ((int)format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
        bytes = 1;
        break;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
        bytes = 2;
        break;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
        bytes = 4;
        break;
    default:
        return 0;
    }
    return channels == 1 || channels == 2 || channels == 4 ? bytes * channels : 0;
}

static size_t at_least_one(size_t n) {
    return n ? n : 1;
}

/* Fills the shape of one level. Returns its bytes, or 0 when the description is invalid. */
static uint64_t lay_out(struct array *a, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned level) {
    unsigned element = array_element_bytes(d->Format, d->NumChannels);
    bool layered = d->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP);
    if (!element || !d->Width || d->Width > MAX_DIMENSION || d->Height > MAX_DIMENSION ||
        d->Depth > MAX_DIMENSION)
        return 0;
    *a = (struct array){.magic = OBJ_ARRAY, .shape = *d};
    a->shape.Width = at_least_one(d->Width >> level);
    a->shape.Height = d->Height ? at_least_one(d->Height >> level) : 0;
    a->shape.Depth = d->Depth && !layered ? at_least_one(d->Depth >> level) : d->Depth;
    a->pitch = a->shape.Width * element;
    a->rows = at_least_one(a->shape.Height);
    a->layers = at_least_one(a->shape.Depth);
    return a->pitch * a->rows * a->layers;
}

static CUresult create(struct context *ctx, CUarray *handle, const CUDA_ARRAY3D_DESCRIPTOR *d) {
    struct array shape;
    CUresult error;
    CHECK_VALUE(handle && d);
    uint64_t bytes = lay_out(&shape, d, 0);
    CHECK_VALUE(bytes);
    struct array *a = malloc(sizeof *a);
    CHECK(a, CUDA_ERROR_OUT_OF_MEMORY);
    *a = shape;
    a->mem = mem_take(ctx, ctx->device, bytes, MEM_ARRAY, &error);
    if (!a->mem)
        return free(a), error;
    a->mem->owner = a;
    a->va = a->mem->va;
    a->ctx = ctx;
    a->context_id = ctx->id;
    *handle = (CUarray)a;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuArray3DCreate_v2(CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *d) {
    ENTER_CONTEXT(ctx);
    return create(ctx, pHandle, d);
}

EXPORT CUresult cuArrayCreate_v2(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR *d) {
    CHECK_VALUE(d);
    CUDA_ARRAY3D_DESCRIPTOR full = {
        .Width = d->Width, .Height = d->Height, .Format = d->Format, .NumChannels = d->NumChannels};
    return cuArray3DCreate_v2(pHandle, &full);
}

EXPORT CUresult cuArrayCreate(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR_v1 *d) {
    CHECK_VALUE(d);
    CUDA_ARRAY3D_DESCRIPTOR full = {
        .Width = d->Width, .Height = d->Height, .Format = d->Format, .NumChannels = d->NumChannels};
    return cuArray3DCreate_v2(pHandle, &full);
}

EXPORT CUresult cuArray3DCreate(CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR_v1 *d) {
    CHECK_VALUE(d);
    CUDA_ARRAY3D_DESCRIPTOR full = {.Width = d->Width,
                                    .Height = d->Height,
                                    .Depth = d->Depth,
                                    .Format = d->Format,
                                    .NumChannels = d->NumChannels,
                                    .Flags = d->Flags};
    return cuArray3DCreate_v2(pHandle, &full);
}

EXPORT CUresult cuArrayDestroy(CUarray hArray) {
    ENTER_CONTEXT(ctx);
    struct array *a = (struct array *)hArray;
    CHECK_HANDLE(sim_is(a, OBJ_ARRAY) && !a->mipmap);
    engine_wait_context(ctx);
    mem_give(a->mem);
    a->magic = 0;
    free(a);
    return CUDA_SUCCESS;
}

#define ENTER_ARRAY(a, handle) \
    ENTER_CONTEXT(ctx); \
    (void)ctx; \
    struct array *a = (struct array *)(handle); \
    CHECK_HANDLE(sim_is(a, OBJ_ARRAY))

EXPORT CUresult cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *d, CUarray hArray) {
    ENTER_ARRAY(a, hArray);
    CHECK_VALUE(d);
    *d = a->shape;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *d, CUarray hArray) {
    ENTER_ARRAY(a, hArray);
    CHECK_VALUE(d);
    *d = (CUDA_ARRAY_DESCRIPTOR){.Width = a->shape.Width,
                                 .Height = a->shape.Height,
                                 .Format = a->shape.Format,
                                 .NumChannels = a->shape.NumChannels};
    return CUDA_SUCCESS;
}

EXPORT CUresult cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *need, CUarray hArray,
                                             CUdevice device) {
    ENTER_ARRAY(a, hArray);
    CHECK_DEVICE(device);
    CHECK_VALUE(need);
    *need = (CUDA_ARRAY_MEMORY_REQUIREMENTS){.size = a->mem->span, .alignment = SIM_BLOCK};
    return CUDA_SUCCESS;
}

EXPORT CUresult cuArrayGetPlane(CUarray *plane, CUarray hArray, unsigned int index) {
    ENTER_ARRAY(a, hArray);
    (void)a;
    (void)index;
    CHECK_VALUE(plane);
    return CUDA_ERROR_INVALID_VALUE; /* planar formats are not simulated */
}

EXPORT CUresult cuMipmappedArrayCreate(CUmipmappedArray *handle, const CUDA_ARRAY3D_DESCRIPTOR *d,
                                       unsigned int levels) {
    ENTER_CONTEXT(ctx);
    CUresult error;
    uint64_t bytes = 0, offset[MAX_LEVELS];
    CHECK_VALUE(handle && d && levels);
    struct mipmap *m = calloc(1, sizeof *m);
    CHECK(m, CUDA_ERROR_OUT_OF_MEMORY);
    size_t longest = d->Width > d->Height ? d->Width : d->Height;
    for (m->levels = 0; m->levels < levels && m->levels < MAX_LEVELS && longest >> m->levels;
         m->levels++) {
        uint64_t size = lay_out(&m->level[m->levels], d, m->levels);
        if (!size)
            return free(m), CUDA_ERROR_INVALID_VALUE;
        offset[m->levels] = bytes;
        bytes += round_up(size, SIM_UNIT);
    }
    if (!bytes)
        return free(m), CUDA_ERROR_INVALID_VALUE;
    m->mem = mem_take(ctx, ctx->device, bytes, MEM_ARRAY, &error);
    if (!m->mem)
        return free(m), error;
    for (unsigned i = 0; i < m->levels; i++) {
        m->level[i].mem = m->mem;
        m->level[i].va = m->mem->va + offset[i];
        m->level[i].mipmap = m;
    }
    m->magic = OBJ_MIPMAP;
    m->mem->owner = m;
    *handle = (CUmipmappedArray)m;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMipmappedArrayGetLevel(CUarray *level, CUmipmappedArray handle,
                                         unsigned int index) {
    ENTER_CONTEXT(ctx);
    (void)ctx;
    struct mipmap *m = (struct mipmap *)handle;
    CHECK_HANDLE(sim_is(m, OBJ_MIPMAP));
    CHECK_VALUE(level && index < m->levels);
    *level = (CUarray)&m->level[index];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMipmappedArrayDestroy(CUmipmappedArray handle) {
    ENTER_CONTEXT(ctx);
    struct mipmap *m = (struct mipmap *)handle;
    CHECK_HANDLE(sim_is(m, OBJ_MIPMAP));
    engine_wait_context(ctx);
    mem_give(m->mem);
    memset(m, 0, sizeof *m);
    free(m);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *need,
                                                      CUmipmappedArray handle, CUdevice device) {
    ENTER_CONTEXT(ctx);
    (void)ctx;
    struct mipmap *m = (struct mipmap *)handle;
    CHECK_HANDLE(sim_is(m, OBJ_MIPMAP));
    CHECK_DEVICE(device);
    CHECK_VALUE(need);
    *need = (CUDA_ARRAY_MEMORY_REQUIREMENTS){.size = m->mem->span, .alignment = SIM_BLOCK};
    return CUDA_SUCCESS;
}
