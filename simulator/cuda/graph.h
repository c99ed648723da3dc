/* Graphs of work. */
#ifndef SIM_GRAPH_H
#define SIM_GRAPH_H

#include "work.h"

/* The memory of an allocation node: a permanent address, and physical memory while a launch uses
 * it. */
struct graph_mem {
    struct mem *span; /* address range without memory, of kind MEM_GRAPH */
    uint64_t bytes;
    unsigned refs;
    bool live;
};

struct node {
    uint32_t magic;
    struct graph *graph;
    struct work work;
    bool disabled;
    struct node **deps;
    size_t n_deps;
    struct graph_mem *mem;
    struct node *original; /* in a clone: the node that it was copied from */
    unsigned visit;
    unsigned index; /* position in the launch that is being prepared */
    struct node *next;
};

struct graph {
    uint32_t magic;
    struct node *first, *last;
    size_t n_nodes;
    bool owned; /* belongs to a child node or an executable graph, so it has no handle */
};

struct exec {
    uint32_t magic;
    struct graph *graph;
    unsigned long long flags;
    uint64_t context_id; /* the context that holds memory for its nodes; 0: none yet */
    uint64_t bytes;      /* its part of the context's graph_bytes */
};

struct graph *graph_open(void);
void graph_close(struct graph *graph);
struct graph *graph_copy(const struct graph *graph);
struct node *graph_add(struct graph *graph, const struct work *work, struct node *const *deps,
                       size_t n_deps);
bool graph_depend(struct node *node, struct node *on);
/* Returns all nodes, each after its dependencies; NULL when there is a cycle. Free with free(). */
struct node **graph_order(const struct graph *graph);

/* graphrun.c */
CUresult graph_run(const struct graph *graph, struct stream *stream, unsigned long long flags);

/* graphmem.c */
CUresult graph_mem_open(struct node *node);
void graph_mem_drop(struct graph_mem *mem);
/* Back one allocation with physical memory. */
CUresult graph_mem_take(struct graph_mem *mem);
/* Grow the pool of graphs to the most memory that one run needs. */
CUresult graph_mem_reserve(const struct graph *graph);
bool graph_has_mem(const struct graph *graph);
#endif
