/* Graph launches: all nodes go into the stream, and each begins when its dependencies have
 * ended. */
#include "graph.h"

#include <stdlib.h>

/* One launch, kept until all its ops are done. */
struct graph_run {
    unsigned refs; /* held by its ops, by the runs of child graphs, and while it is being created */
    struct graph_run *parent;
    unsigned parent_node;
    bool begun;
    uint64_t base_ns; /* end of the earlier work in the stream */
    uint64_t *end_ns; /* by node */
    unsigned *first;  /* by node: index of its first dependency; those of the next node follow */
    unsigned *dependency;
};

uint64_t graph_run_ready(struct graph_run *r, unsigned node, uint64_t stream_ns) {
    if (!r->begun) {
        r->base_ns = r->parent ? graph_run_ready(r->parent, r->parent_node, stream_ns) : stream_ns;
        r->begun = true;
    }
    uint64_t ns = r->base_ns;
    for (unsigned i = r->first[node]; i < r->first[node + 1]; i++)
        ns = later(ns, r->end_ns[r->dependency[i]]);
    return ns;
}

void graph_run_end(struct graph_run *r, unsigned node, uint64_t end_ns) {
    r->end_ns[node] = later(r->end_ns[node], end_ns);
    if (r->parent)
        graph_run_end(r->parent, r->parent_node, end_ns);
}

void graph_run_drop(struct graph_run *r) {
    if (!r || --r->refs)
        return;
    graph_run_drop(r->parent);
    free(r->end_ns);
    free(r->first);
    free(r->dependency);
    free(r);
}

static struct graph_run *open_run(struct node **order, size_t n, struct graph_run *parent,
                                  unsigned parent_node) {
    struct graph_run *r = calloc(1, sizeof *r);
    size_t edges = 0;
    for (size_t i = 0; i < n; i++)
        edges += order[i]->n_deps;
    if (!r)
        return NULL;
    *r = (struct graph_run){.refs = 1,
                            .parent = parent,
                            .parent_node = parent_node,
                            .end_ns = calloc(n + 1, sizeof *r->end_ns),
                            .first = calloc(n + 1, sizeof *r->first),
                            .dependency = calloc(edges + 1, sizeof *r->dependency)};
    if (parent)
        parent->refs++;
    if (!r->end_ns || !r->first || !r->dependency)
        return graph_run_drop(r), NULL;
    unsigned at = 0;
    for (size_t i = 0; i < n; i++) {
        order[i]->index = (unsigned)i;
        for (size_t k = 0; k < order[i]->n_deps; k++)
            r->dependency[at++] = order[i]->deps[k]->index;
        r->first[i + 1] = at;
    }
    return r;
}

static CUresult add(struct graph_run *r, const struct work *work, struct mark *mark,
                    struct stream *s, unsigned node) {
    r->refs++;
    return engine_add_node(s, work, mark, r, node);
}

static CUresult add_nothing(struct graph_run *r, struct stream *s, unsigned node) {
    return add(r, &(struct work){.kind = WORK_EMPTY}, NULL, s, node);
}

static CUresult run_event(struct graph_run *r, struct event *e, struct stream *s,
                          enum work_kind kind, unsigned node) {
    struct work work = {.kind = kind};
    if (kind == WORK_WAIT)
        return e->mark ? add(r, &work, e->mark, s, node) : add_nothing(r, s, node);
    work.duration_ns = device_of(s->ctx)->state->config.bubble_ns;
    struct mark *m = calloc(1, sizeof *m);
    CHECK(m, CUDA_ERROR_OUT_OF_MEMORY);
    *m = (struct mark){.refs = 1, .ctx = s->ctx};
    CUresult result = add(r, &work, m, s, node);
    mark_drop(e->mark);
    e->mark = m;
    return result;
}

static CUresult run(const struct graph *g, struct stream *s, unsigned long long flags,
                    struct graph_run *parent, unsigned parent_node);

static CUresult run_node(struct graph_run *r, struct node *n, struct stream *s,
                         unsigned long long flags) {
    CUresult result;
    struct mem *m;
    if (n->disabled)
        return add_nothing(r, s, n->index);
    switch (n->work.kind) {
    case WORK_CHILD:
        return run(n->work.child, s, flags, r, n->index);
    case WORK_RECORD:
    case WORK_WAIT:
        return run_event(r, n->work.event, s, n->work.kind, n->index);
    case WORK_ALLOC:
        if (n->mem->live && (flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH))
            graph_free_address(n->mem->span, n->mem->span->va);
        result = graph_mem_take(n->mem);
        break;
    case WORK_FREE:
        m = space_find(n->work.free);
        CHECK_VALUE(m && m->kind == MEM_GRAPH);
        result = graph_free_address(m, n->work.free);
        break;
    default:
        return add(r, &n->work, NULL, s, n->index);
    }
    return result == CUDA_SUCCESS ? add_nothing(r, s, n->index) : result;
}

static CUresult run(const struct graph *g, struct stream *s, unsigned long long flags,
                    struct graph_run *parent, unsigned parent_node) {
    struct node **order = graph_order(g);
    CHECK_VALUE(order);
    struct graph_run *r = open_run(order, g->n_nodes, parent, parent_node);
    CUresult result = r ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t i = 0; result == CUDA_SUCCESS && i < g->n_nodes; i++)
        result = run_node(r, order[i], s, flags);
    if (result == CUDA_SUCCESS && !g->n_nodes && parent)
        result = add_nothing(parent, s, parent_node);
    graph_run_drop(r);
    free(order);
    return result;
}

CUresult graph_run(const struct graph *g, struct stream *s, unsigned long long flags) {
    return run(g, s, flags, NULL, 0);
}
