/* Memory that graphs allocate: taken when a graph first runs (or is uploaded), kept by the driver
 * in one place per device until it is trimmed. An executable graph is measured when it is
 * instantiated: its allocation nodes, those of its child graphs too, are the bound of what a launch
 * can take. */
#include <stdlib.h>

#include "pool.h"

_Static_assert(sizeof(CUgraphExec) == sizeof(uint64_t), "handles are keys");

/* executable graph -> bytes = the bound, extra = device | trims seen at its last launch << 32 */
static struct gs_map executables;
static _Atomic uint64_t
    with_memory; /* how many there are: launches of other programs skip the look-up */

static uint64_t key_of(CUgraphExec exec) {
    return (uint64_t)(uintptr_t)exec;
}

struct measured {
    uint64_t bytes;
    CUdevice device;
};

static void measure(CUgraph graph, struct measured *sum, unsigned depth);

static void measure_node(CUgraphNode node, struct measured *sum, unsigned depth) {
    CUgraphNodeType type;
    CUDA_MEM_ALLOC_NODE_PARAMS params;
    CUgraph child;
    if (GS_REAL(cuGraphNodeGetType)(node, &type) != CUDA_SUCCESS)
        return;
    if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC &&
        GS_REAL(cuGraphMemAllocNodeGetParams)(node, &params) == CUDA_SUCCESS) {
        sum->device = params.poolProps.location.id;
        sum->bytes += gs_round_up(params.bytesize, GS_BLOCK);
    }
    if (type == CU_GRAPH_NODE_TYPE_GRAPH && depth &&
        GS_REAL(cuGraphChildGraphNodeGetGraph)(node, &child) == CUDA_SUCCESS)
        measure(child, sum, depth - 1);
}

static void measure(CUgraph graph, struct measured *sum, unsigned depth) {
    size_t n = 0;
    __typeof__(&cuGraphGetNodes) get_nodes = GS_REAL(cuGraphGetNodes);
    if (!get_nodes || !GS_REAL(cuGraphMemAllocNodeGetParams) || !GS_REAL(cuGraphNodeGetType) ||
        !GS_REAL(cuGraphChildGraphNodeGetGraph) || get_nodes(graph, NULL, &n) != CUDA_SUCCESS ||
        n == 0)
        return;
    CUgraphNode *nodes = calloc(n, sizeof(*nodes));
    if (nodes && get_nodes(graph, nodes, &n) == CUDA_SUCCESS)
        for (size_t i = 0; i < n; i++)
            measure_node(nodes[i], sum, depth);
    free(nodes);
}

static void learn(CUgraphExec exec, CUgraph graph) {
    struct measured sum = {0};
    struct gs_entry stale;
    measure(graph, &sum, 16);
    if (gs_map_take(&executables, key_of(exec), &stale))
        atomic_fetch_sub(&with_memory, 1);
    if (sum.bytes == 0)
        return;
    struct gs_entry entry = {.bytes = sum.bytes,
                             .dev = gs_dev_of(sum.device),
                             .extra = (uint32_t)sum.device | (uint64_t)(gs_graph_trims - 1) << 32};
    if (gs_map_put(&executables, key_of(exec), &entry))
        atomic_fetch_add(&with_memory, 1);
}

static CUresult instantiated(CUresult result, const CUgraphExec *exec, CUgraph graph) {
    if (result == CUDA_SUCCESS && exec && gs_slot())
        learn(*exec, graph);
    return result;
}

typedef CUresult (*launch_fn)(CUgraphExec, CUstream);

/* A graph that ran since the last trim holds what it needs: launching it again takes nothing more.
 */
static CUresult launch(launch_fn real, CUgraphExec exec, CUstream stream) {
    struct gs_entry entry;
    struct gs_charge charge = {.passed = true};
    if (!gs_slot())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (atomic_load_explicit(&with_memory, memory_order_relaxed) == 0 ||
        !gs_map_get(&executables, key_of(exec), &entry))
        return real(exec, stream);
    CUdevice device = (CUdevice)(uint32_t)entry.extra;
    struct gs_pool *pool = gs_pool_of_graphs(device);
    uint32_t trims = atomic_load(&gs_graph_trims);
    bool resident = entry.extra >> 32 == trims;
    CUresult result = resident ? CUDA_SUCCESS : gs_charge_begin_on(&charge, device, entry.bytes);
    if (result != CUDA_SUCCESS)
        return result;
    result = real(exec, stream);
    if (pool)
        gs_pool_settle(pool);
    gs_charge_abort(&charge);
    if (result == CUDA_SUCCESS && !resident && gs_map_take(&executables, key_of(exec), &entry)) {
        entry.extra = (uint32_t)device | (uint64_t)trims << 32;
        gs_map_put(&executables, key_of(exec), &entry);
    }
    return result;
}

GS_EXPORT CUresult CUDAAPI cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *node,
                                              char *log, size_t size) {
    GS_NEED(real, cuGraphInstantiate);
    return instantiated(real(exec, graph, node, log, size), exec, graph);
}

GS_EXPORT CUresult CUDAAPI cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph,
                                                 CUgraphNode *node, char *log, size_t size) {
    GS_NEED(real, cuGraphInstantiate_v2);
    return instantiated(real(exec, graph, node, log, size), exec, graph);
}

GS_EXPORT CUresult CUDAAPI cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph,
                                                       unsigned long long flags) {
    GS_NEED(real, cuGraphInstantiateWithFlags);
    return instantiated(real(exec, graph, flags), exec, graph);
}

/* With the flag UPLOAD this uploads at once, so what it takes is reserved around it. */
static CUresult with_params(__typeof__(&cuGraphInstantiateWithParams) real, CUgraphExec *exec,
                            CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
    struct measured sum = {0};
    struct gs_charge charge = {.passed = true};
    if (gs_slot() && params && params->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) {
        measure(graph, &sum, 16);
        CUresult result =
            sum.bytes ? gs_charge_begin_on(&charge, sum.device, sum.bytes) : CUDA_SUCCESS;
        if (result != CUDA_SUCCESS)
            return result;
    }
    CUresult result = instantiated(real(exec, graph, params), exec, graph);
    struct gs_pool *pool = charge.passed ? NULL : gs_pool_of_graphs(sum.device);
    if (pool)
        gs_pool_settle(pool);
    gs_charge_abort(&charge);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph,
                                                        CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
    GS_NEED(real, cuGraphInstantiateWithParams);
    return with_params(real, exec, graph, params);
}

GS_EXPORT CUresult CUDAAPI cuGraphInstantiateWithParams_ptsz(
    CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
    GS_NEED(real, cuGraphInstantiateWithParams_ptsz);
    return with_params(real, exec, graph, params);
}

GS_EXPORT CUresult CUDAAPI cuGraphLaunch(CUgraphExec exec, CUstream stream) {
    GS_NEED(real, cuGraphLaunch);
    return launch(real, exec, stream);
}

GS_EXPORT CUresult CUDAAPI cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream) {
    GS_NEED(real, cuGraphLaunch_ptsz);
    return launch(real, exec, stream);
}

GS_EXPORT CUresult CUDAAPI cuGraphUpload(CUgraphExec exec, CUstream stream) {
    GS_NEED(real, cuGraphUpload);
    return launch(real, exec, stream);
}

GS_EXPORT CUresult CUDAAPI cuGraphUpload_ptsz(CUgraphExec exec, CUstream stream) {
    GS_NEED(real, cuGraphUpload_ptsz);
    return launch(real, exec, stream);
}

GS_EXPORT CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec exec) {
    GS_NEED(real, cuGraphExecDestroy);
    struct gs_entry entry;
    bool known = gs_slot() && gs_map_take(&executables, key_of(exec), &entry);
    CUresult result = real(exec);
    if (known && result == CUDA_SUCCESS) {
        atomic_fetch_sub(&with_memory, 1);
        struct gs_pool *pool = gs_pool_of_graphs((CUdevice)(uint32_t)entry.extra);
        if (pool)
            gs_pool_settle(pool);
    } else if (known)
        gs_map_put(&executables, key_of(exec), &entry);
    return result;
}

/* An update may bring other sizes: measured again, and the next launch reserves again. */
GS_EXPORT CUresult CUDAAPI cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *node,
                                             CUgraphExecUpdateResult *out) {
    GS_NEED(real, cuGraphExecUpdate);
    return instantiated(real(exec, graph, node, out), &exec, graph);
}

GS_EXPORT CUresult CUDAAPI cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph,
                                                CUgraphExecUpdateResultInfo *info) {
    GS_NEED(real, cuGraphExecUpdate_v2);
    return instantiated(real(exec, graph, info), &exec, graph);
}

GS_EXPORT CUresult CUDAAPI cuDeviceGraphMemTrim(CUdevice device) {
    GS_NEED(real, cuDeviceGraphMemTrim);
    if (!gs_slot())
        return real(device);
    atomic_fetch_add(&gs_graph_trims, 1);
    CUresult result = real(device);
    struct gs_pool *pool = result == CUDA_SUCCESS ? gs_pool_of_graphs(device) : NULL;
    if (pool)
        gs_pool_settle(pool);
    return result;
}

/* ---- building a graph takes nothing; these are here so that every way to name an allocation is
 * seen - */

GS_EXPORT CUresult CUDAAPI cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph,
                                                  const CUgraphNode *after, size_t n,
                                                  CUDA_MEM_ALLOC_NODE_PARAMS *params) {
    GS_NEED(real, cuGraphAddMemAllocNode);
    return real(node, graph, after, n, params);
}

GS_EXPORT CUresult CUDAAPI cuGraphAddNode(CUgraphNode *node, CUgraph graph,
                                          const CUgraphNode *after, size_t n,
                                          CUgraphNodeParams *params) {
    GS_NEED(real, cuGraphAddNode);
    return real(node, graph, after, n, params);
}

GS_EXPORT CUresult CUDAAPI cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph,
                                             const CUgraphNode *after, const CUgraphEdgeData *edges,
                                             size_t n, CUgraphNodeParams *params) {
    GS_NEED(real, cuGraphAddNode_v2);
    return real(node, graph, after, edges, n, params);
}

/* A node of an executable graph was changed: its next launch reserves again, for one that is
 * unknown a child's allocations at most. */
static CUresult changed(CUresult result, CUgraphExec exec, CUgraph child) {
    struct measured sum = {0};
    struct gs_entry entry = {0};
    if (result != CUDA_SUCCESS || !gs_slot())
        return result;
    if (child)
        measure(child, &sum, 16);
    bool known = gs_map_take(&executables, key_of(exec), &entry);
    if (!known && sum.bytes == 0)
        return result;
    CUdevice device = known ? (CUdevice)(uint32_t)entry.extra : sum.device;
    entry = (struct gs_entry){.bytes = entry.bytes + sum.bytes,
                              .dev = gs_dev_of(device),
                              .extra = (uint32_t)device | (uint64_t)(gs_graph_trims - 1) << 32};
    if (gs_map_put(&executables, key_of(exec), &entry) && !known)
        atomic_fetch_add(&with_memory, 1);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                                    CUgraphNodeParams *params) {
    GS_NEED(real, cuGraphExecNodeSetParams);
    CUgraph child = params && params->type == CU_GRAPH_NODE_TYPE_GRAPH ? params->graph.graph : NULL;
    return changed(real(exec, node, params), exec, child);
}

GS_EXPORT CUresult CUDAAPI cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                                              CUgraph child) {
    GS_NEED(real, cuGraphExecChildGraphNodeSetParams);
    return changed(real(exec, node, child), exec, child);
}
