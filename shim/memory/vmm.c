/* Virtual memory management: physical memory exists until every reference and every mapping of it
 * is gone, so a record counts both. These calls are rare and need many look-ups, so one lock
 * protects the records. It is never held during a call to the driver. */
#include <stdlib.h>

#include "vmm.h"

struct physical {
    uint64_t bytes;
    int dev;
    uint32_t uses; /* handles not released + mappings + bindings */
    uint32_t refs; /* handles only; 0 = the driver may reuse the handle for other memory */
    int row;       /* in core/exports.c; -1: none */
    uint64_t id;   /* of exported or imported memory; 0: none yet */
    bool exported; /* without a row it stays charged */
    bool foreign;  /* memory of another process */
    bool moved;    /* to the host, from the device `asked` (vmm_host.c) */
    CUdevice asked;
};

/* A mapping, a sparse tile, or a binding to a multicast object or logical endpoint: a use of memory
 * without a handle of its own. */
struct use {
    uint64_t space; /* 0 = addresses; else a sparse array, multicast object or logical endpoint */
    uint64_t from, bytes;
    struct physical *memory;
    struct use *next;
};

#define BUCKETS 1024u
static struct gs_map handles; /* handle -> extra = struct physical */
static struct use *uses[BUCKETS];

static void lock(void) {
    gs_lock(&gs_self()->lock_vmm);
}

static void unlock(void) {
    gs_unlock(&gs_self()->lock_vmm);
}

static struct physical *find_record(CUmemGenericAllocationHandle handle) {
    struct gs_entry entry;
    return gs_map_get(&handles, handle, &entry) ? (struct physical *)(uintptr_t)entry.extra : NULL;
}

static void put_use(struct physical *memory) {
    if (--memory->uses)
        return;
    if (memory->foreign)
        gs_export_closed(memory->row);
    else if (memory->row >= 0)
        gs_export_freed(memory->row, memory->bytes);
    if (!memory->exported || memory->row >= 0)
        gs_release(memory->dev, memory->bytes);
    free(memory);
}

static struct use **bucket(uint64_t space, uint64_t from) {
    return &uses[((from >> GS_BLOCK_SHIFT) ^ (space >> 4)) % BUCKETS];
}

/* The memory that is mapped at an address; the caller holds the lock. */
static struct physical *mapped_at(uint64_t address) {
    for (unsigned i = 0; i < BUCKETS; i++)
        for (struct use *use = uses[i]; use; use = use->next)
            if (use->space == 0 && address - use->from < use->bytes)
                return use->memory;
    return NULL;
}

/* Call before the driver, so that the memory cannot lose its record in between. The memory is that
 * of `handle`, or without a handle what is mapped at `address`. */
static struct use *use_begin(CUmemGenericAllocationHandle handle, uint64_t address, uint64_t space,
                             uint64_t from, uint64_t bytes) {
    if (!gs_slot())
        return NULL;
    lock();
    struct physical *memory =
        handle ? find_record(handle) : mapped_at(address); /* none if imported */
    if (memory)
        memory->uses++;
    unlock();
    struct use *use = memory ? calloc(1, sizeof(*use)) : NULL;
    if (use) /* otherwise the memory stays charged until the process ends */
        *use = (struct use){.space = space, .from = from, .bytes = bytes, .memory = memory};
    return use;
}

static CUresult use_end(struct use *use, CUresult result) {
    if (!use)
        return result;
    lock();
    if (result == CUDA_SUCCESS) {
        struct use **at = bucket(use->space, use->from);
        use->next = *at;
        *at = use;
    } else {
        put_use(use->memory);
        free(use);
    }
    unlock();
    return result;
}

/* Take out the use that starts at `from`; the caller holds the lock. */
static struct use *take_use(uint64_t space, uint64_t from) {
    for (struct use **at = bucket(space, from); *at; at = &(*at)->next)
        if ((*at)->space == space && (*at)->from == from) {
            struct use *use = *at;
            *at = use->next;
            return use;
        }
    return NULL;
}

/* Take out all uses in a range, as a list: normally one, else every use within it (the driver
 * accepts whole mappings only). */
static struct use *take_range(uint64_t space, uint64_t from, uint64_t bytes) {
    if (!gs_slot())
        return NULL;
    lock();
    struct use *list = take_use(space, from);
    if (list)
        list->next = NULL;
    for (unsigned i = 0; i < BUCKETS && !(list && list->bytes == bytes); i++)
        for (struct use **at = &uses[i]; *at;) {
            struct use *use = *at;
            if (use->space != space || use->from - from >= bytes) {
                at = &use->next;
                continue;
            }
            *at = use->next;
            use->next = list;
            list = use;
        }
    unlock();
    return list;
}

static CUresult end_range(struct use *list, CUresult result) {
    if (!list)
        return result;
    lock();
    for (struct use *next; list; list = next) {
        next = list->next;
        if (result == CUDA_SUCCESS) {
            put_use(list->memory);
            free(list);
        } else {
            struct use **at = bucket(list->space, list->from);
            list->next = *at;
            *at = list;
        }
    }
    unlock();
    return result;
}

bool gs_vmm_asked(CUmemGenericAllocationHandle handle, CUdevice *device) {
    lock();
    struct physical *memory = find_record(handle);
    bool moved = memory && memory->moved;
    if (moved)
        *device = memory->asked;
    unlock();
    return moved;
}

static CUresult add_record(struct gs_charge *charge, CUresult result,
                           const CUmemGenericAllocationHandle *handle, bool moved, CUdevice asked) {
    struct physical *memory = result == CUDA_SUCCESS && handle ? malloc(sizeof(*memory)) : NULL;
    if (!memory) {
        if (result != CUDA_SUCCESS)
            gs_charge_abort(charge);
        return result; /* without memory for a record, the charge stays */
    }
    *memory = (struct physical){.bytes = charge->bytes,
                                .dev = charge->dev,
                                .uses = 1,
                                .refs = 1,
                                .row = -1,
                                .moved = moved,
                                .asked = asked};
    struct gs_entry entry = {.extra = (uintptr_t)memory, .dev = charge->dev};
    lock();
    gs_map_put(&handles, *handle, &entry);
    unlock();
    return result;
}

/* Allocate on the given device, or on the host if the share is oversubscribed. Memory that the
 * program itself requests on the host uses no device memory. */
GS_EXPORT CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                                       const CUmemAllocationProp *prop, unsigned long long flags) {
    GS_NEED(real, cuMemCreate);
    GS_CHANGES;
    struct gs_charge charge;
    if (!gs_slot())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!prop || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        !gs_device_exists(prop->location.id))
        return real(handle, size, prop, flags);
    CUdevice asked = prop->location.id;
    CUresult result = gs_charge_try_on(&charge, asked, size);
    if (result == CUDA_SUCCESS) {
        GS_WITH_RECLAIM(result, charge.dev, charge.bytes, real(handle, size, prop, flags));
        if (result != CUDA_ERROR_OUT_OF_MEMORY || !gs_virtual_has(charge.dev))
            return add_record(&charge, result, handle, false, asked);
        gs_charge_abort(&charge);
    }
    if (result == CUDA_ERROR_OUT_OF_MEMORY && !flags)
        result = gs_vmm_on_host(handle, size, prop, &charge);
    return result == CUDA_SUCCESS ? add_record(&charge, result, handle, true, asked) : result;
}

GS_EXPORT CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
    GS_NEED(real, cuMemRelease);
    GS_CHANGES;
    struct gs_entry entry;
    if (!gs_slot())
        return real(handle);
    lock();
    struct physical *memory = find_record(handle);
    bool last = memory && --memory->refs == 0 && gs_map_take(&handles, handle, &entry);
    unlock();
    CUresult result = real(handle);
    if (!memory)
        return result;
    lock();
    if (result == CUDA_SUCCESS) {
        put_use(memory);
    } else {
        memory->refs++;
        if (last)
            gs_map_put(&handles, handle, &entry);
    }
    unlock();
    return result;
}

GS_EXPORT CUresult CUDAAPI cuMemExportToShareableHandle(void *out,
                                                        CUmemGenericAllocationHandle handle,
                                                        CUmemAllocationHandleType type,
                                                        unsigned long long flags) {
    GS_NEED(real, cuMemExportToShareableHandle);
    gs_does(GS_DOES_EXCHANGE);
    CUresult result = real(out, handle, type, flags);
    if (result != CUDA_SUCCESS || !gs_slot() || !out ||
        type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return result;
    lock();
    struct physical *memory = find_record(handle);
    if (memory) {
        uint64_t id = gs_export_mark(*(int *)out, memory->id ? memory->id : gs_export_new_id());
        memory->id = memory->id ? memory->id : id; /* that of the first export has the row */
    }
    if (memory && !memory->foreign && !memory->exported) {
        memory->row = gs_export_add(memory->id, false, memory->dev, memory->bytes);
        memory->exported = true;
    }
    unlock();
    return result;
}

/* An import has a record like own memory, with a charge of 0, until its handles and mappings are
 * gone. */
GS_EXPORT CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle,
                                                          void *osHandle,
                                                          CUmemAllocationHandleType type) {
    GS_NEED(real, cuMemImportFromShareableHandle);
    gs_does(GS_DOES_EXCHANGE);
    GS_CHANGES;
    if (!gs_slot())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return real(handle, osHandle, type);
    uint64_t id = gs_export_id_of_file((int)(intptr_t)osHandle);
    int row = gs_export_add(id, true, 0, 0);
    struct physical *fresh = calloc(1, sizeof(*fresh));
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (fresh)
        result = real(handle, osHandle, type);
    lock();
    struct physical *memory = result == CUDA_SUCCESS && handle ? find_record(*handle) : NULL;
    /* Imported before, or exported by this process: the driver returned the same handle. */
    if (memory) {
        memory->refs++;
        memory->uses++;
    } else if (result == CUDA_SUCCESS && handle) {
        *fresh = (struct physical){
            .dev = GS_NO_DEV, .uses = 1, .refs = 1, .row = row, .id = id, .foreign = true};
        struct gs_entry entry = {.extra = (uintptr_t)fresh, .dev = GS_NO_DEV};
        gs_map_put(&handles, *handle, &entry);
        fresh = NULL;
        row = -1;
    }
    unlock();
    gs_export_closed(row);
    free(fresh);
    return result;
}

/* The driver returns the handle that was mapped, even if every reference to it was released. */
GS_EXPORT CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle,
                                                       void *addr) {
    GS_NEED(real, cuMemRetainAllocationHandle);
    CUresult result = real(handle, addr);
    if (result != CUDA_SUCCESS || !handle || !gs_slot())
        return result;
    lock();
    struct physical *memory = find_record(*handle);
    if (!memory && (memory = mapped_at((uint64_t)(uintptr_t)addr))) {
        struct gs_entry entry = {.extra = (uintptr_t)memory, .dev = memory->dev};
        gs_map_put(&handles, *handle, &entry);
    }
    if (memory) {
        memory->refs++;
        memory->uses++;
    }
    unlock();
    return result;
}

GS_EXPORT CUresult CUDAAPI cuMemMap(CUdeviceptr ptr, size_t size, size_t offset,
                                    CUmemGenericAllocationHandle handle, unsigned long long flags) {
    GS_NEED(real, cuMemMap);
    GS_CHANGES;
    struct use *use = use_begin(handle, 0, 0, ptr, size);
    return use_end(use, real(ptr, size, offset, handle, flags));
}

GS_EXPORT CUresult CUDAAPI cuMemUnmap(CUdeviceptr ptr, size_t size) {
    GS_NEED(real, cuMemUnmap);
    GS_CHANGES;
    struct use *list = take_range(0, ptr, size);
    return end_range(list, real(ptr, size));
}

/* ---- sparse arrays and multicast objects: other uses of memory ------------------------------- */

static uint64_t tile_space(const CUarrayMapInfo *info) {
    return (uint64_t)(uintptr_t)info->resource.array;
}

static uint64_t tile_key(const CUarrayMapInfo *info) {
    uint64_t sparse = info->subresourceType == CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL;
    uint64_t where = sparse ? info->subresource.sparseLevel.offsetX * UINT64_C(31) +
                                  info->subresource.sparseLevel.offsetY * UINT64_C(1009) +
                                  info->subresource.sparseLevel.offsetZ * UINT64_C(65537) +
                                  ((uint64_t)info->subresource.sparseLevel.level << 40) +
                                  ((uint64_t)info->subresource.sparseLevel.layer << 48)
                            : info->subresource.miptail.offset +
                                  ((uint64_t)info->subresource.miptail.layer << 48);
    return where << 1 | sparse;
}

static CUresult map_array(__typeof__(&cuMemMapArrayAsync) real, CUarrayMapInfo *info,
                          unsigned int count, CUstream stream) {
    bool counts = info && count && gs_slot();
    struct use **use = counts ? calloc(count, sizeof(struct use *)) : NULL;
    if (counts && !use)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (unsigned i = 0; use && i < count; i++)
        if (info[i].memOperationType == CU_MEM_OPERATION_TYPE_MAP)
            use[i] = use_begin(info[i].memHandle.memHandle, 0, tile_space(&info[i]),
                               tile_key(&info[i]), 1);
    CUresult result = real(info, count, stream);
    for (unsigned i = 0; use && i < count; i++) {
        if (result == CUDA_SUCCESS) /* a new mapping of a tile replaces the old one */
            end_range(take_range(tile_space(&info[i]), tile_key(&info[i]), 1), result);
        use_end(use[i], result);
    }
    free(use);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuMemMapArrayAsync(CUarrayMapInfo *info, unsigned int count,
                                              CUstream hStream) {
    GS_NEED(real, cuMemMapArrayAsync);
    return map_array(real, info, count, hStream);
}

GS_EXPORT CUresult CUDAAPI cuMemMapArrayAsync_ptsz(CUarrayMapInfo *info, unsigned int count,
                                                   CUstream hStream) {
    GS_NEED(real, cuMemMapArrayAsync_ptsz);
    return map_array(real, info, count, hStream);
}

GS_EXPORT CUresult CUDAAPI cuMulticastBindMem(CUmemGenericAllocationHandle mc, size_t mcOffset,
                                              CUmemGenericAllocationHandle mem, size_t memOffset,
                                              size_t size, unsigned long long flags) {
    GS_NEED(real, cuMulticastBindMem);
    struct use *use = use_begin(mem, 0, mc, mcOffset, size);
    return use_end(use, real(mc, mcOffset, mem, memOffset, size, flags));
}

GS_EXPORT CUresult CUDAAPI cuMulticastBindMem_v2(CUmemGenericAllocationHandle mc, CUdevice dev,
                                                 size_t mcOffset, CUmemGenericAllocationHandle mem,
                                                 size_t memOffset, size_t size,
                                                 unsigned long long flags) {
    GS_NEED(real, cuMulticastBindMem_v2);
    struct use *use = use_begin(mem, 0, mc, mcOffset, size);
    return use_end(use, real(mc, dev, mcOffset, mem, memOffset, size, flags));
}

GS_EXPORT CUresult CUDAAPI cuMulticastBindAddr(CUmemGenericAllocationHandle mc, size_t mcOffset,
                                               CUdeviceptr ptr, size_t size,
                                               unsigned long long flags) {
    GS_NEED(real, cuMulticastBindAddr);
    struct use *use = use_begin(0, ptr, mc, mcOffset, size);
    return use_end(use, real(mc, mcOffset, ptr, size, flags));
}

GS_EXPORT CUresult CUDAAPI cuMulticastBindAddr_v2(CUmemGenericAllocationHandle mc, CUdevice dev,
                                                  size_t mcOffset, CUdeviceptr ptr, size_t size,
                                                  unsigned long long flags) {
    GS_NEED(real, cuMulticastBindAddr_v2);
    struct use *use = use_begin(0, ptr, mc, mcOffset, size);
    return use_end(use, real(mc, dev, mcOffset, ptr, size, flags));
}

GS_EXPORT CUresult CUDAAPI cuMulticastUnbind(CUmemGenericAllocationHandle mc, CUdevice dev,
                                             size_t mcOffset, size_t size) {
    GS_NEED(real, cuMulticastUnbind);
    GS_CHANGES;
    struct use *list = take_range(mc, mcOffset, size);
    return end_range(list, real(mc, dev, mcOffset, size));
}

/* A logical endpoint has the same offsets on each of its devices. Its id is a small number, so the
 * highest bit tells it from handles and arrays. */
static uint64_t endpoint_space(cuuint32_t id, CUdevice dev) {
    return UINT64_C(1) << 63 | (uint64_t)(unsigned)dev << 32 | id;
}

GS_EXPORT CUresult CUDAAPI cuLogicalEndpointBindMem(cuuint32_t id, CUdevice dev, cuuint64_t offset,
                                                    CUmemGenericAllocationHandle mem,
                                                    cuuint64_t memOffset, cuuint64_t size,
                                                    unsigned long long flags) {
    GS_NEED(real, cuLogicalEndpointBindMem);
    struct use *use = use_begin(mem, 0, endpoint_space(id, dev), offset, size);
    return use_end(use, real(id, dev, offset, mem, memOffset, size, flags));
}

GS_EXPORT CUresult CUDAAPI cuLogicalEndpointBindAddr(cuuint32_t id, CUdevice dev, cuuint64_t offset,
                                                     void *ptr, cuuint64_t size,
                                                     unsigned long long flags) {
    GS_NEED(real, cuLogicalEndpointBindAddr);
    struct use *use = use_begin(0, (uintptr_t)ptr, endpoint_space(id, dev), offset, size);
    return use_end(use, real(id, dev, offset, ptr, size, flags));
}

GS_EXPORT CUresult CUDAAPI cuLogicalEndpointUnbind(cuuint32_t id, CUdevice dev, cuuint64_t offset,
                                                   cuuint64_t size) {
    GS_NEED(real, cuLogicalEndpointUnbind);
    struct use *list = take_range(endpoint_space(id, dev), offset, size);
    return end_range(list, real(id, dev, offset, size));
}

/* Unbinds all that this process bound, on every device. */
GS_EXPORT CUresult CUDAAPI cuLogicalEndpointDestroy(cuuint32_t id) {
    GS_NEED(real, cuLogicalEndpointDestroy);
    CUresult result = real(id);
    for (CUdevice dev = 0; dev < GS_MAX_ORDINALS && result == CUDA_SUCCESS; dev++)
        end_range(take_range(endpoint_space(id, dev), 0, UINT64_MAX), result);
    return result;
}
