/* Device addresses: one range per device, in blocks of 2 MiB. The range is reserved host memory
 * at the same address, so content is accessed by plain loads and stores, and untouched memory
 * costs nothing. */
#include "sim.h"

#include <stdlib.h>
#include <sys/mman.h>

#define MIN_SPACE (64ull << 30)
#define WORD 64u

CUresult space_open(int device) {
    struct device *d = &sim.device[device];
    if (d->base)
        return CUDA_SUCCESS;
    uint64_t bytes = round_up(4 * d->sim.state->config.total_bytes, WORD * SIM_BLOCK);
    if (bytes < MIN_SPACE)
        bytes = MIN_SPACE;
    void *p = mmap(NULL, bytes + SIM_BLOCK, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    madvise(p, bytes + SIM_BLOCK, MADV_DONTFORK);
    madvise(p, bytes + SIM_BLOCK, MADV_DONTDUMP);
    madvise(p, bytes + SIM_BLOCK, MADV_NOHUGEPAGE);
    d->n_blocks = bytes / SIM_BLOCK;
    d->used_map = calloc(d->n_blocks / WORD, sizeof *d->used_map);
    d->head = calloc(d->n_blocks, sizeof(struct mem *));
    if (!d->used_map || !d->head)
        return CUDA_ERROR_OUT_OF_MEMORY;
    d->base = round_up((uint64_t)p, SIM_BLOCK);
    return CUDA_SUCCESS;
}

/* Returns the first free block at or after `from`; n_blocks when there is none. */
static uint64_t next_free(const struct device *d, uint64_t from) {
    while (from < d->n_blocks) {
        uint64_t w = ~d->used_map[from / WORD] >> (from % WORD);
        if (w)
            return from + (uint64_t)__builtin_ctzll(w);
        from = (from / WORD + 1) * WORD;
    }
    return d->n_blocks;
}

static uint64_t next_used(const struct device *d, uint64_t from, uint64_t end) {
    while (from < end) {
        uint64_t w = d->used_map[from / WORD] >> (from % WORD);
        if (w)
            return from + (uint64_t)__builtin_ctzll(w);
        from = (from / WORD + 1) * WORD;
    }
    return end;
}

/* Returns the first run of `blocks` free blocks in [from, end); `end` when there is none. */
static uint64_t find_run(const struct device *d, uint64_t from, uint64_t end, uint64_t blocks) {
    for (uint64_t at = next_free(d, from); at + blocks <= end; at = next_free(d, at)) {
        uint64_t stop = next_used(d, at, at + blocks);
        if (stop >= at + blocks)
            return at;
        at = stop;
    }
    return end;
}

static void mark(struct device *d, uint64_t first, uint64_t blocks, struct mem *mem) {
    for (uint64_t i = first; i < first + blocks; i++) {
        if (mem)
            d->used_map[i / WORD] |= 1ull << (i % WORD);
        else
            d->used_map[i / WORD] &= ~(1ull << (i % WORD));
        d->head[i] = mem;
    }
}

struct mem *space_take(int device, uint64_t blocks) {
    struct device *d = &sim.device[device];
    uint64_t at = find_run(d, d->hint, d->n_blocks, blocks);
    if (at + blocks > d->n_blocks)
        at = find_run(d, 0, d->n_blocks, blocks);
    if (at + blocks > d->n_blocks)
        return NULL;
    struct mem *m = calloc(1, sizeof *m);
    if (!m)
        return NULL;
    m->device = device;
    m->va = d->base + at * SIM_BLOCK;
    m->span = blocks * SIM_BLOCK;
    m->id = sim.next_id++;
    mark(d, at, blocks, m);
    d->hint = at + blocks;
    return m;
}

void space_give(struct mem *m) {
    struct device *d = &sim.device[m->device];
    uint64_t first = (m->va - d->base) / SIM_BLOCK;
    if (m->shared_id)
        mmap((void *)m->va, m->span, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    else if (m->touched)
        madvise((void *)m->va, m->touched, MADV_DONTNEED);
    mark(d, first, m->span / SIM_BLOCK, NULL);
    free(m->place);
    if (first < d->hint)
        d->hint = first;
    free(m);
}

struct mem *space_find(uint64_t va) {
    for (int i = 0; i < sim.n_devices; i++) {
        struct device *d = &sim.device[i];
        if (d->base && va >= d->base && va - d->base < d->n_blocks * SIM_BLOCK)
            return d->head[(va - d->base) / SIM_BLOCK];
    }
    return NULL;
}

bool space_has(uint64_t va) {
    for (int i = 0; i < sim.n_devices; i++) {
        struct device *d = &sim.device[i];
        if (d->base && va >= d->base && va - d->base < d->n_blocks * SIM_BLOCK)
            return true;
    }
    return false;
}
