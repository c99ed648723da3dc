/* Stream-ordered memory pools. */
#ifndef SIM_POOL_H
#define SIM_POOL_H

#include "sim.h"

struct segment {
    uint64_t offset, size;
    bool used;
    struct segment *next, *prev;
};

/* One reservation of a pool. */
struct chunk {
    struct mem *mem;
    struct pool *pool;
    struct segment *segments;
    struct segment **at; /* by 512-byte unit: the segment that starts there */
    uint64_t used_bytes;
    uint64_t room; /* upper bound on the length of a free segment */
    struct chunk *next, *prev;
};

struct pool {
    uint32_t magic;
    int device;
    bool is_default, on_host, imported, destroyed;
    CUmemPoolProps props;
    uint64_t threshold, max_bytes;
    uint64_t reserved, reserved_high, used, used_high;
    int reuse[3];
    struct chunk *chunks;
    struct pool *next;
};

struct pool *pool_current(int device);
struct pool *pool_of(CUmemoryPool handle);
CUresult pool_of_device(int device, struct pool **pool);
#endif
