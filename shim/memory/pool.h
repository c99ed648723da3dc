/* Memory pools, for pool.c (their charge), async.c (their allocations) and launch/graph.c. */
#ifndef GPUSHARE_POOL_H
#define GPUSHARE_POOL_H

#include "memory.h"

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
    _Atomic uint32_t live;    /* allocations from it that are not freed yet */
    _Atomic uint32_t busy;    /* calls that may make it grow (pool_room.c) */
    _Atomic uint64_t growths; /* at least the number of growths since it was empty */
    CUmemoryPool handle;
    CUdevice device;
    int dev;
    bool graph;            /* the graph memory of `device` */
    _Atomic uint64_t last; /* of graph memory: the graph that ran last; 0 after a trim */
};

/* Charge what the driver reports as reserved now; return by how much that grew. */
uint64_t gs_pool_settle(struct gs_pool *pool);
/* A pool's state as the driver reports it. */
struct gs_pool_state_now {
    uint64_t reserved, used;
    bool reuses; /* freed memory can always be reused, in any stream */
};
bool gs_pool_ask(const struct gs_pool *pool, struct gs_pool_state_now *now);
/* Pools whose memory is not this container's device memory: on the host, or imported.
 * gs_pool_pass() records one. */
bool gs_pool_pass(CUmemoryPool handle);
bool gs_pool_passes(CUmemoryPool handle);

/* State of a call that allocates up to `bytes` from a pool: room for the growth of the pool. */
struct gs_room {
    struct gs_pool *pool;
    uint64_t asked;
    uint64_t bytes; /* reserved */
    uint64_t exec;  /* for graph memory: the graph that asks */
    bool bound;     /* bytes are reserved as a bound */
    bool alone;     /* nothing was reserved, or only after waiting for all other calls */
};
CUresult gs_room_begin(struct gs_room *room, struct gs_pool *pool, uint64_t bytes, uint64_t exec);
/* Charge what the pool reserves now. Return true if it grew beyond the limit by more than any
 * driver is known to; then undo the call and trim the pool. */
bool gs_room_end(struct gs_room *room);

/* Return the record of a pool on `device`, created if necessary; NULL if the table is full. */
struct gs_pool *gs_pool_of(CUmemoryPool handle, CUdevice device);
/* The same for a pool at any location; false if the table is full. */
bool gs_pool_register(CUmemoryPool handle, const CUmemLocation *location, CUmemAllocationType type);
struct gs_pool *gs_pool_known(CUmemoryPool handle);
/* Its number in the table, for GS_KIND_POOLED entries. */
uint64_t gs_pool_number(const struct gs_pool *pool);
struct gs_pool *gs_pool_of_graphs(CUdevice device);
/* Return the pool that a stream of this context allocates from now. */
struct gs_pool *gs_pool_of_stream(const struct gs_here *here);

#endif
