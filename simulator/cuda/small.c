/* Allocations under 1 MiB, in units of 512 bytes from blocks that belong to a context. A block
 * is allocated for the first allocation in it and freed with the last. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

#define UNITS (SIM_BLOCK / SIM_UNIT)

struct small_block {
    struct mem *mem;
    struct small_block *next, *prev;
    unsigned live;
    unsigned room; /* upper bound on a run of free units */
    uint64_t used[UNITS / 64];
    uint16_t units[UNITS]; /* length of the allocation that starts here; 0: none */
};

static void set_run(struct small_block *b, unsigned at, unsigned n, bool used) {
    while (n) {
        unsigned bit = at % 64, take = 64 - bit < n ? 64 - bit : n;
        uint64_t mask = (take == 64 ? ~0ull : (1ull << take) - 1) << bit;
        if (used)
            b->used[at / 64] |= mask;
        else
            b->used[at / 64] &= ~mask;
        at += take;
        n -= take;
    }
}

static unsigned next_bit(const struct small_block *b, unsigned from, bool used) {
    while (from < UNITS) {
        uint64_t w = (used ? b->used[from / 64] : ~b->used[from / 64]) >> (from % 64);
        if (w)
            return from + (unsigned)__builtin_ctzll(w);
        from = (from / 64 + 1) * 64;
    }
    return UNITS;
}

static int find_run(struct small_block *b, unsigned n) {
    unsigned longest = 0;
    for (unsigned at = next_bit(b, 0, false); at < UNITS; at = next_bit(b, at, false)) {
        unsigned end = next_bit(b, at, true);
        if (end - at >= n)
            return (int)at;
        if (end - at > longest)
            longest = end - at;
        at = end;
    }
    b->room = longest;
    return -1;
}

static struct small_block *new_block(struct context *ctx, CUresult *error) {
    struct small_block *b = calloc(1, sizeof *b);
    *error = CUDA_ERROR_OUT_OF_MEMORY;
    if (!b)
        return NULL;
    b->mem = mem_take(ctx, ctx->device, SIM_BLOCK, MEM_SMALL, error);
    if (!b->mem)
        return free(b), NULL;
    b->mem->owner = b;
    b->room = UNITS;
    b->next = ctx->smalls;
    if (b->next)
        b->next->prev = b;
    ctx->smalls = b;
    return b;
}

CUresult small_alloc(struct context *ctx, uint64_t bytes, CUdeviceptr *va) {
    unsigned n = (unsigned)((bytes + SIM_UNIT - 1) / SIM_UNIT);
    struct small_block *b = ctx->smalls;
    int at = -1;
    for (; b; b = b->next)
        if (b->room >= n && (at = find_run(b, n)) >= 0)
            break;
    if (!b) {
        CUresult error;
        b = new_block(ctx, &error);
        if (!b)
            return error;
        at = 0;
    }
    set_run(b, (unsigned)at, n, true);
    b->units[at] = (uint16_t)n;
    b->live++;
    *va = b->mem->va + (uint64_t)at * SIM_UNIT;
    return CUDA_SUCCESS;
}

static void drop_block(struct small_block *b) {
    struct context *ctx = b->mem->ctx;
    if (b->prev)
        b->prev->next = b->next;
    else
        ctx->smalls = b->next;
    if (b->next)
        b->next->prev = b->prev;
    mem_give(b->mem);
    free(b);
}

bool small_free(struct mem *mem, uint64_t va) {
    struct small_block *b = mem->owner;
    uint64_t at = (va - mem->va) / SIM_UNIT;
    if ((va - mem->va) % SIM_UNIT || !b->units[at])
        return false;
    set_run(b, (unsigned)at, b->units[at], false);
    b->units[at] = 0;
    b->room = UNITS;
    if (--b->live == 0)
        drop_block(b);
    return true;
}

bool small_range(const struct mem *mem, uint64_t va, uint64_t *start, uint64_t *size) {
    const struct small_block *b = mem->owner;
    uint64_t unit = (va - mem->va) / SIM_UNIT;
    for (uint64_t at = unit + 1; at-- > 0;) {
        if (!b->units[at])
            continue;
        *start = mem->va + at * SIM_UNIT;
        *size = b->units[at] * SIM_UNIT;
        return unit < at + b->units[at];
    }
    return false;
}

void small_drop_all(struct context *ctx) {
    while (ctx->smalls)
        drop_block(ctx->smalls);
}
