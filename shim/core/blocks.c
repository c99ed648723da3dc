/* How many allocations touch each 2 MiB block of the address space.
 *
 * The driver takes physical memory by blocks and lets small allocations share one. A block that
 * an allocation covers whole is its own; in a block that it covers in part it is counted, and the
 * block is charged while its count is not 0. So the charge follows from the addresses alone, no
 * matter how the driver places allocations.
 *
 * A radix tree over address bits 21..56: leaves of 4096 counters (8 GiB of addresses), added on
 * first use, never removed. */
#include <sys/mman.h>

#include "gs.h"

#define FANOUT 4096u

struct leaf {
    _Atomic uint32_t count[FANOUT];
};
struct branch {
    _Atomic(struct leaf *) leaf[FANOUT];
};
static _Atomic(struct branch *) top[FANOUT];

static void *new_node(size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}

/* NULL without memory, or for an address beyond 57 bits. */
static _Atomic uint32_t *counter(uint64_t block) {
    if (block >> 36)
        return NULL;
    _Atomic(struct branch *) *b = &top[block >> 24];
    struct branch *branch = atomic_load_explicit(b, memory_order_acquire);
    if (!branch) {
        struct branch *fresh = new_node(sizeof(*fresh));
        if (!fresh)
            return NULL;
        if (atomic_compare_exchange_strong(b, &branch, fresh))
            branch = fresh;
        else
            munmap(fresh, sizeof(*fresh));
    }
    _Atomic(struct leaf *) *l = &branch->leaf[block >> 12 & (FANOUT - 1)];
    struct leaf *leaf = atomic_load_explicit(l, memory_order_acquire);
    if (!leaf) {
        struct leaf *fresh = new_node(sizeof(*fresh));
        if (!fresh)
            return NULL;
        if (atomic_compare_exchange_strong(l, &leaf, fresh))
            leaf = fresh;
        else
            munmap(fresh, sizeof(*fresh));
    }
    return &leaf->count[block & (FANOUT - 1)];
}

/* Without a counter a block is charged for each allocation that touches it: too much, never too
 * little. */
static uint64_t enter(uint64_t block) {
    _Atomic uint32_t *count = counter(block);
    return !count || atomic_fetch_add(count, 1) == 0 ? GS_BLOCK : 0;
}

static uint64_t leave(uint64_t block) {
    _Atomic uint32_t *count = counter(block);
    return !count || atomic_fetch_sub(count, 1) == 1 ? GS_BLOCK : 0;
}

/* Whole blocks in the middle, plus `edge` of the blocks at the ends that are covered in part. */
static uint64_t walk(uint64_t address, uint64_t bytes, uint64_t (*edge)(uint64_t block)) {
    if (bytes == 0)
        return 0;
    uint64_t first = address >> GS_BLOCK_SHIFT, last = (address + bytes - 1) >> GS_BLOCK_SHIFT;
    bool head = address % GS_BLOCK != 0, tail = (address + bytes) % GS_BLOCK != 0;
    if (first == last)
        return head || tail ? edge(first) : GS_BLOCK;
    uint64_t whole = last - first + 1 - head - tail;
    return (whole << GS_BLOCK_SHIFT) + (head ? edge(first) : 0) + (tail ? edge(last) : 0);
}

uint64_t gs_blocks_take(uint64_t address, uint64_t bytes) {
    return walk(address, bytes, enter);
}

uint64_t gs_blocks_give(uint64_t address, uint64_t bytes) {
    return walk(address, bytes, leave);
}
