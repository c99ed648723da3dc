/* Queries about addresses: which memory an address belongs to. */
#include "sim.h"

struct facts {
    uint64_t start, size, id;
    int device; /* -1: host memory */
    bool managed, vmm, pool, mapped;
    struct context *ctx;
};

static bool look_up(uint64_t va, struct facts *f) {
    struct mem *m = NULL;
    *f = (struct facts){.device = -1, .mapped = true};
    if (mem_range(va, &f->start, &f->size, &m)) {
        f->device = m->device;
        f->managed = m->kind == MEM_MANAGED;
        f->pool = m->kind == MEM_POOL;
        f->id = m->id << 32 | ((f->start - m->va) / SIM_UNIT);
        f->ctx = m->ctx;
        return true;
    }
    if (vmm_range(va, &f->start, &f->size, &f->device)) {
        f->vmm = true;
        f->id = f->start;
        return true;
    }
    f->id = va;
    return host_range(va, &f->start, &f->size);
}

static CUresult answer(void *data, CUpointer_attribute attribute, uint64_t va,
                       const struct facts *f) {
    bool known = f->size != 0;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        CHECK_VALUE(known);
        *(CUcontext *)data = (CUcontext)f->ctx;
        break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        CHECK_VALUE(known);
        *(unsigned *)data = f->device >= 0 ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        CHECK_VALUE(known);
        *(CUdeviceptr *)data = va;
        break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        CHECK_VALUE(known && (f->device < 0 || f->managed));
        *(void **)data = (void *)va;
        break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        CHECK_VALUE(known);
        *(unsigned long long *)data = f->id;
        break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned *)data = f->managed;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = known ? (f->device < 0 ? 0 : f->device) : -2;
        break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(unsigned *)data = known && f->device >= 0 && !f->vmm && !f->pool && !f->managed;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)data = f->start;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)data = f->size;
        break;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        *(unsigned *)data = known;
        break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        *(unsigned long long *)data = 0;
        break;
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
        *(unsigned *)data = 0;
        break;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
        *(unsigned *)data = known ? 3 : 0;
        break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        *(CUmemoryPool *)data = NULL;
        break;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        *(unsigned *)data = 0;
        break;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr) {
    ENTER();
    struct facts f;
    CHECK_VALUE(data);
    CHECK_VALUE(look_up(ptr, &f));
    return answer(data, attribute, ptr, &f);
}

/* An unknown address is not an error in this function; the attributes report it. */
EXPORT CUresult cuPointerGetAttributes(unsigned int n, CUpointer_attribute *attributes, void **data,
                                       CUdeviceptr ptr) {
    ENTER();
    struct facts f;
    CHECK_VALUE(n && attributes && data);
    if (!look_up(ptr, &f))
        f.size = 0;
    for (unsigned i = 0; i < n; i++) {
        CHECK_VALUE(data[i]);
        if (answer(data[i], attributes[i], ptr, &f) != CUDA_SUCCESS)
            *(unsigned *)data[i] = 0;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute,
                                      CUdeviceptr ptr) {
    ENTER();
    struct mem *m = space_find(ptr);
    CHECK_VALUE(value && attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS && m);
    m->sync_memops = *(const unsigned *)value != 0;
    return CUDA_SUCCESS;
}
