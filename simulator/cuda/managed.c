/* Managed memory: which of its 2 MiB blocks are on the device, and the time for using the
 * others.
 *
 * A block begins on the host. When a kernel reads it, it is fetched over the bus. A block that
 * prefers the host stays there, so every read takes that time; any other migrates to the device
 * (a fault plus the transfer) and is charged there. If the device is full, managed memory of
 * other processes is evicted first, then one of the process's own blocks, which costs another
 * transfer. Host memory allocated with cuMemCreate (vmm.c) is read over the bus every time.
 *
 * Only kernels called `sweep` read memory (launch.c): sweep_ns_arg(ns, address, bytes) takes
 * `ns` when all of it is on the device. */
#include "work.h"

#include <string.h>

#define FAULT_NS 25000u

static uint64_t blocks_of(const struct mem *m) {
    return m->span / SIM_BLOCK;
}

static bool arrive(struct mem *m, uint64_t block) {
    if (m->place[block] & PLACE_RESIDENT)
        return true;
    if (sim_charge_managed(&sim.device[m->device].sim, SIM_BLOCK) != SIM_OK)
        return false;
    m->place[block] |= PLACE_RESIDENT;
    return true;
}

static bool leave(struct mem *m, uint64_t block) {
    if (!(m->place[block] & PLACE_RESIDENT))
        return false;
    m->place[block] &= (uint8_t)~PLACE_RESIDENT;
    sim_uncharge_managed(&sim.device[m->device].sim, SIM_BLOCK);
    return true;
}

void managed_leave(struct mem *m) {
    for (uint64_t i = 0; i < blocks_of(m); i++)
        leave(m, i);
}

/* Evicts a block of the same process, approximately the least recently used one. */
static bool make_room(int device) {
    static uint64_t next;
    struct device *d = &sim.device[device];
    for (uint64_t i = 0; i < d->n_blocks; i++) {
        uint64_t at = next++ % d->n_blocks;
        struct mem *m = d->head[at];
        if (m && m->place && leave(m, at - (m->va - d->base) / SIM_BLOCK))
            return true;
    }
    return false;
}

/* Marks blocks as not resident if other processes evicted them. */
static void note_evictions(int device) {
    struct device *d = &sim.device[device];
    for (uint64_t i = 0; d->sim.state->client[d->sim.client - 1].evicted_bytes; i++)
        if (i > 1000000 || !make_room(device))
            return;
}

static uint64_t read_block_ns(struct mem *m, uint64_t block) {
    uint64_t bus_ns = copy_duration_ns(SIM_BLOCK);
    if (m->place[block] & PLACE_RESIDENT)
        return 0;
    if (m->place[block] & PLACE_PREFER_HOST)
        return m->place[block] & PLACE_ACCESSED ? bus_ns : bus_ns + FAULT_NS;
    if (arrive(m, block))
        return bus_ns + FAULT_NS;
    if (make_room(m->device) && arrive(m, block))
        return 2 * bus_ns + FAULT_NS;
    return bus_ns + FAULT_NS;
}

uint64_t managed_read_ns(uint64_t va, uint64_t bytes) {
    uint64_t ns = 0, start, size;
    struct mem *m;
    int device;
    if (bytes && vmm_range(va, &start, &size, &device))
        return device < 0 ? copy_duration_ns(bytes) : 0;
    if (!bytes || !mem_range(va, &start, &size, &m) || m->kind != MEM_MANAGED ||
        va - start + bytes > size)
        return 0;
    note_evictions(m->device);
    for (uint64_t i = (va - m->va) / SIM_BLOCK; i <= (va - m->va + bytes - 1) / SIM_BLOCK; i++)
        ns += read_block_ns(m, i);
    return ns;
}

static CUresult check_managed(CUdeviceptr ptr, size_t count, struct mem **m) {
    uint64_t start, size;
    CHECK_VALUE(count && mem_range(ptr, &start, &size, m) && (*m)->kind == MEM_MANAGED &&
                ptr - start + count <= size);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPrefetchAsync(CUdeviceptr ptr, size_t count, CUdevice dst, CUstream hStream) {
    ENTER_CONTEXT(ctx);
    struct stream *s = stream_of(ctx, hStream);
    struct mem *m;
    uint64_t moved = 0;
    CHECK(dst == CU_DEVICE_CPU || (dst >= 0 && dst < sim.n_devices), CUDA_ERROR_INVALID_DEVICE);
    CUresult result = check_managed(ptr, count, &m);
    CHECK(result == CUDA_SUCCESS, result);
    CHECK_HANDLE(s);
    note_evictions(m->device);
    for (uint64_t i = (ptr - m->va) / SIM_BLOCK; i <= (ptr - m->va + count - 1) / SIM_BLOCK; i++) {
        bool was = m->place[i] & PLACE_RESIDENT;
        if (dst == m->device)
            arrive(m, i); /* as much as fits */
        else
            leave(m, i);
        moved += was != (bool)(m->place[i] & PLACE_RESIDENT);
    }
    struct work work = {.kind = WORK_COPY, .duration_ns = copy_duration_ns(moved * SIM_BLOCK)};
    return moved ? dispatch_on(s, &work) : CUDA_SUCCESS;
}

EXPORT CUresult cuMemPrefetchAsync_v2(CUdeviceptr ptr, size_t count, CUmemLocation location,
                                      unsigned int flags, CUstream hStream) {
    CHECK_VALUE(!flags);
    return cuMemPrefetchAsync(
        ptr, count,
        location.type == CU_MEM_LOCATION_TYPE_DEVICE ? location.id : (CUdevice)CU_DEVICE_CPU,
        hStream);
}

EXPORT CUresult cuMemAdvise(CUdeviceptr ptr, size_t count, CUmem_advise advice, CUdevice device) {
    ENTER_CONTEXT(ctx);
    struct mem *m;
    uint8_t set = 0, clear = 0;
    (void)ctx;
    CHECK_VALUE(advice >= CU_MEM_ADVISE_SET_READ_MOSTLY &&
                advice <= CU_MEM_ADVISE_UNSET_ACCESSED_BY);
    CUresult result = check_managed(ptr, count, &m);
    CHECK(result == CUDA_SUCCESS, result);
    if (advice == CU_MEM_ADVISE_SET_PREFERRED_LOCATION && device == CU_DEVICE_CPU)
        set = PLACE_PREFER_HOST;
    else if (advice == CU_MEM_ADVISE_SET_PREFERRED_LOCATION ||
             advice == CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION)
        clear = PLACE_PREFER_HOST;
    else if (advice == CU_MEM_ADVISE_SET_ACCESSED_BY && device == m->device)
        set = PLACE_ACCESSED;
    else if (advice == CU_MEM_ADVISE_UNSET_ACCESSED_BY && device == m->device)
        clear = PLACE_ACCESSED;
    for (uint64_t i = (ptr - m->va) / SIM_BLOCK; i <= (ptr - m->va + count - 1) / SIM_BLOCK; i++)
        m->place[i] = (uint8_t)((m->place[i] | set) & ~clear);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAdvise_v2(CUdeviceptr ptr, size_t count, CUmem_advise advice,
                               CUmemLocation location) {
    return cuMemAdvise(ptr, count, advice,
                       location.type == CU_MEM_LOCATION_TYPE_DEVICE ? location.id
                                                                    : (CUdevice)CU_DEVICE_CPU);
}
