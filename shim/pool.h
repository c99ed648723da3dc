/* Pools, shared by cuda_pool.c (their charge), cuda_async.c (their allocations) and cuda_graph.c.
 */
#ifndef GPUSHARE_POOL_H
#define GPUSHARE_POOL_H

#include "cuda_shim.h"

#define GS_MAX_POOLS 1024u

enum gs_pool_state {
    GS_POOL_NONE,
    GS_POOL_CLAIMED,
    GS_POOL_OPEN,
    GS_POOL_GHOST, /* destroyed by the program, still holding allocations */
};

struct gs_pool {
    _Atomic uint64_t word; /* charged pages << 24 | version */
    _Atomic uint32_t state;
    _Atomic uint32_t live; /* allocations from it that were not freed */
    CUmemoryPool handle;
    CUdevice device;
    int dev;
    bool graph; /* the graph memory of `device` */
};

/* Charge what the driver says that the pool reserves now; returns by how much that grew. */
uint64_t gs_pool_settle(struct gs_pool *pool);
/* The record of a pool on `device`, made when there is none; NULL when the table is full. */
struct gs_pool *gs_pool_of(CUmemoryPool handle, CUdevice device);
struct gs_pool *gs_pool_known(CUmemoryPool handle);
/* Its number in the table, for GS_KIND_POOLED entries. */
uint64_t gs_pool_number(const struct gs_pool *pool);
struct gs_pool *gs_pool_of_graphs(CUdevice device);
/* The pool that a stream of this context allocates from now. */
struct gs_pool *gs_pool_of_stream(const struct gs_here *here);
/* Grows by one whenever graph memory may have gone back to the driver. */
extern _Atomic uint32_t gs_graph_trims;

#endif
