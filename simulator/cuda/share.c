/* Memory shared between processes: shareable handles (descriptors), IPC handles, pool pointers,
 * external memory. */
#include "pool.h"
#include "vmm.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define HANDLE_MAGIC 0x48504947u

/* The content of a CUipcMemHandle and a CUmemPoolPtrExportData. */
struct ipc_handle {
    uint32_t magic;
    uint32_t pid;
    uint64_t shared_id;
    uint64_t offset; /* of the pointer within the exported span */
    uint64_t bytes;
    uint8_t uuid[16];
};
_Static_assert(sizeof(struct ipc_handle) <= sizeof(CUipcMemHandle), "fits");
_Static_assert(sizeof(struct ipc_handle) <= sizeof(CUmemPoolPtrExportData), "fits");

EXPORT CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle,
                                             CUmemAllocationHandleType type,
                                             unsigned long long flags) {
    ENTER();
    struct physical *p = physical_of(handle);
    CHECK_VALUE(out && p && !flags);
    CHECK_VALUE(type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && p->fd >= 0);
    int fd = fcntl(p->fd, F_DUPFD_CLOEXEC, 3);
    CHECK(fd >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    p->shared = true;
    *(int *)out = fd;
    return CUDA_SUCCESS;
}

/* Finds the memory that a descriptor stands for (see vmm.c), and copies its entry. Returns its
 * device, -1 when there is none. */
static int find_described(int fd, struct sim_shared *copy) {
    uint64_t id;
    int d = described(fd, &id);
    if (d < 0 || join_device(d) != CUDA_SUCCESS)
        return -1;
    sim_lock(&sim.device[d].sim);
    struct sim_shared *m = sim_find_shared(&sim.device[d].sim, id);
    if (m)
        *copy = *m;
    sim_unlock(&sim.device[d].sim);
    return m ? d : -1;
}

EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle,
                                               void *os_handle, CUmemAllocationHandleType type) {
    ENTER();
    struct sim_shared shared;
    CHECK_VALUE(handle && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    int fd = (int)(intptr_t)os_handle;
    int device = find_described(fd, &shared);
    CHECK_VALUE(device >= 0);
    struct physical *p = physical_shared_as(shared.id);
    if (p) {
        p->refs++;
    } else {
        CUmemAllocationProp props = {
            .type = CU_MEM_ALLOCATION_TYPE_PINNED,
            .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
        CHECK_VALUE(sim_hold_shared(&sim.device[device].sim, shared.id) == SIM_OK);
        p = physical_open(device, shared.bytes, &props);
        CHECK(p, CUDA_ERROR_OUT_OF_MEMORY);
        p->shared = true;
        p->shared_id = shared.id;
        p->place = shared.offset;
        p->fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    }
    *handle = (CUmemGenericAllocationHandle)p;
    return CUDA_SUCCESS;
}

/* Moves the content of a span into the device file, where other processes can map it. */
static CUresult share_span(struct mem *m) {
    uint64_t offset;
    struct sim_device *d = &sim.device[m->device].sim;
    struct stat st;
    if (m->shared_id)
        return CUDA_SUCCESS;
    uint64_t id = sim_share(d, m->span, &offset);
    CHECK(id, CUDA_ERROR_OUT_OF_MEMORY);
    bool fits = !fstat(d->fd, &st) && ((uint64_t)st.st_size >= offset + m->span ||
                                       !ftruncate(d->fd, (off_t)(offset + m->span)));
    CHECK(fits, CUDA_ERROR_OPERATING_SYSTEM);
    for (uint64_t done = 0; done < m->touched;) {
        ssize_t n = pwrite(d->fd, (char *)m->va + done, m->touched - done, (off_t)(offset + done));
        CHECK(n > 0, CUDA_ERROR_OPERATING_SYSTEM);
        done += (uint64_t)n;
    }
    void *p = mmap((void *)m->va, m->span, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, d->fd,
                   (off_t)offset);
    CHECK(p != MAP_FAILED, CUDA_ERROR_MAP_FAILED);
    m->shared_id = id;
    return CUDA_SUCCESS;
}

static CUresult export_pointer(struct mem *m, uint64_t va, uint64_t bytes, struct ipc_handle *out) {
    CUresult result = share_span(m);
    if (result != CUDA_SUCCESS)
        return result;
    *out = (struct ipc_handle){.magic = HANDLE_MAGIC,
                               .pid = (uint32_t)getpid(),
                               .shared_id = m->shared_id,
                               .offset = va - m->va,
                               .bytes = bytes};
    memcpy(out->uuid, sim.device[m->device].sim.state->config.uuid, sizeof out->uuid);
    return CUDA_SUCCESS;
}

/* Maps memory that another process exported. A span that is already mapped gains a reference. */
static CUresult import_pointer(const struct ipc_handle *h, CUdeviceptr *va) {
    struct sim_shared shared = {0};
    int device = -1;
    CHECK_VALUE(h->magic == HANDLE_MAGIC);
    for (int d = 0; d < sim.n_devices; d++)
        if (memcmp(sim.device[d].sim.state->config.uuid, h->uuid, sizeof h->uuid) == 0)
            device = d;
    CHECK(device >= 0, CUDA_ERROR_INVALID_DEVICE);
    struct device *d = &sim.device[device];
    for (uint64_t b = 0; b < d->n_blocks; b++) {
        struct mem *m = d->head[b];
        if (!m || m->shared_id != h->shared_id)
            continue;
        CHECK(m->kind == MEM_FOREIGN, CUDA_ERROR_INVALID_CONTEXT); /* exported by this process */
        m->refs++;
        *va = m->va + h->offset;
        return CUDA_SUCCESS;
    }
    CHECK(sim_hold_shared(&d->sim, h->shared_id) == SIM_OK, CUDA_ERROR_INVALID_HANDLE);
    sim_lock(&d->sim);
    struct sim_shared *found = sim_find_shared(&d->sim, h->shared_id);
    if (found)
        shared = *found;
    sim_unlock(&d->sim);
    struct mem *m = found ? space_take(device, shared.bytes / SIM_BLOCK) : NULL;
    CHECK(m, CUDA_ERROR_OUT_OF_MEMORY);
    *m = (struct mem){.kind = MEM_FOREIGN,
                      .device = device,
                      .va = m->va,
                      .span = m->span,
                      .size = m->span,
                      .refs = 1,
                      .id = m->id,
                      .shared_id = h->shared_id};
    void *p = mmap((void *)m->va, m->span, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                   d->sim.fd, (off_t)shared.offset);
    CHECK(p != MAP_FAILED, CUDA_ERROR_MAP_FAILED);
    *va = m->va + h->offset;
    return CUDA_SUCCESS;
}

CUresult foreign_drop(uint64_t va) {
    struct mem *m = space_find(va);
    CHECK_VALUE(m && m->kind == MEM_FOREIGN && m->refs);
    if (--m->refs)
        return CUDA_SUCCESS;
    sim_drop_shared(&sim.device[m->device].sim, m->shared_id);
    space_give(m);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr dptr) {
    ENTER_CONTEXT(ctx);
    uint64_t start, size;
    struct mem *m;
    (void)ctx;
    CHECK_VALUE(handle && mem_range(dptr, &start, &size, &m));
    CHECK_VALUE(m->kind == MEM_DEVICE || m->kind == MEM_SMALL);
    memset(handle, 0, sizeof *handle);
    return export_pointer(m, start, size, (struct ipc_handle *)handle);
}

EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle,
                                      unsigned int flags) {
    ENTER_CONTEXT(ctx);
    (void)ctx;
    CHECK_VALUE(pdptr && flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    return import_pointer((const struct ipc_handle *)&handle, pdptr);
}

EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int flags) {
    return cuIpcOpenMemHandle_v2(pdptr, handle, flags);
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr dptr) {
    ENTER_CONTEXT(ctx);
    (void)ctx;
    return foreign_drop(dptr);
}

/* A pool's handle carries only what is needed to create the importing pool; memory is imported
 * by pointer. */
EXPORT CUresult cuMemPoolExportToShareableHandle(void *out, CUmemoryPool handle,
                                                 CUmemAllocationHandleType type,
                                                 unsigned long long flags) {
    ENTER();
    struct pool *p = pool_of(handle);
    CHECK_VALUE(out && p && !flags && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    CHECK_VALUE(p->props.handleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    bool one = costs_of(p->device)->one_descriptor;
    int fd = one ? describe(p->device, DESCRIBED_POOL) : memfd_create("sim-pool", MFD_CLOEXEC);
    CHECK(fd >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    const uint8_t *uuid = sim.device[p->device].sim.state->config.uuid;
    CHECK(one || pwrite(fd, uuid, 16, 0) == 16, CUDA_ERROR_OPERATING_SYSTEM);
    *(int *)out = fd;
    return CUDA_SUCCESS;
}

/* Returns the device of an exported pool, -1 if the descriptor stands for none. */
static CUdevice device_of_pool(int fd) {
    uint8_t uuid[16];
    uint64_t what;
    CUdevice device = described(fd, &what);
    if (device >= 0 && what == DESCRIBED_POOL)
        return device;
    if (pread(fd, uuid, sizeof uuid, 0) != (ssize_t)sizeof uuid)
        return -1;
    for (device = 0; device < sim.n_devices; device++)
        if (memcmp(sim.device[device].sim.state->config.uuid, uuid, sizeof uuid) == 0)
            break;
    return device;
}

EXPORT CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *out, void *os_handle,
                                                   CUmemAllocationHandleType type,
                                                   unsigned long long flags) {
    CHECK_VALUE(out && !flags && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    CUdevice device = device_of_pool((int)(intptr_t)os_handle);
    CHECK_VALUE(device >= 0);
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                            .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
    CUresult result = cuMemPoolCreate(out, &props);
    if (result == CUDA_SUCCESS)
        ((struct pool *)*out)->imported = true;
    return result;
}

EXPORT CUresult cuMemPoolExportPointer(CUmemPoolPtrExportData *out, CUdeviceptr ptr) {
    ENTER();
    uint64_t start, size;
    struct mem *m;
    CHECK_VALUE(out && mem_range(ptr, &start, &size, &m) && m->kind == MEM_POOL);
    CHECK_VALUE(((struct chunk *)m->owner)->pool->props.handleTypes);
    memset(out, 0, sizeof *out);
    m->touched = m->span;
    return export_pointer(m, start, size, (struct ipc_handle *)out);
}

EXPORT CUresult cuMemPoolImportPointer(CUdeviceptr *ptr, CUmemoryPool handle,
                                       CUmemPoolPtrExportData *data) {
    ENTER();
    struct pool *p = pool_of(handle);
    CHECK_VALUE(ptr && data && p && p->imported);
    return import_pointer((const struct ipc_handle *)data, ptr);
}

/* Memory of another API, for example Vulkan: not charged here. */
struct external {
    uint32_t magic;
    struct mem *mem;
    uint64_t bytes;
};

EXPORT CUresult cuImportExternalMemory(CUexternalMemory *out,
                                       const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc) {
    ENTER_CONTEXT(ctx);
    CHECK_VALUE(out && desc && desc->size &&
                desc->type == CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD);
    struct external *e = calloc(1, sizeof *e);
    CHECK(e, CUDA_ERROR_OUT_OF_MEMORY);
    *e = (struct external){.magic = OBJ_EXTMEM, .bytes = desc->size};
    e->mem = space_take(ctx->device, round_up(desc->size, SIM_BLOCK) / SIM_BLOCK);
    if (!e->mem)
        return free(e), CUDA_ERROR_OUT_OF_MEMORY;
    e->mem->kind = MEM_FOREIGN;
    e->mem->size = desc->size;
    mmap((void *)e->mem->va, desc->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
         desc->handle.fd, 0);
    close(desc->handle.fd); /* the import takes ownership */
    *out = (CUexternalMemory)e;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuExternalMemoryGetMappedBuffer(CUdeviceptr *ptr, CUexternalMemory handle,
                                                const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *desc) {
    ENTER_CONTEXT(ctx);
    (void)ctx;
    struct external *e = (struct external *)handle;
    CHECK_HANDLE(sim_is(e, OBJ_EXTMEM));
    CHECK_VALUE(ptr && desc && desc->offset <= e->bytes && desc->size <= e->bytes - desc->offset);
    *ptr = e->mem->va + desc->offset;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDestroyExternalMemory(CUexternalMemory handle) {
    ENTER_CONTEXT(ctx);
    (void)ctx;
    struct external *e = (struct external *)handle;
    CHECK_HANDLE(sim_is(e, OBJ_EXTMEM));
    e->mem->touched = 0;
    e->mem->shared_id = UINT64_MAX; /* return the addresses as private memory */
    space_give(e->mem);
    e->magic = 0;
    free(e);
    return CUDA_SUCCESS;
}
