/* The structure of graphs: nodes, edges, copies. */
#include "graph.h"

#include <stdlib.h>
#include <string.h>

struct graph *graph_open(void) {
    struct graph *g = calloc(1, sizeof *g);
    if (g)
        g->magic = OBJ_GRAPH;
    return g;
}

static void free_node(struct node *n) {
    if (n->work.kind == WORK_CHILD)
        graph_close(n->work.child);
    if (n->mem)
        graph_mem_drop(n->mem);
    n->magic = 0;
    free(n->deps);
    free(n);
}

void graph_close(struct graph *g) {
    while (g->first) {
        struct node *n = g->first;
        g->first = n->next;
        free_node(n);
    }
    g->magic = 0;
    free(g);
}

bool graph_depend(struct node *n, struct node *on) {
    for (size_t i = 0; i < n->n_deps; i++)
        if (n->deps[i] == on)
            return true;
    struct node **deps = realloc(n->deps, (n->n_deps + 1) * sizeof(struct node *));
    if (!deps)
        return false;
    deps[n->n_deps++] = on;
    n->deps = deps;
    return true;
}

struct node *graph_add(struct graph *g, const struct work *work, struct node *const *deps,
                       size_t n_deps) {
    struct node *n = calloc(1, sizeof *n);
    if (!n)
        return NULL;
    *n = (struct node){.magic = OBJ_NODE, .graph = g, .work = *work};
    for (size_t i = 0; i < n_deps; i++)
        graph_depend(n, deps[i]);
    if (g->last)
        g->last->next = n;
    else
        g->first = n;
    g->last = n;
    g->n_nodes++;
    return n;
}

static struct node *copy_in(const struct graph *g, const struct node *original) {
    for (struct node *n = g->first; n; n = n->next)
        if (n->original == original)
            return n;
    return NULL;
}

struct graph *graph_copy(const struct graph *from) {
    struct graph *g = graph_open();
    for (struct node *n = from->first; g && n; n = n->next) {
        struct work work = n->work;
        if (work.kind == WORK_CHILD)
            work.child = graph_copy(n->work.child);
        struct node *c = graph_add(g, &work, NULL, 0);
        if (!c)
            return NULL;
        c->original = n;
        c->disabled = n->disabled;
        c->mem = n->mem;
        if (c->mem)
            c->mem->refs++;
    }
    for (struct node *n = from->first; g && n; n = n->next)
        for (size_t i = 0; i < n->n_deps; i++)
            graph_depend(copy_in(g, n), copy_in(g, n->deps[i]));
    return g;
}

static bool is_free_to_go(const struct node *n, unsigned visit) {
    for (size_t i = 0; i < n->n_deps; i++)
        if (n->deps[i]->visit != visit)
            return false;
    return true;
}

struct node **graph_order(const struct graph *g) {
    static unsigned visit;
    struct node **order = calloc(g->n_nodes + 1, sizeof(struct node *));
    size_t n = 0, before = 1;
    visit++;
    while (order && n != before) {
        before = n;
        for (struct node *x = g->first; x; x = x->next) {
            if (x->visit == visit || !is_free_to_go(x, visit))
                continue;
            x->visit = visit;
            order[n++] = x;
        }
    }
    if (order && n == g->n_nodes)
        return order;
    free(order);
    return NULL;
}

static struct graph *graph_of(CUgraph handle) {
    struct graph *g = (struct graph *)handle;
    return sim_is(g, OBJ_GRAPH) ? g : NULL;
}

static struct node *node_of(CUgraphNode handle) {
    struct node *n = (struct node *)handle;
    return sim_is(n, OBJ_NODE) ? n : NULL;
}

#define ENTER_GRAPH(g, handle) \
    ENTER(); \
    struct graph *g = graph_of(handle); \
    CHECK_VALUE(g)
#define ENTER_NODE(n, handle) \
    ENTER(); \
    struct node *n = node_of(handle); \
    CHECK_VALUE(n)

EXPORT CUresult cuGraphCreate(CUgraph *phGraph, unsigned int flags) {
    ENTER();
    CHECK_VALUE(phGraph && !flags);
    struct graph *g = graph_open();
    CHECK(g, CUDA_ERROR_OUT_OF_MEMORY);
    *phGraph = (CUgraph)g;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphDestroy(CUgraph hGraph) {
    ENTER_GRAPH(g, hGraph);
    CHECK_VALUE(!g->owned);
    graph_close(g);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphClone(CUgraph *out, CUgraph original) {
    ENTER_GRAPH(g, original);
    CHECK_VALUE(out);
    CHECK(!graph_has_mem(g),
          CUDA_ERROR_NOT_SUPPORTED); /* documented: a graph with memory nodes cannot be cloned */
    struct graph *copy = graph_copy(g);
    CHECK(copy, CUDA_ERROR_OUT_OF_MEMORY);
    *out = (CUgraph)copy;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphNodeFindInClone(CUgraphNode *out, CUgraphNode original, CUgraph clone) {
    ENTER_GRAPH(g, clone);
    CHECK_VALUE(out && copy_in(g, node_of(original)));
    *out = (CUgraphNode)copy_in(g, node_of(original));
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphDestroyNode(CUgraphNode hNode) {
    ENTER_NODE(n, hNode);
    struct graph *g = n->graph;
    CHECK(!graph_has_mem(g), CUDA_ERROR_NOT_SUPPORTED);
    g->last = NULL;
    for (struct node **at = &g->first; *at;) {
        struct node *x = *at;
        if (x == n) {
            *at = x->next;
            continue;
        }
        size_t kept = 0;
        for (size_t i = 0; i < x->n_deps; i++)
            if (x->deps[i] != n)
                x->deps[kept++] = x->deps[i];
        x->n_deps = kept;
        g->last = x;
        at = &x->next;
    }
    g->n_nodes--;
    free_node(n);
    return CUDA_SUCCESS;
}

/* Fills up to *count handles and zeroes the remaining ones; with a NULL list it only counts. */
static CUresult list_nodes(struct node *const *from, size_t n, CUgraphNode *nodes, size_t *count) {
    for (size_t i = 0; nodes && i < *count; i++)
        nodes[i] = i < n ? (CUgraphNode)from[i] : NULL;
    if (!nodes || *count > n)
        *count = n;
    return CUDA_SUCCESS;
}

static CUresult list_graph(const struct graph *g, bool roots, CUgraphNode *nodes, size_t *count) {
    struct node **all = calloc(g->n_nodes + 1, sizeof(struct node *));
    size_t n = 0;
    CHECK(all, CUDA_ERROR_OUT_OF_MEMORY);
    for (struct node *x = g->first; x; x = x->next)
        if (!roots || !x->n_deps)
            all[n++] = x;
    CUresult result = list_nodes(all, n, nodes, count);
    free(all);
    return result;
}

EXPORT CUresult cuGraphGetNodes(CUgraph hGraph, CUgraphNode *nodes, size_t *count) {
    ENTER_GRAPH(g, hGraph);
    CHECK_VALUE(count);
    return list_graph(g, false, nodes, count);
}

EXPORT CUresult cuGraphGetRootNodes(CUgraph hGraph, CUgraphNode *nodes, size_t *count) {
    ENTER_GRAPH(g, hGraph);
    CHECK_VALUE(count);
    return list_graph(g, true, nodes, count);
}

EXPORT CUresult cuGraphGetEdges(CUgraph hGraph, CUgraphNode *from, CUgraphNode *to, size_t *count) {
    ENTER_GRAPH(g, hGraph);
    size_t n = 0;
    CHECK_VALUE(count && !from == !to);
    for (struct node *x = g->first; x; x = x->next) {
        for (size_t i = 0; i < x->n_deps; i++, n++) {
            if (!from || n >= *count)
                continue;
            from[n] = (CUgraphNode)x->deps[i];
            to[n] = (CUgraphNode)x;
        }
    }
    if (!from || *count > n)
        *count = n;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphNodeGetDependencies(CUgraphNode hNode, CUgraphNode *nodes, size_t *count) {
    ENTER_NODE(n, hNode);
    CHECK_VALUE(count);
    return list_nodes(n->deps, n->n_deps, nodes, count);
}

EXPORT CUresult cuGraphNodeGetDependentNodes(CUgraphNode hNode, CUgraphNode *nodes, size_t *count) {
    ENTER_NODE(n, hNode);
    size_t found = 0;
    CHECK_VALUE(count);
    for (struct node *x = n->graph->first; x; x = x->next) {
        for (size_t i = 0; i < x->n_deps; i++) {
            if (x->deps[i] != n)
                continue;
            if (nodes && found < *count)
                nodes[found] = (CUgraphNode)x;
            found++;
        }
    }
    if (!nodes || *count > found)
        *count = found;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphAddDependencies(CUgraph hGraph, const CUgraphNode *from,
                                       const CUgraphNode *to, size_t count) {
    ENTER_GRAPH(g, hGraph);
    CHECK_VALUE(!count || (from && to));
    for (size_t i = 0; i < count; i++) {
        struct node *a = node_of(from[i]), *b = node_of(to[i]);
        CHECK_VALUE(a && b && a != b && a->graph == g && b->graph == g);
        CHECK(graph_depend(b, a), CUDA_ERROR_OUT_OF_MEMORY);
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphRemoveDependencies(CUgraph hGraph, const CUgraphNode *from,
                                          const CUgraphNode *to, size_t count) {
    ENTER_GRAPH(g, hGraph);
    CHECK_VALUE(!count || (from && to));
    for (size_t i = 0; i < count; i++) {
        struct node *a = node_of(from[i]), *b = node_of(to[i]);
        CHECK_VALUE(a && b && b->graph == g);
        size_t kept = 0;
        for (size_t k = 0; k < b->n_deps; k++)
            if (b->deps[k] != a)
                b->deps[kept++] = b->deps[k];
        b->n_deps = kept;
    }
    return CUDA_SUCCESS;
}
