/* Memory that graphs allocate: the driver allocates it when a graph first runs or is uploaded, and
 * keeps it in one pool per device until it is trimmed. An executable graph is measured when it is
 * instantiated: its allocation nodes, with those of its child graphs, are the upper bound of what a
 * launch allocates. */
#include <stdlib.h>

#include "code/code.h"
#include "launch.h"
#include "memory/pool.h"

_Static_assert(sizeof(CUgraphExec) == sizeof(uint64_t), "handles are keys");

/* executable graph + n -> its memory on its n-th device: bytes = the bound, extra = device. Handles
 * are addresses of the driver's objects, so there is room for n between two of them. */
static struct gs_map executables;
/* Their number; while it is 0, launches skip the look-up. */
static _Atomic uint64_t with_memory;

#define NODE_BYTES 4096u /* charged for each node where the driver has no count */

#define MAX_DEPTH 64u

static uint64_t key_of(CUgraphExec exec) {
    return (uint64_t)(uintptr_t)exec;
}

struct measured {
    unsigned n;
    struct {
        CUdevice device;
        uint64_t bytes;
    } on[GS_MAX_DEVICES];
};

/* If the sum cannot be computed, make it so large that it is never granted. */
static void add_bytes(struct measured *sum, CUdevice device, uint64_t bytes) {
    unsigned i = 0;
    while (i < sum->n && sum->on[i].device != device)
        i++;
    if (i == GS_MAX_DEVICES) {
        sum->on[0].bytes = GS_NO_BYTES;
        return;
    }
    if (i == sum->n)
        sum->on[sum->n++].device = device;
    uint64_t total = sum->on[i].bytes + gs_round_up(bytes, GS_BLOCK);
    sum->on[i].bytes = total < GS_NO_BYTES ? total : GS_NO_BYTES;
}

static void measure(CUgraph graph, struct measured *sum, unsigned depth);

static void measure_node(CUgraphNode node, struct measured *sum, unsigned depth) {
    CUgraphNodeType type;
    CUDA_MEM_ALLOC_NODE_PARAMS params;
    CUgraph child;
    if (GS_REAL(cuGraphNodeGetType)(node, &type) != CUDA_SUCCESS)
        return;
    if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC &&
        GS_REAL(cuGraphMemAllocNodeGetParams)(node, &params) == CUDA_SUCCESS)
        add_bytes(sum, params.poolProps.location.id, params.bytesize);
    if (type == CU_GRAPH_NODE_TYPE_GRAPH &&
        GS_REAL(cuGraphChildGraphNodeGetGraph)(node, &child) == CUDA_SUCCESS)
        measure(child, sum, depth + 1);
}

static void measure(CUgraph graph, struct measured *sum, unsigned depth) {
    size_t n = 0;
    __typeof__(&cuGraphGetNodes) get_nodes = GS_REAL(cuGraphGetNodes);
    if (!get_nodes || !GS_REAL(cuGraphMemAllocNodeGetParams) || !GS_REAL(cuGraphNodeGetType) ||
        !GS_REAL(cuGraphChildGraphNodeGetGraph) || get_nodes(graph, NULL, &n) != CUDA_SUCCESS ||
        n == 0)
        return;
    CUgraphNode *nodes = depth < MAX_DEPTH ? calloc(n, sizeof(*nodes)) : NULL;
    if (!nodes)
        add_bytes(sum, 0, GS_NO_BYTES);
    else if (get_nodes(graph, nodes, &n) == CUDA_SUCCESS)
        for (size_t i = 0; i < n; i++)
            measure_node(nodes[i], sum, depth);
    free(nodes);
}

/* ---- the memory of the graph itself: the driver's count charges it ----------------------------
 */

static void graph_made(CUgraphExec exec, CUgraph graph) {
    __typeof__(&cuGraphGetNodes) get_nodes = GS_REAL(cuGraphGetNodes);
    struct gs_here here;
    struct gs_entry old;
    size_t n = 0;
    if (!gs_here(&here))
        return;
    if (get_nodes)
        get_nodes(graph, NULL, &n);
    struct gs_entry entry = {.bytes = gs_overhead_grew(here.dev, n * NODE_BYTES),
                             .context = gs_context_key(here.context),
                             .dev = here.dev,
                             .kind = GS_KIND_WHOLE};
    if (gs_map_take(&gs_graphs, key_of(exec), &old)) /* of a graph that ended with its context */
        gs_release(old.dev, old.bytes);
    if (!gs_map_put(&gs_graphs, key_of(exec), &entry))
        gs_release(here.dev, entry.bytes);
}

static void graph_ran(CUgraphExec exec) {
    struct gs_entry entry;
    if (gs_map_get(&gs_graphs, key_of(exec), &entry) && !entry.extra &&
        gs_map_swap(&gs_graphs, key_of(exec), 0, 1))
        gs_overhead_grew(entry.dev, 0);
}

static void graph_gone(CUgraphExec exec) {
    struct gs_entry entry;
    if (!gs_slot() || !gs_map_take(&gs_graphs, key_of(exec), &entry))
        return;
    gs_release(entry.dev, entry.bytes);
    gs_overhead_shrank(entry.dev);
}

/* ---- records of executable graphs ------------------------------------------------------------ */

/* Memory of the graph that ran last may not be resident any more. */
static void forget_last_graph(CUdevice device) {
    struct gs_pool *pool = gs_pool_of_graphs(device);
    if (pool)
        atomic_store(&pool->last, 0);
}

static unsigned remove_record(CUgraphExec exec, struct measured *was) {
    struct gs_entry entry;
    unsigned n = 0;
    for (; n < GS_MAX_DEVICES && gs_map_take(&executables, key_of(exec) + n, &entry); n++) {
        was->on[n].device = (CUdevice)(uint32_t)entry.extra;
        was->on[n].bytes = entry.bytes;
        forget_last_graph(was->on[n].device);
    }
    if (n)
        atomic_fetch_sub(&with_memory, 1);
    return was->n = n;
}

static bool add_record(CUgraphExec exec, const struct measured *sum) {
    bool all = true;
    for (unsigned i = 0; i < sum->n && all; i++) {
        struct gs_entry entry = {.bytes = sum->on[i].bytes,
                                 .dev = gs_dev_of(sum->on[i].device),
                                 .extra = (uint32_t)sum->on[i].device};
        all = gs_map_put(&executables, key_of(exec) + i, &entry);
        forget_last_graph(sum->on[i].device);
    }
    if (sum->n)
        atomic_fetch_add(&with_memory, 1);
    return all;
}

static CUresult replace_record(CUgraphExec exec, const struct measured *sum) {
    struct measured stale;
    remove_record(exec, &stale);
    if (add_record(exec, sum))
        return CUDA_SUCCESS;
    remove_record(exec, &stale);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult instantiated(CUresult result, const CUgraphExec *exec, CUgraph graph) {
    struct measured sum = {0};
    if (result != CUDA_SUCCESS || !exec || !gs_slot())
        return result;
    measure(graph, &sum, 0);
    result = replace_record(*exec, &sum);
    if (result != CUDA_SUCCESS)
        GS_REAL(cuGraphExecDestroy)(*exec);
    else
        graph_made(*exec, graph);
    return result;
}

/* An update may change sizes: measure again. */
static CUresult updated(CUresult result, CUgraphExec exec, CUgraph graph) {
    struct measured sum = {0};
    gs_compute_changed(exec);
    if (result != CUDA_SUCCESS || !gs_slot())
        return result;
    measure(graph, &sum, 0);
    return replace_record(exec, &sum);
}

/* ---- launch ---------------------------------------------------------------------------------- */

struct rooms {
    unsigned n;
    struct gs_room on[GS_MAX_DEVICES];
};

static void rooms_end(struct rooms *rooms, CUgraphExec ran) {
    for (unsigned i = 0; i < rooms->n; i++) {
        atomic_store(&rooms->on[i].pool->last, ran ? key_of(ran) : 0);
        gs_room_end(&rooms->on[i]);
    }
}

static CUresult rooms_begin(struct rooms *rooms, const struct measured *sum, CUgraphExec exec) {
    rooms->n = 0;
    for (unsigned i = 0; i < sum->n; i++) {
        struct gs_pool *pool = gs_pool_of_graphs(sum->on[i].device);
        CUresult result = pool ? gs_room_begin(&rooms->on[i], pool, sum->on[i].bytes, key_of(exec))
                               : CUDA_ERROR_OUT_OF_MEMORY;
        if (result != CUDA_SUCCESS) {
            rooms_end(rooms, NULL);
            return result;
        }
        rooms->n++;
    }
    return CUDA_SUCCESS;
}

typedef CUresult (*launch_fn)(CUgraphExec, CUstream);

/* The graphs of a device share its graph memory, so an earlier launch does not mean that a graph's
 * memory is still there: reserve room before each launch. */
static CUresult launch_with_memory(launch_fn real, CUgraphExec exec, CUstream stream) {
    struct measured sum = {0};
    struct rooms rooms;
    struct gs_entry entry;
    while (sum.n < GS_MAX_DEVICES && gs_map_get(&executables, key_of(exec) + sum.n, &entry)) {
        sum.on[sum.n].device = (CUdevice)(uint32_t)entry.extra;
        sum.on[sum.n++].bytes = entry.bytes;
    }
    GS_CHANGES;
    CUresult result = rooms_begin(&rooms, &sum, exec);
    if (result != CUDA_SUCCESS)
        return result;
    result = real(exec, stream);
    rooms_end(&rooms, result == CUDA_SUCCESS ? exec : NULL);
    return result;
}

static CUresult launch(launch_fn real, CUgraphExec exec, CUstream stream) {
    struct gs_entry entry;
    if (!gs_slot())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (atomic_load_explicit(&with_memory, memory_order_relaxed) == 0 ||
        !gs_map_get(&executables, key_of(exec), &entry))
        return real(exec, stream);
    return launch_with_memory(real, exec, stream);
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

/* With the flag UPLOAD the driver allocates now, so reserve room around the call. */
static CUresult instantiate_with_params(__typeof__(&cuGraphInstantiateWithParams) real,
                                        CUgraphExec *exec, CUgraph graph,
                                        CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
    struct measured sum = {0};
    struct rooms rooms = {0};
    if (!gs_slot())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (params && params->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) {
        measure(graph, &sum, 0);
        CUresult result = rooms_begin(&rooms, &sum, NULL);
        if (result != CUDA_SUCCESS)
            return result;
    }
    CUresult result = instantiated(real(exec, graph, params), exec, graph);
    rooms_end(&rooms, NULL);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph,
                                                        CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
    GS_NEED(real, cuGraphInstantiateWithParams);
    return instantiate_with_params(real, exec, graph, params);
}

GS_EXPORT CUresult CUDAAPI cuGraphInstantiateWithParams_ptsz(
    CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
    GS_NEED(real, cuGraphInstantiateWithParams_ptsz);
    return instantiate_with_params(real, exec, graph, params);
}

static CUresult launch_admitted(launch_fn real, CUgraphExec exec, CUstream stream, CUstream named) {
    struct gs_admission admission;
    CUresult result = gs_compute_admit(&admission, exec, (struct gs_grid){0}, named, false, true);
    if (result == CUDA_SUCCESS)
        result = launch(real, exec, stream);
    gs_compute_launched(&admission, result);
    if (result == CUDA_SUCCESS)
        graph_ran(exec);
    gs_overhead_if_late();
    return result;
}

/* Exported as `name`. Like a kernel's wrapper if no graph of this process has memory. */
#define GS_GRAPH_WRAPPER(name, key) \
    static GS_APART CUresult name##_slow(CUgraphExec exec, CUstream stream) { \
        GS_NEED(real, name); \
        return launch_admitted(real, exec, stream, key(stream)); \
    } \
    GS_EXPORT CUresult CUDAAPI name(CUgraphExec exec, CUstream stream) { \
        if (atomic_load_explicit(&with_memory, memory_order_relaxed) != 0 || \
            !gs_compute_passes_graph(exec, key(stream))) \
            return name##_slow(exec, stream); \
        return GS_REAL_NOW(name)(exec, stream); \
    }

#define GS_AS_IT_IS(stream) (stream)
GS_GRAPH_WRAPPER(cuGraphLaunch, GS_AS_IT_IS)
GS_GRAPH_WRAPPER(cuGraphLaunch_ptsz, gs_per_thread)

static CUresult upload(launch_fn real, CUgraphExec exec, CUstream stream) {
    CUresult result = launch(real, exec, stream);
    if (result == CUDA_SUCCESS)
        graph_ran(exec);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuGraphUpload(CUgraphExec exec, CUstream stream) {
    GS_NEED(real, cuGraphUpload);
    return upload(real, exec, stream);
}

GS_EXPORT CUresult CUDAAPI cuGraphUpload_ptsz(CUgraphExec exec, CUstream stream) {
    GS_NEED(real, cuGraphUpload_ptsz);
    return upload(real, exec, stream);
}

GS_EXPORT CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec exec) {
    GS_NEED(real, cuGraphExecDestroy);
    struct measured was = {0};
    gs_compute_changed(exec);
    if (!gs_slot() || atomic_load(&with_memory) == 0) {
        CUresult result = real(exec);
        if (result == CUDA_SUCCESS)
            graph_gone(exec);
        return result;
    }
    remove_record(exec, &was);
    CUresult result = real(exec);
    if (result == CUDA_SUCCESS)
        graph_gone(exec);
    if (result != CUDA_SUCCESS)
        add_record(exec, &was);
    for (unsigned i = 0; i < was.n; i++) {
        struct gs_pool *pool = gs_pool_of_graphs(was.on[i].device);
        if (pool)
            gs_pool_settle(pool);
    }
    return result;
}

GS_EXPORT CUresult CUDAAPI cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *node,
                                             CUgraphExecUpdateResult *out) {
    GS_NEED(real, cuGraphExecUpdate);
    return updated(real(exec, graph, node, out), exec, graph);
}

GS_EXPORT CUresult CUDAAPI cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph,
                                                CUgraphExecUpdateResultInfo *info) {
    GS_NEED(real, cuGraphExecUpdate_v2);
    return updated(real(exec, graph, info), exec, graph);
}

GS_EXPORT CUresult CUDAAPI cuDeviceGraphMemTrim(CUdevice device) {
    GS_NEED(real, cuDeviceGraphMemTrim);
    if (!gs_slot())
        return real(device);
    forget_last_graph(device);
    CUresult result = real(device);
    struct gs_pool *pool = result == CUDA_SUCCESS ? gs_pool_of_graphs(device) : NULL;
    if (pool)
        gs_pool_settle(pool);
    return result;
}

/* ---- changes of executable graphs ------------------------------------------------------------ */

/* A child graph of an executable graph was replaced: the bound is the sum of both. */
static CUresult child_changed(CUresult result, CUgraphExec exec, CUgraph child) {
    struct measured sum = {0}, was = {0};
    if (result != CUDA_SUCCESS || !gs_slot() || !child)
        return result;
    measure(child, &sum, 0);
    if (sum.n == 0)
        return result;
    remove_record(exec, &was);
    for (unsigned i = 0; i < was.n; i++)
        add_bytes(&sum, was.on[i].device, was.on[i].bytes);
    return replace_record(exec, &sum);
}

GS_EXPORT CUresult CUDAAPI cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                                    CUgraphNodeParams *params) {
    GS_NEED(real, cuGraphExecNodeSetParams);
    gs_compute_changed(exec);
    CUgraph child = params && params->type == CU_GRAPH_NODE_TYPE_GRAPH ? params->graph.graph : NULL;
    return child_changed(real(exec, node, params), exec, child);
}

GS_EXPORT CUresult CUDAAPI cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                                              CUgraph child) {
    GS_NEED(real, cuGraphExecChildGraphNodeSetParams);
    gs_compute_changed(exec);
    return child_changed(real(exec, node, child), exec, child);
}
