/* Nodes: adding them, and reading and changing their parameters. */
#include "graph.h"

#include <string.h>

static struct node *node_of(CUgraphNode handle, int kind) {
    struct node *n = (struct node *)handle;
    return sim_is(n, OBJ_NODE) && (kind < 0 || (int)n->work.kind == kind) ? n : NULL;
}

/* Adds a node to a graph. Call locked. */
static CUresult add(CUgraphNode *out, CUgraph hGraph, const CUgraphNode *deps, size_t n_deps,
                    const struct work *work) {
    struct graph *g = (struct graph *)hGraph;
    CHECK_VALUE(out && sim_is(g, OBJ_GRAPH) && (deps || !n_deps));
    for (size_t i = 0; i < n_deps; i++) {
        struct node *d = node_of(deps[i], -1);
        CHECK_VALUE(d && d->graph == g);
    }
    struct node *n = graph_add(g, work, (struct node *const *)deps, n_deps);
    CHECK(n, CUDA_ERROR_OUT_OF_MEMORY);
    *out = (CUgraphNode)n;
    return work->kind == WORK_ALLOC ? graph_mem_open(n) : CUDA_SUCCESS;
}

#define ADD_PARAMETERS CUgraphNode *out, CUgraph hGraph, const CUgraphNode *deps, size_t n_deps
#define ADD(work) add(out, hGraph, deps, n_deps, work)

EXPORT CUresult cuGraphAddEmptyNode(ADD_PARAMETERS) {
    ENTER();
    struct work work = {.kind = WORK_EMPTY};
    return ADD(&work);
}

EXPORT CUresult cuGraphAddKernelNode_v2(ADD_PARAMETERS, const CUDA_KERNEL_NODE_PARAMS *params) {
    ENTER();
    struct work work;
    CHECK_VALUE(params);
    CUresult result = kernel_work(current_context(), params, &work);
    return result == CUDA_SUCCESS ? ADD(&work) : result;
}

static CUDA_KERNEL_NODE_PARAMS from_v1(const CUDA_KERNEL_NODE_PARAMS_v1 *v1) {
    CUDA_KERNEL_NODE_PARAMS p = {0};
    memcpy(&p, v1, sizeof *v1);
    return p;
}

EXPORT CUresult cuGraphAddKernelNode(ADD_PARAMETERS, const CUDA_KERNEL_NODE_PARAMS_v1 *params) {
    CHECK_VALUE(params);
    CUDA_KERNEL_NODE_PARAMS p = from_v1(params);
    return cuGraphAddKernelNode_v2(out, hGraph, deps, n_deps, &p);
}

EXPORT CUresult cuGraphAddMemcpyNode(ADD_PARAMETERS, const CUDA_MEMCPY3D *params, CUcontext ctx) {
    ENTER();
    struct work work;
    CHECK_VALUE(params);
    CHECK(context_of(ctx), CUDA_ERROR_INVALID_CONTEXT);
    CUresult result = copy_work(params, &work);
    return result == CUDA_SUCCESS ? ADD(&work) : result;
}

EXPORT CUresult cuGraphAddMemsetNode(ADD_PARAMETERS, const CUDA_MEMSET_NODE_PARAMS *params,
                                     CUcontext ctx) {
    ENTER();
    struct work work;
    CHECK_VALUE(params);
    CHECK(context_of(ctx), CUDA_ERROR_INVALID_CONTEXT);
    CUresult result = set_work(params, &work);
    return result == CUDA_SUCCESS ? ADD(&work) : result;
}

EXPORT CUresult cuGraphAddHostNode(ADD_PARAMETERS, const CUDA_HOST_NODE_PARAMS *params) {
    ENTER();
    CHECK_VALUE(params && params->fn);
    struct work work = {.kind = WORK_HOST, .host = *params};
    return ADD(&work);
}

/* The node gets a copy of the child graph. */
EXPORT CUresult cuGraphAddChildGraphNode(ADD_PARAMETERS, CUgraph child) {
    ENTER();
    CHECK_VALUE(sim_is(child, OBJ_GRAPH) && child != hGraph);
    CHECK(!graph_has_mem((struct graph *)child), CUDA_ERROR_NOT_SUPPORTED);
    struct work work = {.kind = WORK_CHILD, .child = graph_copy((struct graph *)child)};
    CHECK(work.child, CUDA_ERROR_OUT_OF_MEMORY);
    work.child->owned = true;
    return ADD(&work);
}

static CUresult add_event(ADD_PARAMETERS, CUevent event, enum work_kind kind) {
    ENTER();
    CHECK_VALUE(sim_is(event, OBJ_EVENT));
    struct work work = {.kind = kind, .event = (struct event *)event};
    return ADD(&work);
}

EXPORT CUresult cuGraphAddEventRecordNode(ADD_PARAMETERS, CUevent event) {
    return add_event(out, hGraph, deps, n_deps, event, WORK_RECORD);
}

EXPORT CUresult cuGraphAddEventWaitNode(ADD_PARAMETERS, CUevent event) {
    return add_event(out, hGraph, deps, n_deps, event, WORK_WAIT);
}

EXPORT CUresult cuGraphAddMemAllocNode(ADD_PARAMETERS, CUDA_MEM_ALLOC_NODE_PARAMS *params) {
    ENTER();
    CHECK_VALUE(params && params->bytesize &&
                params->poolProps.location.type == CU_MEM_LOCATION_TYPE_DEVICE);
    CHECK_DEVICE(params->poolProps.location.id);
    struct work work = {.kind = WORK_ALLOC, .alloc = *params};
    CUresult result = ADD(&work);
    if (result == CUDA_SUCCESS)
        params->dptr = graph_alloc_address((struct node *)*out);
    return result;
}

EXPORT CUresult cuGraphAddMemFreeNode(ADD_PARAMETERS, CUdeviceptr dptr) {
    ENTER();
    struct mem *m = space_find(dptr);
    CHECK_VALUE(m && m->kind == MEM_GRAPH && m->va == dptr);
    struct work work = {.kind = WORK_FREE, .free = dptr};
    return ADD(&work);
}

EXPORT CUresult cuGraphAddNode(ADD_PARAMETERS, CUgraphNodeParams *p) {
    CHECK_VALUE(p);
    switch (p->type) {
    case CU_GRAPH_NODE_TYPE_EMPTY:
        return cuGraphAddEmptyNode(out, hGraph, deps, n_deps);
    case CU_GRAPH_NODE_TYPE_KERNEL:
        return cuGraphAddKernelNode_v2(out, hGraph, deps, n_deps,
                                       (const CUDA_KERNEL_NODE_PARAMS *)&p->kernel);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        return cuGraphAddMemcpyNode(out, hGraph, deps, n_deps, &p->memcpy.copyParams,
                                    p->memcpy.copyCtx);
    case CU_GRAPH_NODE_TYPE_MEMSET:
        return cuGraphAddMemsetNode(out, hGraph, deps, n_deps,
                                    (const CUDA_MEMSET_NODE_PARAMS *)&p->memset, p->memset.ctx);
    case CU_GRAPH_NODE_TYPE_HOST:
        return cuGraphAddHostNode(out, hGraph, deps, n_deps,
                                  (const CUDA_HOST_NODE_PARAMS *)&p->host);
    case CU_GRAPH_NODE_TYPE_GRAPH:
        return cuGraphAddChildGraphNode(out, hGraph, deps, n_deps, p->graph.graph);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        return cuGraphAddEventWaitNode(out, hGraph, deps, n_deps, p->eventWait.event);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        return cuGraphAddEventRecordNode(out, hGraph, deps, n_deps, p->eventRecord.event);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC: {
        CUDA_MEM_ALLOC_NODE_PARAMS alloc = {.poolProps = p->alloc.poolProps,
                                            .accessDescs = p->alloc.accessDescs,
                                            .accessDescCount = p->alloc.accessDescCount,
                                            .bytesize = p->alloc.bytesize};
        CUresult result = cuGraphAddMemAllocNode(out, hGraph, deps, n_deps, &alloc);
        p->alloc.dptr = alloc.dptr;
        return result;
    }
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
        return cuGraphAddMemFreeNode(out, hGraph, deps, n_deps, p->free.dptr);
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

EXPORT CUresult cuGraphNodeGetType(CUgraphNode hNode, CUgraphNodeType *type) {
    static const CUgraphNodeType types[] = {
        [WORK_EMPTY] = CU_GRAPH_NODE_TYPE_EMPTY,
        [WORK_KERNEL] = CU_GRAPH_NODE_TYPE_KERNEL,
        [WORK_COPY] = CU_GRAPH_NODE_TYPE_MEMCPY,
        [WORK_SET] = CU_GRAPH_NODE_TYPE_MEMSET,
        [WORK_HOST] = CU_GRAPH_NODE_TYPE_HOST,
        [WORK_RECORD] = CU_GRAPH_NODE_TYPE_EVENT_RECORD,
        [WORK_WAIT] = CU_GRAPH_NODE_TYPE_WAIT_EVENT,
        [WORK_VALUE] = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
        [WORK_ALLOC] = CU_GRAPH_NODE_TYPE_MEM_ALLOC,
        [WORK_FREE] = CU_GRAPH_NODE_TYPE_MEM_FREE,
        [WORK_CHILD] = CU_GRAPH_NODE_TYPE_GRAPH,
    };
    ENTER();
    struct node *n = node_of(hNode, -1);
    CHECK_VALUE(n && type);
    *type = types[n->work.kind];
    return CUDA_SUCCESS;
}

/* GET defines a function that returns part of the node's work. SET defines one that replaces the
 * work by what `fill` makes of the parameters. */
#define GET(name, kind, type, field) \
    EXPORT CUresult name(CUgraphNode hNode, type *params) { \
        ENTER(); \
        struct node *n = node_of(hNode, kind); \
        CHECK_VALUE(n &&params); \
        *params = n->work.field; \
        return CUDA_SUCCESS; \
    }
GET(cuGraphKernelNodeGetParams_v2, WORK_KERNEL, CUDA_KERNEL_NODE_PARAMS, kernel.params)
GET(cuGraphMemcpyNodeGetParams, WORK_COPY, CUDA_MEMCPY3D, copy_params)
GET(cuGraphMemsetNodeGetParams, WORK_SET, CUDA_MEMSET_NODE_PARAMS, set_params)
GET(cuGraphHostNodeGetParams, WORK_HOST, CUDA_HOST_NODE_PARAMS, host)
GET(cuGraphMemAllocNodeGetParams, WORK_ALLOC, CUDA_MEM_ALLOC_NODE_PARAMS, alloc)
GET(cuGraphMemFreeNodeGetParams, WORK_FREE, CUdeviceptr, free)

EXPORT CUresult cuGraphKernelNodeGetParams(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS_v1 *params) {
    CUDA_KERNEL_NODE_PARAMS p;
    CHECK_VALUE(params);
    CUresult result = cuGraphKernelNodeGetParams_v2(hNode, &p);
    if (result == CUDA_SUCCESS)
        memcpy(params, &p, sizeof *params);
    return result;
}

#define GET_HANDLE(name, kind, type, field) \
    EXPORT CUresult name(CUgraphNode hNode, type *handle) { \
        ENTER(); \
        struct node *n = node_of(hNode, kind); \
        CHECK_VALUE(n &&handle); \
        *handle = (type)n->work.field; \
        return CUDA_SUCCESS; \
    }
GET_HANDLE(cuGraphChildGraphNodeGetGraph, WORK_CHILD, CUgraph, child)
GET_HANDLE(cuGraphEventRecordNodeGetEvent, WORK_RECORD, CUevent, event)
GET_HANDLE(cuGraphEventWaitNodeGetEvent, WORK_WAIT, CUevent, event)

/* Finds the node's counterpart in an executable graph, or returns the node itself if exec is
 * NULL. */
static struct node *twin(struct exec *exec, CUgraphNode hNode, enum work_kind kind) {
    struct node *n = node_of(hNode, (int)kind);
    if (!exec || !n)
        return n;
    for (struct node *x = exec->graph->first; x; x = x->next)
        if (x->original == n)
            return x;
    return NULL;
}

static CUresult set_kernel(struct exec *exec, CUgraphNode hNode,
                           const CUDA_KERNEL_NODE_PARAMS *params) {
    ENTER();
    struct work work;
    struct node *n = twin(exec, hNode, WORK_KERNEL);
    CHECK_VALUE(n && params);
    CUresult result = kernel_work(current_context(), params, &work);
    if (result == CUDA_SUCCESS)
        n->work = work;
    return result;
}

static CUresult set_copy(struct exec *exec, CUgraphNode hNode, const CUDA_MEMCPY3D *params) {
    ENTER();
    struct work work;
    struct node *n = twin(exec, hNode, WORK_COPY);
    CHECK_VALUE(n && params);
    CUresult result = copy_work(params, &work);
    if (result == CUDA_SUCCESS)
        n->work = work;
    return result;
}

static CUresult set_set(struct exec *exec, CUgraphNode hNode,
                        const CUDA_MEMSET_NODE_PARAMS *params) {
    ENTER();
    struct work work;
    struct node *n = twin(exec, hNode, WORK_SET);
    CHECK_VALUE(n && params);
    CUresult result = set_work(params, &work);
    if (result == CUDA_SUCCESS)
        n->work = work;
    return result;
}

static CUresult set_host(struct exec *exec, CUgraphNode hNode,
                         const CUDA_HOST_NODE_PARAMS *params) {
    ENTER();
    struct node *n = twin(exec, hNode, WORK_HOST);
    CHECK_VALUE(n && params && params->fn);
    n->work.host = *params;
    return CUDA_SUCCESS;
}

static CUresult set_event(struct exec *exec, CUgraphNode hNode, CUevent event,
                          enum work_kind kind) {
    ENTER();
    struct node *n = twin(exec, hNode, kind);
    CHECK_VALUE(n && sim_is(event, OBJ_EVENT));
    n->work.event = (struct event *)event;
    return CUDA_SUCCESS;
}

static struct exec *exec_of(CUgraphExec handle) {
    return sim_is(handle, OBJ_EXEC) ? (struct exec *)handle : NULL;
}

EXPORT CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode n, const CUDA_KERNEL_NODE_PARAMS *p) {
    return set_kernel(NULL, n, p);
}
EXPORT CUresult cuGraphKernelNodeSetParams(CUgraphNode n, const CUDA_KERNEL_NODE_PARAMS_v1 *v1) {
    CHECK_VALUE(v1);
    CUDA_KERNEL_NODE_PARAMS p = from_v1(v1);
    return set_kernel(NULL, n, &p);
}
EXPORT CUresult cuGraphMemcpyNodeSetParams(CUgraphNode n, const CUDA_MEMCPY3D *p) {
    return set_copy(NULL, n, p);
}
EXPORT CUresult cuGraphMemsetNodeSetParams(CUgraphNode n, const CUDA_MEMSET_NODE_PARAMS *p) {
    return set_set(NULL, n, p);
}
EXPORT CUresult cuGraphHostNodeSetParams(CUgraphNode n, const CUDA_HOST_NODE_PARAMS *p) {
    return set_host(NULL, n, p);
}
EXPORT CUresult cuGraphEventRecordNodeSetEvent(CUgraphNode n, CUevent e) {
    return set_event(NULL, n, e, WORK_RECORD);
}
EXPORT CUresult cuGraphEventWaitNodeSetEvent(CUgraphNode n, CUevent e) {
    return set_event(NULL, n, e, WORK_WAIT);
}
EXPORT CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec x, CUgraphNode n,
                                                  const CUDA_KERNEL_NODE_PARAMS *p) {
    CHECK_VALUE(exec_of(x));
    return set_kernel(exec_of(x), n, p);
}
EXPORT CUresult cuGraphExecKernelNodeSetParams(CUgraphExec x, CUgraphNode n,
                                               const CUDA_KERNEL_NODE_PARAMS_v1 *v1) {
    CHECK_VALUE(exec_of(x) && v1);
    CUDA_KERNEL_NODE_PARAMS p = from_v1(v1);
    return set_kernel(exec_of(x), n, &p);
}
EXPORT CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec x, CUgraphNode n, const CUDA_MEMCPY3D *p,
                                               CUcontext ctx) {
    CHECK_VALUE(exec_of(x) && ctx);
    return set_copy(exec_of(x), n, p);
}
EXPORT CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec x, CUgraphNode n,
                                               const CUDA_MEMSET_NODE_PARAMS *p, CUcontext ctx) {
    CHECK_VALUE(exec_of(x) && ctx);
    return set_set(exec_of(x), n, p);
}
EXPORT CUresult cuGraphExecHostNodeSetParams(CUgraphExec x, CUgraphNode n,
                                             const CUDA_HOST_NODE_PARAMS *p) {
    CHECK_VALUE(exec_of(x));
    return set_host(exec_of(x), n, p);
}
EXPORT CUresult cuGraphExecEventRecordNodeSetEvent(CUgraphExec x, CUgraphNode n, CUevent e) {
    CHECK_VALUE(exec_of(x));
    return set_event(exec_of(x), n, e, WORK_RECORD);
}
EXPORT CUresult cuGraphExecEventWaitNodeSetEvent(CUgraphExec x, CUgraphNode n, CUevent e) {
    CHECK_VALUE(exec_of(x));
    return set_event(exec_of(x), n, e, WORK_WAIT);
}

static CUresult set_any(struct exec *exec, CUgraphNode n, CUgraphNodeParams *p) {
    CHECK_VALUE(p);
    switch (p->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        return set_kernel(exec, n, (const CUDA_KERNEL_NODE_PARAMS *)&p->kernel);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        return set_copy(exec, n, &p->memcpy.copyParams);
    case CU_GRAPH_NODE_TYPE_MEMSET:
        return set_set(exec, n, (const CUDA_MEMSET_NODE_PARAMS *)&p->memset);
    case CU_GRAPH_NODE_TYPE_HOST:
        return set_host(exec, n, (const CUDA_HOST_NODE_PARAMS *)&p->host);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        return set_event(exec, n, p->eventRecord.event, WORK_RECORD);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        return set_event(exec, n, p->eventWait.event, WORK_WAIT);
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

EXPORT CUresult cuGraphNodeSetParams(CUgraphNode n, CUgraphNodeParams *p) {
    return set_any(NULL, n, p);
}
EXPORT CUresult cuGraphExecNodeSetParams(CUgraphExec x, CUgraphNode n, CUgraphNodeParams *p) {
    CHECK_VALUE(exec_of(x));
    return set_any(exec_of(x), n, p);
}

EXPORT CUresult cuGraphNodeSetEnabled(CUgraphExec x, CUgraphNode hNode, unsigned int enabled) {
    ENTER();
    struct node *any = node_of(hNode, -1);
    CHECK_VALUE(exec_of(x) && any);
    struct node *n = twin(exec_of(x), hNode, any->work.kind);
    CHECK_VALUE(n && (n->work.kind == WORK_KERNEL || n->work.kind == WORK_COPY ||
                      n->work.kind == WORK_SET));
    n->disabled = !enabled;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphNodeGetEnabled(CUgraphExec x, CUgraphNode hNode, unsigned int *enabled) {
    ENTER();
    struct node *any = node_of(hNode, -1);
    CHECK_VALUE(exec_of(x) && any && enabled);
    struct node *n = twin(exec_of(x), hNode, any->work.kind);
    CHECK_VALUE(n);
    *enabled = !n->disabled;
    return CUDA_SUCCESS;
}
