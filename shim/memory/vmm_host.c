/* Physical memory (cuMemCreate) beyond the device part of an oversubscribed share. It is on the
 * host's NUMA node nearest to the device, where drivers from 12.2 on can allocate it and map it for
 * a device like device memory. Unlike managed memory (oversubscription/virtual.c) it cannot be
 * divided, so it fits into the host part or is refused. It does not move, so it takes no part in
 * migration slices.
 *
 * Memory that must be on the device is still refused: tiles of sparse arrays, memory that other PCI
 * devices access, and fabric handles. */
#include "vmm.h"

enum { UNKNOWN, READS_HOST, READS_NONE };
static _Atomic int kind[GS_MAX_DEVICES]; /* of each device, determined with the first such memory */

static bool may_be_on_host(const CUmemAllocationProp *prop) {
    return prop->type == CU_MEM_ALLOCATION_TYPE_PINNED && !prop->allocFlags.usage &&
           !prop->allocFlags.gpuDirectRDMACapable &&
           !(prop->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

/* Return 0 if the machine or the driver does not report a node. */
static int node_of(CUdevice device) {
    __typeof__(&cuDeviceGetAttribute) get = GS_REAL(cuDeviceGetAttribute);
    int node = -1;
    if (!get || get(&node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device) != CUDA_SUCCESS)
        return 0;
    return node < 0 ? 0 : node;
}

/* Programs arrange such memory in blocks of the device's granularity. */
static bool granularity_fits(const CUmemAllocationProp *prop) {
    __typeof__(&cuMemGetAllocationGranularity) ask = GS_REAL(cuMemGetAllocationGranularity);
    size_t unit = 0;
    return ask && ask(&unit, prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM) == CUDA_SUCCESS && unit &&
           GS_BLOCK % unit == 0;
}

/* Check now, since a program handles a refusal better than a handle that it cannot map. */
static bool can_be_mapped(CUmemGenericAllocationHandle handle, size_t size, CUdevice device) {
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    __typeof__(&cuMemAddressReserve) reserve = GS_REAL(cuMemAddressReserve);
    __typeof__(&cuMemSetAccess) set_access = GS_REAL(cuMemSetAccess);
    CUdeviceptr at;
    if (!reserve || !set_access || reserve(&at, size, GS_BLOCK, 0, 0) != CUDA_SUCCESS)
        return false;
    bool can = false;
    if (GS_REAL(cuMemMap)(at, size, 0, handle, 0) == CUDA_SUCCESS) {
        can = set_access(at, size, &access, 1) == CUDA_SUCCESS;
        GS_REAL(cuMemUnmap)(at, size);
    }
    GS_REAL(cuMemAddressFree)(at, size);
    return can;
}

static bool can_device_map(int dev, CUmemGenericAllocationHandle handle, size_t size,
                           CUdevice device) {
    if (atomic_load(&kind[dev]) == UNKNOWN)
        atomic_store(&kind[dev], can_be_mapped(handle, size, device) ? READS_HOST : READS_NONE);
    return atomic_load(&kind[dev]) == READS_HOST;
}

static bool reserve_on_host(int part, uint64_t bytes) {
    if (gs_reserve(part, bytes))
        return true;
    if (atomic_load(&gs_virtual_later))
        gs_virtual_drain();
    return gs_reserve(part, bytes);
}

static CUresult create(CUmemGenericAllocationHandle *handle, size_t size,
                       const CUmemAllocationProp *prop, int dev) {
    CUmemAllocationProp there = *prop;
    there.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
    there.location.id = node_of(prop->location.id);
    there.allocFlags.compressionType = CU_MEM_ALLOCATION_COMP_NONE; /* compression is optional */
    if (!granularity_fits(&there) || GS_REAL(cuMemCreate)(handle, size, &there, 0) != CUDA_SUCCESS)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (can_device_map(dev, *handle, size, prop->location.id))
        return CUDA_SUCCESS;
    gs_log("allocation refused", "this device cannot map memory of the host",
           "unset GPUSHARE_OVERSUBSCRIBE for this container");
    GS_REAL(cuMemRelease)(*handle);
    *handle = 0;
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult gs_vmm_on_host(CUmemGenericAllocationHandle *handle, size_t size,
                        const CUmemAllocationProp *prop, struct gs_charge *charge) {
    int dev = charge->dev, part = gs_host_part(dev);
    uint64_t bytes = gs_round_up(size, GS_BLOCK);
    bool may = gs_virtual_has(dev) && handle && may_be_on_host(prop) &&
               atomic_load(&kind[dev]) != READS_NONE && reserve_on_host(part, bytes);
    if (may) {
        *charge = (struct gs_charge){.dev = part, .bytes = bytes};
        if (create(handle, size, prop, dev) == CUDA_SUCCESS)
            return CUDA_SUCCESS;
        gs_release(part, bytes);
    }
    gs_count_refusal(dev);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Report the device that the program requested as the location of its memory. */
GS_EXPORT CUresult CUDAAPI cuMemGetAllocationPropertiesFromHandle(
    CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle) {
    GS_NEED(real, cuMemGetAllocationPropertiesFromHandle);
    CUdevice asked;
    CUresult result = real(prop, handle);
    if (result == CUDA_SUCCESS && prop && gs_slot() && gs_vmm_asked(handle, &asked)) {
        prop->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        prop->location.id = asked;
    }
    return result;
}
