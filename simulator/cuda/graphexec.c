/* Executable graphs. */
#include "graph.h"

#include <stdlib.h>

static uint64_t kernel_nodes(const struct graph *g) {
    uint64_t n = 0;
    for (const struct node *at = g->first; at; at = at->next)
        n += at->work.kind == WORK_CHILD ? kernel_nodes(at->work.child)
                                         : at->work.kind == WORK_KERNEL;
    return n;
}

/* Takes the memory of the graph's kernel nodes, once. An update does not change it. */
static CUresult take_nodes(struct exec *x, struct context *ctx) {
    uint64_t each = ctx ? costs_of(ctx->device)->graph_bytes : 0;
    if (x->context_id || !each)
        return CUDA_SUCCESS;
    uint64_t bytes = kernel_nodes(x->graph) * each;
    CUresult result = share_blocks(ctx, &ctx->graph_bytes, bytes);
    if (result == CUDA_SUCCESS) {
        x->context_id = ctx->id;
        x->bytes = bytes;
    }
    return result;
}

static void give_nodes(const struct exec *x) {
    for (struct context *ctx = sim.contexts; ctx; ctx = ctx->next)
        if (ctx->id == x->context_id)
            unshare_blocks(ctx, &ctx->graph_bytes, x->bytes);
}

static CUresult instantiate(CUgraphExec *out, CUgraph hGraph, unsigned long long flags) {
    struct graph *g = (struct graph *)hGraph;
    CHECK_VALUE(out && sim_is(g, OBJ_GRAPH));
    struct node **order = graph_order(g);
    CHECK_VALUE(order); /* NULL: the graph has a cycle */
    free(order);
    struct exec *x = calloc(1, sizeof *x);
    struct graph *copy = x ? graph_copy(g) : NULL;
    if (!copy)
        return free(x), CUDA_ERROR_OUT_OF_MEMORY;
    *x = (struct exec){.magic = OBJ_EXEC, .graph = copy, .flags = flags};
    struct context *ctx = current_context();
    if (ctx && !costs_of(ctx->device)->graph_late) {
        CUresult result = take_nodes(x, ctx);
        if (result != CUDA_SUCCESS)
            return graph_close(copy), free(x), result;
    }
    *out = (CUgraphExec)x;
    return CUDA_SUCCESS;
}

static CUresult upload(struct exec *x, struct context *ctx) {
    CUresult result = take_nodes(x, ctx);
    return result == CUDA_SUCCESS ? graph_mem_reserve(x->graph) : result;
}

EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph hGraph,
                                            unsigned long long flags) {
    ENTER();
    CHECK_VALUE(!(flags & ~15ull));
    return instantiate(out, hGraph, flags);
}

EXPORT CUresult cuGraphInstantiate_v2(CUgraphExec *out, CUgraph hGraph, CUgraphNode *node,
                                      char *log, size_t size) {
    if (node)
        *node = NULL;
    if (log && size)
        *log = '\0';
    return cuGraphInstantiateWithFlags(out, hGraph, 0);
}

EXPORT CUresult cuGraphInstantiate(CUgraphExec *out, CUgraph hGraph, CUgraphNode *node, char *log,
                                   size_t size) {
    return cuGraphInstantiate_v2(out, hGraph, node, log, size);
}

EXPORT CUresult cuGraphInstantiateWithParams(CUgraphExec *out, CUgraph hGraph,
                                             CUDA_GRAPH_INSTANTIATE_PARAMS *params) {
    ENTER();
    CHECK_VALUE(params);
    CUresult result = instantiate(out, hGraph, params->flags);
    params->hErrNode_out = NULL;
    params->result_out =
        result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
    if (result == CUDA_SUCCESS && (params->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD))
        result = upload((struct exec *)*out, current_context());
    return result;
}

#define ENTER_EXEC(x, handle) \
    ENTER(); \
    struct exec *x = (struct exec *)(handle); \
    CHECK_VALUE(sim_is(x, OBJ_EXEC))

EXPORT CUresult cuGraphExecDestroy(CUgraphExec hExec) {
    ENTER_EXEC(x, hExec);
    give_nodes(x);
    graph_close(x->graph);
    sim_bury(x, true);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphExecGetFlags(CUgraphExec hExec, cuuint64_t *flags) {
    ENTER_EXEC(x, hExec);
    CHECK_VALUE(flags);
    *flags = x->flags;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphUpload(CUgraphExec hExec, CUstream hStream) {
    ENTER_EXEC(x, hExec);
    struct stream *s = stream_of(current_context(), hStream);
    CHECK_HANDLE(s);
    return upload(x, s->ctx);
}

static CUresult launch(CUgraphExec hExec, CUstream hStream, uint64_t *cost_ns) {
    ENTER_EXEC(x, hExec);
    struct stream *s = stream_of(current_context(), hStream);
    CHECK(s,
          hStream > CU_STREAM_PER_THREAD ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_CONTEXT);
    *cost_ns = sim.device[s->ctx->device].sim.state->config.launch_ns;
    if (s->capture) {
        CHECK(!graph_has_mem(x->graph), CUDA_ERROR_NOT_SUPPORTED);
        struct work work = {.kind = WORK_CHILD, .child = graph_copy(x->graph)};
        CHECK(work.child, CUDA_ERROR_OUT_OF_MEMORY);
        work.child->owned = true;
        return capture_work(s, &work, NULL);
    }
    CUresult result = upload(x, s->ctx);
    return result == CUDA_SUCCESS ? graph_run(x->graph, s, x->flags) : result;
}

EXPORT CUresult cuGraphLaunch(CUgraphExec hExec, CUstream hStream) {
    uint64_t began_ns = sim_now_ns(), cost_ns = 0;
    CUresult result = launch(hExec, hStream, &cost_ns);
    engine_spend(began_ns + cost_ns);
    return result;
}

/* Succeeds when both graphs have the same number of nodes, of the same kinds in the same order. */
EXPORT CUresult cuGraphExecUpdate_v2(CUgraphExec hExec, CUgraph hGraph,
                                     CUgraphExecUpdateResultInfo *info) {
    ENTER_EXEC(x, hExec);
    struct graph *g = (struct graph *)hGraph;
    CHECK_VALUE(sim_is(g, OBJ_GRAPH) && info);
    *info = (CUgraphExecUpdateResultInfo){.result = CU_GRAPH_EXEC_UPDATE_SUCCESS};
    struct node *a = x->graph->first, *b = g->first;
    for (; a && b && a->work.kind == b->work.kind && a->n_deps == b->n_deps; a = a->next)
        b = b->next;
    if (a || b || graph_has_mem(g)) {
        info->result = CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
        info->errorNode = (CUgraphNode)b;
        return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    }
    struct graph *copy = graph_copy(g);
    CHECK(copy, CUDA_ERROR_OUT_OF_MEMORY);
    graph_close(x->graph);
    x->graph = copy;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphExecUpdate(CUgraphExec hExec, CUgraph hGraph, CUgraphNode *node,
                                  CUgraphExecUpdateResult *result) {
    CUgraphExecUpdateResultInfo info;
    CUresult error = cuGraphExecUpdate_v2(hExec, hGraph, &info);
    if (node)
        *node = info.errorNode;
    if (result)
        *result = info.result;
    return error;
}

EXPORT CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec hExec, CUgraphNode hNode,
                                                   CUgraph child) {
    ENTER_EXEC(x, hExec);
    struct graph *g = (struct graph *)child;
    CHECK_VALUE(sim_is(g, OBJ_GRAPH) && !graph_has_mem(g));
    for (struct node *n = x->graph->first; n; n = n->next) {
        if (n->original != (struct node *)hNode || n->work.kind != WORK_CHILD)
            continue;
        CHECK_VALUE(n->work.child->n_nodes == g->n_nodes);
        struct graph *copy = graph_copy(g);
        CHECK(copy, CUDA_ERROR_OUT_OF_MEMORY);
        graph_close(n->work.child);
        n->work.child = copy;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

/* User objects: a destructor is called when the last reference is released. */
struct user_object {
    uint32_t magic;
    unsigned refs;
    CUhostFn destroy;
    void *data;
};

EXPORT CUresult cuUserObjectCreate(CUuserObject *out, void *ptr, CUhostFn destroy,
                                   unsigned int refs, unsigned int flags) {
    ENTER();
    CHECK_VALUE(out && destroy && refs && flags == CU_USER_OBJECT_NO_DESTRUCTOR_SYNC);
    struct user_object *u = malloc(sizeof *u);
    CHECK(u, CUDA_ERROR_OUT_OF_MEMORY);
    *u = (struct user_object){.magic = OBJ_USER, .refs = refs, .destroy = destroy, .data = ptr};
    *out = (CUuserObject)u;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuUserObjectRetain(CUuserObject handle, unsigned int count) {
    ENTER();
    CHECK_VALUE(sim_is(handle, OBJ_USER) && count);
    ((struct user_object *)handle)->refs += count;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuUserObjectRelease(CUuserObject handle, unsigned int count) {
    ENTER();
    struct user_object *u = (struct user_object *)handle;
    CHECK_VALUE(sim_is(u, OBJ_USER) && count && count <= u->refs);
    u->refs -= count;
    if (u->refs)
        return CUDA_SUCCESS;
    u->destroy(u->data);
    u->magic = 0;
    free(u);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphRetainUserObject(CUgraph hGraph, CUuserObject handle, unsigned int count,
                                        unsigned int flags) {
    CHECK_VALUE(hGraph && !(flags & ~1u));
    return flags & CU_GRAPH_USER_OBJECT_MOVE ? CUDA_SUCCESS : cuUserObjectRetain(handle, count);
}

EXPORT CUresult cuGraphReleaseUserObject(CUgraph hGraph, CUuserObject handle, unsigned int count) {
    CHECK_VALUE(hGraph);
    return cuUserObjectRelease(handle, count);
}
