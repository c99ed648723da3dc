/* Pools, shared by pool.c (their charge), async.c (their allocations) and launch/graph.c.
 */
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
    _Atomic uint32_t live;    /* allocations from it that were not freed */
    _Atomic uint32_t busy;    /* calls that may make it grow (pool_room.c) */
    _Atomic uint64_t growths; /* at least as many as happened since it was empty */
    CUmemoryPool handle;
    CUdevice device;
    int dev;
    bool graph;            /* the graph memory of `device` */
    _Atomic uint64_t last; /* of graph memory: who ran last, and nothing was trimmed since */
};

/* Charge what the driver says that the pool reserves now; returns by how much that grew. */
uint64_t gs_pool_settle(struct gs_pool *pool);
/* What the driver says of a pool now. */
struct gs_pool_state_now {
    uint64_t reserved, used;
    bool reuses; /* what was freed may always be used again, in whatever stream */
};
bool gs_pool_ask(const struct gs_pool *pool, struct gs_pool_state_now *now);
/* Pools whose memory is not this container's device memory: on the host, or imported. */
bool gs_pool_pass(CUmemoryPool handle);
bool gs_pool_passes(CUmemoryPool handle);

/* Around a call that takes up to `bytes` out of a pool: room for what the pool may grow by. */
struct gs_room {
    struct gs_pool *pool;
    uint64_t asked;
    uint64_t bytes; /* reserved */
    uint64_t exec;  /* of graph memory: who asks */
    bool bound;     /* something was */
    bool alone;     /* nothing was reserved, or only after waiting for all others */
};
CUresult gs_room_begin(struct gs_room *room, struct gs_pool *pool, uint64_t bytes, uint64_t exec);
/* Charge what the pool reserves now. True: it grew by more than any driver is known to, beyond the
 * limit; undo the call and trim. */
bool gs_room_end(struct gs_room *room);

/* The record of a pool on `device`, made when there is none; NULL when the table is full. */
struct gs_pool *gs_pool_of(CUmemoryPool handle, CUdevice device);
/* The same for a pool that is anywhere; false when the table is full. */
bool gs_pool_met(CUmemoryPool handle, const CUmemLocation *location, CUmemAllocationType type);
struct gs_pool *gs_pool_known(CUmemoryPool handle);
/* Its number in the table, for GS_KIND_POOLED entries. */
uint64_t gs_pool_number(const struct gs_pool *pool);
struct gs_pool *gs_pool_of_graphs(CUdevice device);
/* The pool that a stream of this context allocates from now. */
struct gs_pool *gs_pool_of_stream(const struct gs_here *here);

#endif
