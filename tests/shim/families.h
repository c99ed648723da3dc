/* Every way in which a program gets device memory, behind two functions: test programs allocate
 * and free memory by the name of its family. Include it once per program. */
#ifndef FAMILIES_H
#define FAMILIES_H

#include <cuda.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define MIB (1ull << 20)
#define BLOCK (2 * MIB)

/* The headers of CUDA 13 declare only the newest version. */
CUresult CUDAAPI cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device);

struct held {
    const struct family *family;
    CUdeviceptr address;
    size_t bytes;
    void *object, *more;
    CUmemGenericAllocationHandle handle;
};

struct family {
    const char *name;
    CUresult (*take)(size_t bytes, struct held *held);
    CUresult (*give)(struct held *held);
};

static CUstream work_stream;
static CUmemoryPool work_pool;

static size_t up(size_t bytes, size_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

static CUresult take_plain(size_t bytes, struct held *h) {
    return cuMemAlloc(&h->address, bytes);
}

/* Prefetches all of it to the device, as it is charged there. */
static CUresult take_managed(size_t bytes, struct held *h) {
    CUmemLocation device = {.type = CU_MEM_LOCATION_TYPE_DEVICE};
    CUresult result = cuMemAllocManaged(&h->address, bytes, CU_MEM_ATTACH_GLOBAL);
    if (result == CUDA_SUCCESS)
        cuMemPrefetchAsync(h->address, bytes, device, 0, NULL);
    return result;
}

static CUresult take_pitch(size_t bytes, struct held *h) {
    size_t pitch, width = bytes < 1000 ? bytes : 1000;
    return cuMemAllocPitch(&h->address, &pitch, width, (bytes + 1023) / 1024, 4);
}

static CUresult give_address(struct held *h) {
    return cuMemFree(h->address);
}

/* Elements of 16 bytes in rows of 64 KiB at most; the height is bounded as on hardware. */
static CUDA_ARRAY3D_DESCRIPTOR shape(size_t bytes) {
    size_t elements = (bytes + 15) / 16, width = elements < 4096 ? elements : 4096;
    CUDA_ARRAY3D_DESCRIPTOR d = {.Width = width,
                                 .Height = (elements + width - 1) / width,
                                 .Format = CU_AD_FORMAT_FLOAT,
                                 .NumChannels = 4};
    return d;
}

static CUresult take_array(size_t bytes, struct held *h) {
    CUDA_ARRAY3D_DESCRIPTOR d = shape(bytes);
    return cuArray3DCreate((CUarray *)&h->object, &d);
}

static CUresult give_array(struct held *h) {
    return cuArrayDestroy(h->object);
}

static CUresult take_mipmap(size_t bytes, struct held *h) {
    CUDA_ARRAY3D_DESCRIPTOR d = shape(bytes);
    return cuMipmappedArrayCreate((CUmipmappedArray *)&h->object, &d, 3);
}

static CUresult give_mipmap(struct held *h) {
    return cuMipmappedArrayDestroy(h->object);
}

static CUresult take_async(size_t bytes, struct held *h) {
    return cuMemAllocAsync(&h->address, bytes, work_stream);
}

static CUresult give_async(struct held *h) {
    CUresult result = cuMemFreeAsync(h->address, work_stream);
    return result ? result : cuStreamSynchronize(work_stream);
}

/* Creates a pool on the current device that keeps no freed memory. */
static CUresult take_pool(size_t bytes, struct held *h) {
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location.type = CU_MEM_LOCATION_TYPE_DEVICE};
    CUresult result = CUDA_SUCCESS;
    CUdevice device;
    if (!work_pool && (result = cuCtxGetDevice(&device)) == CUDA_SUCCESS) {
        props.location.id = device;
        result = cuMemPoolCreate(&work_pool, &props);
    }
    return result ? result : cuMemAllocFromPoolAsync(&h->address, bytes, work_pool, work_stream);
}

static CUresult take_vmm(size_t bytes, struct held *h) {
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location.type = CU_MEM_LOCATION_TYPE_DEVICE};
    CUdevice device;
    CUresult result = cuCtxGetDevice(&device);
    prop.location.id = device;
    h->bytes = up(bytes, BLOCK);
    if (result || (result = cuMemCreate(&h->handle, h->bytes, &prop, 0)))
        return result;
    if (!(result = cuMemAddressReserve(&h->address, h->bytes, 0, 0, 0)) &&
        !(result = cuMemMap(h->address, h->bytes, 0, h->handle, 0)))
        return cuMemRelease(h->handle); /* from here on only the mapping keeps the memory */
    cuMemRelease(h->handle);
    return result;
}

static CUresult give_vmm(struct held *h) {
    CUresult result = cuMemUnmap(h->address, h->bytes);
    return result ? result : cuMemAddressFree(h->address, h->bytes);
}

/* Runs a graph with one allocation once: its memory outlives the graph. */
static CUresult take_graph(size_t bytes, struct held *h) {
    CUDA_MEM_ALLOC_NODE_PARAMS params = {.bytesize = bytes};
    CUgraphNode node;
    CUdevice device;
    CUresult result = cuCtxGetDevice(&device);
    params.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    params.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    params.poolProps.location.id = device;
    if (result || (result = cuGraphCreate((CUgraph *)&h->object, 0)))
        return result;
    if (!(result = cuGraphAddMemAllocNode(&node, h->object, NULL, 0, &params)) &&
        !(result = cuGraphInstantiateWithFlags((CUgraphExec *)&h->more, h->object, 0))) {
        if (!(result = cuGraphLaunch(h->more, work_stream)) &&
            !(result = cuStreamSynchronize(work_stream))) {
            h->address = params.dptr;
            return CUDA_SUCCESS;
        }
        cuGraphExecDestroy(h->more);
    }
    cuGraphDestroy(h->object);
    return result;
}

static CUresult give_graph(struct held *h) {
    CUdevice device;
    CUresult result = cuMemFree(h->address);
    if (!result)
        result = cuGraphExecDestroy(h->more);
    if (!result)
        result = cuGraphDestroy(h->object);
    if (!result)
        result = cuCtxGetDevice(&device);
    return result ? result : cuDeviceGraphMemTrim(device);
}

/* Global data of a program image; the text is the simulated driver's image format. */
static CUresult take_module(size_t bytes, struct held *h) {
    char image[96];
    CUfunction function;
    snprintf(image, sizeof(image), "SIMMOD globals=%zu code=4096\nkernel work\n", bytes);
    CUresult result = cuModuleLoadData((CUmodule *)&h->object, image);
    if (!result && (result = cuModuleGetFunction(&function, h->object, "work")))
        cuModuleUnload(h->object);
    return result;
}

static CUresult give_module(struct held *h) {
    return cuModuleUnload(h->object);
}

static const struct family families[] = {
    {"plain", take_plain, give_address},     {"pitch", take_pitch, give_address},
    {"managed", take_managed, give_address}, {"array", take_array, give_array},
    {"mipmap", take_mipmap, give_mipmap},    {"async", take_async, give_async},
    {"pool", take_pool, give_async},         {"vmm", take_vmm, give_vmm},
    {"graph", take_graph, give_graph},       {"module", take_module, give_module},
};
#define FAMILIES (sizeof(families) / sizeof(families[0]))

static const struct family *family_of(const char *name) {
    for (size_t i = 0; i < FAMILIES; i++)
        if (!strcmp(families[i].name, name))
            return &families[i];
    return NULL;
}

static CUresult take(const struct family *family, size_t bytes, struct held *held) {
    *held = (struct held){.family = family, .bytes = bytes};
    return family->take(bytes, held);
}

/* Calls cuInit, and creates a context on the device and a stream. */
static CUresult start(int ordinal) {
    CUcontext context;
    CUdevice device;
    CUresult result = cuInit(0);
    if (!result)
        result = cuDeviceGet(&device, ordinal);
    if (!result)
        result = cuCtxCreate_v2(&context, 0, device);
    return result ? result : cuStreamCreate(&work_stream, CU_STREAM_NON_BLOCKING);
}

#endif
