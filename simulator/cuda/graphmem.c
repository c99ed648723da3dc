/* Memory that graphs allocate. The address is fixed when the node is created. Physical memory is
 * allocated when the graph runs (or is uploaded), stays in the device's graph pool when it is
 * freed, and is released when the pool is trimmed. */
#include "graph.h"

#include <stdlib.h>

CUresult graph_mem_open(struct node *n) {
    int device = n->work.alloc.poolProps.location.id;
    uint64_t bytes = round_up(n->work.alloc.bytesize, SIM_BLOCK);
    CUresult joined = join_device(device);
    if (joined != CUDA_SUCCESS)
        return joined;
    struct graph_mem *g = calloc(1, sizeof *g);
    CHECK(g, CUDA_ERROR_OUT_OF_MEMORY);
    *g = (struct graph_mem){
        .span = space_take(device, bytes / SIM_BLOCK), .bytes = bytes, .refs = 1};
    if (!g->span)
        return free(g), CUDA_ERROR_OUT_OF_MEMORY;
    g->span->kind = MEM_GRAPH;
    g->span->size = n->work.alloc.bytesize;
    g->span->owner = g;
    n->mem = g;
    n->work.alloc.dptr = g->span->va;
    return CUDA_SUCCESS;
}

CUdeviceptr graph_alloc_address(struct node *n) {
    return n->mem->span->va;
}

static void release(struct graph_mem *g) {
    g->live = false;
    sim.device[g->span->device].graph_used -= g->bytes;
}

void graph_mem_drop(struct graph_mem *g) {
    if (--g->refs)
        return;
    if (g->live)
        release(g);
    space_give(g->span);
    free(g);
}

static CUresult raise_reserved(struct device *d, uint64_t bytes) {
    if (bytes <= d->graph_reserved)
        return CUDA_SUCCESS;
    CUresult result = charge((int)(d - sim.device), bytes - d->graph_reserved);
    if (result != CUDA_SUCCESS)
        return result;
    d->graph_reserved = bytes;
    if (bytes > d->graph_reserved_high)
        d->graph_reserved_high = bytes;
    return CUDA_SUCCESS;
}

CUresult graph_mem_take(struct graph_mem *g) {
    struct device *d = &sim.device[g->span->device];
    CHECK_VALUE(!g->live);
    CUresult result = raise_reserved(d, d->graph_used + g->bytes);
    if (result != CUDA_SUCCESS)
        return result;
    g->live = true;
    d->graph_used += g->bytes;
    if (d->graph_used > d->graph_used_high)
        d->graph_used_high = d->graph_used;
    return CUDA_SUCCESS;
}

bool graph_has_mem(const struct graph *graph) {
    for (const struct node *n = graph->first; n; n = n->next)
        if (n->mem || (n->work.kind == WORK_CHILD && graph_has_mem(n->work.child)))
            return true;
    return false;
}

/* Reserves memory for one run of the graph: the most that it holds at a time, in its execution
 * order. */
CUresult graph_mem_reserve(const struct graph *graph) {
    if (!graph_has_mem(graph))
        return CUDA_SUCCESS;
    struct node **order = graph_order(graph);
    CHECK(order, CUDA_ERROR_INVALID_VALUE);
    uint64_t held[SIM_MAX_DEVICES] = {0}, most[SIM_MAX_DEVICES] = {0};
    for (size_t i = 0; i < graph->n_nodes; i++) {
        struct node *n = order[i];
        struct mem *freed = n->work.kind == WORK_FREE ? space_find(n->work.free) : NULL;
        if (n->mem && !n->mem->live) {
            int d = n->mem->span->device;
            held[d] += n->mem->bytes;
            if (held[d] > most[d])
                most[d] = held[d];
        }
        if (freed && freed->kind == MEM_GRAPH && held[freed->device] >= freed->span)
            held[freed->device] -= freed->span;
    }
    free(order);
    CUresult result = CUDA_SUCCESS;
    for (int d = 0; d < sim.n_devices && result == CUDA_SUCCESS; d++)
        if (most[d])
            result = raise_reserved(&sim.device[d], sim.device[d].graph_used + most[d]);
    return result;
}

CUresult graph_free_address(struct mem *m, uint64_t va) {
    struct graph_mem *g = m->owner;
    CHECK_VALUE(va == m->va && g->live);
    release(g);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGraphMemTrim(CUdevice dev) {
    ENTER();
    CHECK_DEVICE(dev);
    struct device *d = &sim.device[dev];
    if (d->graph_reserved > d->graph_used)
        uncharge(dev, d->graph_reserved - d->graph_used);
    d->graph_reserved = d->graph_used;
    return CUDA_SUCCESS;
}

static uint64_t *counter_of(struct device *d, CUgraphMem_attribute attribute) {
    switch (attribute) {
    case CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT:
        return &d->graph_used;
    case CU_GRAPH_MEM_ATTR_USED_MEM_HIGH:
        return &d->graph_used_high;
    case CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT:
        return &d->graph_reserved;
    case CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH:
        return &d->graph_reserved_high;
    default:
        return NULL;
    }
}

EXPORT CUresult cuDeviceGetGraphMemAttribute(CUdevice dev, CUgraphMem_attribute attr, void *value) {
    ENTER();
    CHECK_DEVICE(dev);
    uint64_t *counter = counter_of(&sim.device[dev], attr);
    CHECK_VALUE(counter && value);
    *(cuuint64_t *)value = *counter;
    return CUDA_SUCCESS;
}

/* Only the high-water marks can be set, and only to 0, which resets them to the current values. */
EXPORT CUresult cuDeviceSetGraphMemAttribute(CUdevice dev, CUgraphMem_attribute attr, void *value) {
    ENTER();
    CHECK_DEVICE(dev);
    CHECK_VALUE(value && *(cuuint64_t *)value == 0);
    struct device *d = &sim.device[dev];
    if (attr == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH)
        d->graph_used_high = d->graph_used;
    else if (attr == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH)
        d->graph_reserved_high = d->graph_reserved;
    else
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}
