/* Copies between host, device and arrays. Each becomes a `struct copy` of host-addressable
 * boxes. */
#include "array.h"
#include "work.h"

#include <string.h>

/* False unless all of [va, va + bytes) is accessible, as device memory or as host memory. */
static bool is_device_box(uint64_t va, uint64_t bytes) {
    uint64_t start, size;
    struct mem *m = NULL;
    int device;
    if (mem_range(va, &start, &size, &m)) {
        uint64_t end = va + bytes;
        if (end > m->va + m->touched && end <= m->va + m->span)
            m->touched = end - m->va;
        return va - start + bytes <=
               (m->kind == MEM_SMALL || m->kind == MEM_POOL ? round_up(size, SIM_UNIT) : size);
    }
    if (vmm_range(va, &start, &size, &device)) {
        while (va - start + bytes > size) { /* a copy may span several mappings */
            uint64_t more, length;
            if (!vmm_range(start + size, &more, &length, &device))
                return false;
            size += length;
        }
        return true;
    }
    return host_range(va, &start, &size) && va - start + bytes <= size;
}

static bool may_be_host(uint64_t va) {
    return va && !space_has(va);
}

static uint64_t box_bytes(size_t width, size_t height, size_t depth, size_t pitch, size_t slice) {
    return (depth - 1) * slice + (height - 1) * pitch + width;
}

enum side { HOST, DEVICE, ANY };

static bool is_side(enum side side, uint64_t va, uint64_t bytes) {
    if (side == HOST)
        return va && (may_be_host(va) || is_device_box(va, bytes));
    return is_device_box(va, bytes) || (side == ANY && may_be_host(va));
}

/* A pageable copy has read the host memory when the call returns, so treat it as synchronous. */
static CUresult copy_flat(uint64_t dst, enum side to, uint64_t src, enum side from, size_t n,
                          CUstream stream, bool synchronous) {
    int entered = 0;
    CUresult result = sim_enter();
    if (result != CUDA_SUCCESS)
        return result;
    entered = 1;
    result = !current_context()                               ? CUDA_ERROR_INVALID_CONTEXT
             : n == 0                                         ? CUDA_SUCCESS
             : !is_side(to, dst, n) || !is_side(from, src, n) ? CUDA_ERROR_INVALID_VALUE
                                                              : CUDA_SUCCESS;
    sim_leave(&entered);
    if (result != CUDA_SUCCESS || n == 0)
        return result;
    struct work work = {.kind = WORK_COPY,
                        .duration_ns = copy_duration_ns(n),
                        .copy = {dst, src, n, 1, 1, n, n, n, n},
                        .copy_params = {.srcMemoryType = CU_MEMORYTYPE_UNIFIED,
                                        .srcDevice = src,
                                        .dstMemoryType = CU_MEMORYTYPE_UNIFIED,
                                        .dstDevice = dst,
                                        .WidthInBytes = n,
                                        .Height = 1,
                                        .Depth = 1}};
    return dispatch(stream, &work, synchronous);
}

EXPORT CUresult cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t n) {
    return copy_flat(dst, ANY, src, ANY, n, NULL, true);
}
EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr dst, const void *src, size_t n) {
    return copy_flat(dst, DEVICE, (uint64_t)src, HOST, n, NULL, true);
}
EXPORT CUresult cuMemcpyDtoH_v2(void *dst, CUdeviceptr src, size_t n) {
    return copy_flat((uint64_t)dst, HOST, src, DEVICE, n, NULL, true);
}
EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr dst, CUdeviceptr src, size_t n) {
    return copy_flat(dst, DEVICE, src, DEVICE, n, NULL, true);
}
EXPORT CUresult cuMemcpyPeer(CUdeviceptr dst, CUcontext a, CUdeviceptr src, CUcontext b, size_t n) {
    (void)a;
    (void)b;
    return copy_flat(dst, DEVICE, src, DEVICE, n, NULL, true);
}
EXPORT CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream s) {
    return copy_flat(dst, ANY, src, ANY, n, s, false);
}
EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t n, CUstream s) {
    return copy_flat(dst, DEVICE, (uint64_t)src, HOST, n, s, false);
}
EXPORT CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t n, CUstream s) {
    return copy_flat((uint64_t)dst, HOST, src, DEVICE, n, s, false);
}
EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream s) {
    return copy_flat(dst, DEVICE, src, DEVICE, n, s, false);
}
EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext a, CUdeviceptr src, CUcontext b,
                                  size_t n, CUstream s) {
    (void)a;
    (void)b;
    return copy_flat(dst, DEVICE, src, DEVICE, n, s, false);
}

struct box {
    uint64_t base;
    size_t pitch, slice;
    bool array;
};

/* Fills one end of a 3D copy. False when the description is invalid. */
static bool end_of(CUmemorytype type, const void *host, CUdeviceptr device, CUarray array,
                   size_t pitch, size_t height, size_t x, size_t y, size_t z,
                   const CUDA_MEMCPY3D *p, struct box *box) {
    size_t rows = height ? height : p->Height;
    *box = (struct box){.pitch = pitch ? pitch : p->WidthInBytes};
    box->slice = box->pitch * rows;
    switch (type) {
    case CU_MEMORYTYPE_HOST:
        box->base = (uint64_t)host;
        break;
    case CU_MEMORYTYPE_DEVICE:
        box->base = device;
        break;
    case CU_MEMORYTYPE_UNIFIED:
        box->base = device;
        break;
    case CU_MEMORYTYPE_ARRAY: {
        struct array *a = (struct array *)array;
        if (!sim_is(a, OBJ_ARRAY))
            return false;
        *box = (struct box){
            .base = a->va, .pitch = a->pitch, .slice = a->pitch * a->rows, .array = true};
        if (x + p->WidthInBytes > a->pitch || y + p->Height > a->rows || z + p->Depth > a->layers)
            return false;
        a->mem->touched = a->mem->span;
        break;
    }
    default:
        return false;
    }
    if (!box->base || box->pitch < p->WidthInBytes)
        return false;
    box->base += x + y * box->pitch + z * box->slice;
    uint64_t bytes = box_bytes(p->WidthInBytes, p->Height, p->Depth, box->pitch, box->slice);
    enum side side = type == CU_MEMORYTYPE_HOST     ? HOST
                     : type == CU_MEMORYTYPE_DEVICE ? DEVICE
                                                    : ANY;
    return box->array || is_side(side, box->base, bytes);
}

/* Fills the work of a 3D copy; INVALID_VALUE when the description is invalid. Call locked. */
CUresult copy_work(const CUDA_MEMCPY3D *p, struct work *work) {
    struct box src, dst;
    CHECK_VALUE(p->Height && p->Depth);
    if (!p->WidthInBytes) {
        *work = (struct work){.kind = WORK_EMPTY};
        return CUDA_SUCCESS;
    }
    CHECK_VALUE(end_of(p->srcMemoryType, p->srcHost, p->srcDevice, p->srcArray, p->srcPitch,
                       p->srcHeight, p->srcXInBytes, p->srcY, p->srcZ, p, &src));
    CHECK_VALUE(end_of(p->dstMemoryType, p->dstHost, p->dstDevice, p->dstArray, p->dstPitch,
                       p->dstHeight, p->dstXInBytes, p->dstY, p->dstZ, p, &dst));
    *work = (struct work){.kind = WORK_COPY,
                          .duration_ns = copy_duration_ns(p->WidthInBytes * p->Height * p->Depth),
                          .copy = {dst.base, src.base, p->WidthInBytes, p->Height, p->Depth,
                                   dst.pitch, dst.slice, src.pitch, src.slice},
                          .copy_params = *p};
    return CUDA_SUCCESS;
}

static CUresult copy_box(const CUDA_MEMCPY3D *p, CUstream stream, bool synchronous) {
    struct work work;
    int entered = 0;
    CUresult result = sim_enter();
    if (result != CUDA_SUCCESS)
        return result;
    entered = 1;
    result = current_context() ? copy_work(p, &work) : CUDA_ERROR_INVALID_CONTEXT;
    sim_leave(&entered);
    return result == CUDA_SUCCESS ? dispatch(stream, &work, synchronous) : result;
}

static CUDA_MEMCPY3D from_2d(const CUDA_MEMCPY2D *p) {
    return (CUDA_MEMCPY3D){.srcXInBytes = p->srcXInBytes,
                           .srcY = p->srcY,
                           .srcMemoryType = p->srcMemoryType,
                           .srcHost = p->srcHost,
                           .srcDevice = p->srcDevice,
                           .srcArray = p->srcArray,
                           .srcPitch = p->srcPitch,
                           .dstXInBytes = p->dstXInBytes,
                           .dstY = p->dstY,
                           .dstMemoryType = p->dstMemoryType,
                           .dstHost = p->dstHost,
                           .dstDevice = p->dstDevice,
                           .dstArray = p->dstArray,
                           .dstPitch = p->dstPitch,
                           .WidthInBytes = p->WidthInBytes,
                           .Height = p->Height,
                           .Depth = 1};
}

static CUresult copy_2d(const CUDA_MEMCPY2D *p, CUstream stream, bool synchronous) {
    CHECK_VALUE(p);
    CUDA_MEMCPY3D box = from_2d(p);
    return copy_box(&box, stream, synchronous);
}

EXPORT CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D *p) {
    return copy_2d(p, NULL, true);
}
EXPORT CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *p) {
    return copy_2d(p, NULL, true);
}
EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *p, CUstream hStream) {
    return copy_2d(p, hStream, false);
}
EXPORT CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D *p) {
    CHECK_VALUE(p);
    return copy_box(p, NULL, true);
}
EXPORT CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *p, CUstream hStream) {
    CHECK_VALUE(p);
    return copy_box(p, hStream, false);
}

/* The peer functions have a context where the plain ones have a reserved pointer. */
_Static_assert(sizeof(CUDA_MEMCPY3D_PEER) == sizeof(CUDA_MEMCPY3D), "same shape");

EXPORT CUresult cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER *p) {
    CUDA_MEMCPY3D box;
    CHECK_VALUE(p);
    memcpy(&box, p, sizeof box);
    return copy_box(&box, NULL, true);
}
EXPORT CUresult cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER *p, CUstream hStream) {
    CUDA_MEMCPY3D box;
    CHECK_VALUE(p);
    memcpy(&box, p, sizeof box);
    return copy_box(&box, hStream, false);
}

/* Copies a row between an array and flat memory or another array. */
static CUresult copy_row(CUDA_MEMCPY3D box, size_t n, CUstream stream, bool synchronous) {
    box.WidthInBytes = n;
    box.Height = box.Depth = 1;
    return n ? copy_box(&box, stream, synchronous) : CUDA_SUCCESS;
}
#define FROM_ARRAY(a, o) .srcMemoryType = CU_MEMORYTYPE_ARRAY, .srcArray = (a), .srcXInBytes = (o)
#define TO_ARRAY(a, o) .dstMemoryType = CU_MEMORYTYPE_ARRAY, .dstArray = (a), .dstXInBytes = (o)
#define FROM_HOST(p) .srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = (p)
#define TO_HOST(p) .dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = (p)
#define FROM_DEVICE(p) .srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = (p)
#define TO_DEVICE(p) .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = (p)

EXPORT CUresult cuMemcpyAtoA_v2(CUarray d, size_t od, CUarray s, size_t os, size_t n) {
    return copy_row((CUDA_MEMCPY3D){TO_ARRAY(d, od), FROM_ARRAY(s, os)}, n, NULL, true);
}
EXPORT CUresult cuMemcpyAtoD_v2(CUdeviceptr d, CUarray s, size_t os, size_t n) {
    return copy_row((CUDA_MEMCPY3D){TO_DEVICE(d), FROM_ARRAY(s, os)}, n, NULL, true);
}
EXPORT CUresult cuMemcpyDtoA_v2(CUarray d, size_t od, CUdeviceptr s, size_t n) {
    return copy_row((CUDA_MEMCPY3D){TO_ARRAY(d, od), FROM_DEVICE(s)}, n, NULL, true);
}
EXPORT CUresult cuMemcpyAtoH_v2(void *d, CUarray s, size_t os, size_t n) {
    return copy_row((CUDA_MEMCPY3D){TO_HOST(d), FROM_ARRAY(s, os)}, n, NULL, true);
}
EXPORT CUresult cuMemcpyHtoA_v2(CUarray d, size_t od, const void *s, size_t n) {
    return copy_row((CUDA_MEMCPY3D){TO_ARRAY(d, od), FROM_HOST(s)}, n, NULL, true);
}
EXPORT CUresult cuMemcpyAtoHAsync_v2(void *d, CUarray s, size_t os, size_t n, CUstream hStream) {
    return copy_row((CUDA_MEMCPY3D){TO_HOST(d), FROM_ARRAY(s, os)}, n, hStream, false);
}
EXPORT CUresult cuMemcpyHtoAAsync_v2(CUarray d, size_t od, const void *s, size_t n,
                                     CUstream hStream) {
    return copy_row((CUDA_MEMCPY3D){TO_ARRAY(d, od), FROM_HOST(s)}, n, hStream, false);
}

/* Fills the work of a memset. Call locked. */
CUresult set_work(const CUDA_MEMSET_NODE_PARAMS *p, struct work *work) {
    unsigned n = p->elementSize;
    CHECK_VALUE(n == 1 || n == 2 || n == 4);
    size_t pitch = p->height > 1 ? p->pitch : p->width * n;
    CHECK_VALUE(p->dst % n == 0 && (p->height <= 1 || pitch >= p->width * n));
    if (!p->width || !p->height) {
        *work = (struct work){.kind = WORK_EMPTY};
        return CUDA_SUCCESS;
    }
    CHECK_VALUE(is_device_box(p->dst, box_bytes(p->width * n, p->height, 1, pitch, 0)));
    *work = (struct work){.kind = WORK_SET,
                          .duration_ns = copy_duration_ns(p->width * n * p->height / 8),
                          .set = {p->dst, pitch, p->width, p->height, p->value, n},
                          .set_params = *p};
    return CUDA_SUCCESS;
}

static CUresult set_memory(CUdeviceptr dst, size_t pitch, unsigned value, unsigned element,
                           size_t width, size_t height, CUstream stream) {
    struct work work;
    CUDA_MEMSET_NODE_PARAMS p = {.dst = dst,
                                 .pitch = pitch,
                                 .value = value,
                                 .elementSize = element,
                                 .width = width,
                                 .height = height};
    int entered = 0;
    CUresult result = sim_enter();
    if (result != CUDA_SUCCESS)
        return result;
    entered = 1;
    result = current_context() ? set_work(&p, &work) : CUDA_ERROR_INVALID_CONTEXT;
    sim_leave(&entered);
    return result == CUDA_SUCCESS ? dispatch(stream, &work, false) : result;
}

#define SET_FUNCTIONS(bits, type) \
    EXPORT CUresult cuMemsetD##bits##_v2(CUdeviceptr d, type v, size_t n) { \
        return set_memory(d, 0, v, bits / 8, n, 1, NULL); \
    } \
    EXPORT CUresult cuMemsetD##bits##Async(CUdeviceptr d, type v, size_t n, CUstream hStream) { \
        return set_memory(d, 0, v, bits / 8, n, 1, hStream); \
    } \
    EXPORT CUresult cuMemsetD2D##bits##_v2(CUdeviceptr d, size_t p, type v, size_t w, size_t h) { \
        return set_memory(d, p, v, bits / 8, w, h, NULL); \
    } \
    EXPORT CUresult cuMemsetD2D##bits##Async(CUdeviceptr d, size_t p, type v, size_t w, size_t h, \
                                             CUstream hStream) { \
        return set_memory(d, p, v, bits / 8, w, h, hStream); \
    }
SET_FUNCTIONS(8, unsigned char)
SET_FUNCTIONS(16, unsigned short)
SET_FUNCTIONS(32, unsigned int)
