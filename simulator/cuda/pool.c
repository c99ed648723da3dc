/* Pools reserve memory in steps of 32 MiB and allocate from it. Freed memory stays reserved
 * until a synchronisation finds more than the release threshold, or until the pool is trimmed. */
#include "pool.h"

#include <stdlib.h>

#define GROWTH (32ull << 20)
#define MAX_BYTES (1ull << 47)

static struct pool *pools;

struct pool *pool_of(CUmemoryPool handle) {
    struct pool *p = (struct pool *)handle;
    return sim_is(p, OBJ_POOL) && !p->destroyed ? p : NULL;
}

static struct pool *open_pool(int device, const CUmemPoolProps *props) {
    struct pool *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    *p = (struct pool){.magic = OBJ_POOL,
                       .device = device,
                       .props = *props,
                       .on_host = props->location.type != CU_MEM_LOCATION_TYPE_DEVICE,
                       .max_bytes = props->maxSize,
                       .reuse = {1, 1, 1},
                       .next = pools};
    pools = p;
    return p;
}

/* Returns the device's default pool, which is created when it is first requested. */
CUresult pool_of_device(int device, struct pool **pool) {
    struct device *d = &sim.device[device];
    CUresult result = join_device(device);
    if (result != CUDA_SUCCESS)
        return result;
    if (!d->default_pool) {
        CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
        d->default_pool = open_pool(device, &props);
        CHECK(d->default_pool, CUDA_ERROR_OUT_OF_MEMORY);
        d->default_pool->is_default = true;
    }
    *pool = d->default_pool;
    return CUDA_SUCCESS;
}

struct pool *pool_current(int device) {
    struct pool *p = sim.device[device].current_pool;
    if (p)
        return p;
    return pool_of_device(device, &p) == CUDA_SUCCESS ? p : NULL;
}

static void put_segment(struct chunk *c, struct segment *s) {
    c->at[s->offset / SIM_UNIT] = s;
}

/* Reserves `bytes` more: device memory, or host memory for pools on the host. */
static CUresult reserve(struct pool *p, uint64_t bytes, struct chunk **out) {
    CUresult error = CUDA_ERROR_OUT_OF_MEMORY;
    CHECK(!p->max_bytes || p->reserved + bytes <= p->max_bytes, CUDA_ERROR_OUT_OF_MEMORY);
    struct chunk *c = calloc(1, sizeof *c);
    struct segment *s = calloc(1, sizeof *s);
    struct segment **at = calloc(bytes / SIM_UNIT, sizeof(struct segment *));
    struct mem *m = NULL;
    if (c && s && at)
        m = p->on_host ? space_take(p->device, bytes / SIM_BLOCK)
                       : mem_take(NULL, p->device, bytes, MEM_POOL, &error);
    if (!m) {
        free(c);
        free(s);
        free(at);
        return error;
    }
    m->kind = MEM_POOL;
    m->owner = c;
    s->size = bytes;
    *c = (struct chunk){
        .mem = m, .pool = p, .segments = s, .at = at, .room = bytes, .next = p->chunks};
    put_segment(c, s);
    if (c->next)
        c->next->prev = c;
    p->chunks = c;
    p->reserved += bytes;
    if (p->reserved > p->reserved_high)
        p->reserved_high = p->reserved;
    *out = c;
    return CUDA_SUCCESS;
}

static void unreserve(struct chunk *c) {
    struct pool *p = c->pool;
    if (c->prev)
        c->prev->next = c->next;
    else
        p->chunks = c->next;
    if (c->next)
        c->next->prev = c->prev;
    p->reserved -= c->mem->span;
    while (c->segments) {
        struct segment *s = c->segments;
        c->segments = s->next;
        free(s);
    }
    if (p->on_host)
        space_give(c->mem);
    else
        mem_give(c->mem);
    free(c->at);
    free(c);
}

static struct segment *take_from(struct chunk *c, uint64_t bytes) {
    uint64_t longest = 0;
    struct segment *s = c->segments;
    for (; s && (s->used || s->size < bytes); s = s->next)
        if (!s->used && s->size > longest)
            longest = s->size;
    if (!s) {
        c->room = longest;
        return NULL;
    }
    if (s->size > bytes) {
        struct segment *rest = malloc(sizeof *rest);
        if (!rest)
            return NULL;
        *rest = (struct segment){
            .offset = s->offset + bytes, .size = s->size - bytes, .next = s->next, .prev = s};
        if (rest->next)
            rest->next->prev = rest;
        s->next = rest;
        s->size = bytes;
        put_segment(c, rest);
    }
    s->used = true;
    c->used_bytes += bytes;
    return s;
}

CUresult pool_alloc(struct pool *p, uint64_t bytes, CUdeviceptr *va) {
    CHECK(bytes <= MAX_BYTES, CUDA_ERROR_OUT_OF_MEMORY);
    bytes = round_up(bytes, SIM_UNIT);
    struct chunk *c = p->chunks;
    struct segment *s = NULL;
    for (; c; c = c->next)
        if (c->room >= bytes && (s = take_from(c, bytes)))
            break;
    if (!s) {
        CUresult result = reserve(p, round_up(bytes, GROWTH), &c);
        if (result != CUDA_SUCCESS)
            result = reserve(p, round_up(bytes, SIM_BLOCK), &c);
        if (result != CUDA_SUCCESS)
            return result;
        s = take_from(c, bytes);
        CHECK(s, CUDA_ERROR_OUT_OF_MEMORY);
    }
    p->used += bytes;
    if (p->used > p->used_high)
        p->used_high = p->used;
    *va = c->mem->va + s->offset;
    return CUDA_SUCCESS;
}

/* Merges s with the free segment behind it. */
static void join_next(struct chunk *c, struct segment *s) {
    struct segment *n = s->next;
    if (!n || n->used)
        return;
    c->at[n->offset / SIM_UNIT] = NULL;
    s->size += n->size;
    s->next = n->next;
    if (s->next)
        s->next->prev = s;
    free(n);
}

bool pool_free(struct mem *mem, uint64_t va) {
    struct chunk *c = mem->owner;
    uint64_t offset = va - mem->va;
    struct segment *s = offset % SIM_UNIT ? NULL : c->at[offset / SIM_UNIT];
    if (!s || !s->used)
        return false;
    struct pool *p = c->pool;
    s->used = false;
    c->used_bytes -= s->size;
    p->used -= s->size;
    join_next(c, s);
    if (s->prev && !s->prev->used) {
        s = s->prev;
        join_next(c, s);
    }
    if (s->size > c->room)
        c->room = s->size;
    if (p->destroyed && p->used == 0) {
        while (p->chunks)
            unreserve(p->chunks);
    }
    return true;
}

bool pool_range(const struct mem *mem, uint64_t va, uint64_t *start, uint64_t *size) {
    const struct chunk *c = mem->owner;
    for (uint64_t unit = (va - mem->va) / SIM_UNIT + 1; unit-- > 0;) {
        const struct segment *s = c->at[unit];
        if (!s)
            continue;
        *start = mem->va + s->offset;
        *size = s->size;
        return s->used && va - *start < s->size;
    }
    return false;
}

static void trim(struct pool *p, uint64_t keep) {
    for (struct chunk *c = p->chunks, *next; c && p->reserved > keep; c = next) {
        next = c->next;
        if (c->used_bytes == 0 && p->reserved - c->mem->span >= keep)
            unreserve(c);
    }
}

void pools_trim_at_sync(int device) {
    for (struct pool *p = pools; p; p = p->next)
        if (p->device == device && p->reserved > p->threshold)
            trim(p, p->threshold);
}

EXPORT CUresult cuMemPoolCreate(CUmemoryPool *handle, const CUmemPoolProps *props) {
    ENTER();
    CHECK_VALUE(handle && props && props->allocType == CU_MEM_ALLOCATION_TYPE_PINNED);
    CUmemLocationType type = props->location.type;
    CHECK_VALUE(type == CU_MEM_LOCATION_TYPE_DEVICE || type == CU_MEM_LOCATION_TYPE_HOST_NUMA);
    int device = type == CU_MEM_LOCATION_TYPE_DEVICE ? props->location.id : 0;
    CHECK_DEVICE(device);
    CHECK_VALUE(!(props->handleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    CUresult result = join_device(device);
    if (result != CUDA_SUCCESS)
        return result;
    struct pool *p = open_pool(device, props);
    CHECK(p, CUDA_ERROR_OUT_OF_MEMORY);
    *handle = (CUmemoryPool)p;
    return CUDA_SUCCESS;
}

/* Memory that is still allocated from the pool stays until it is freed. */
EXPORT CUresult cuMemPoolDestroy(CUmemoryPool handle) {
    ENTER();
    struct pool *p = pool_of(handle);
    CHECK_VALUE(p && !p->is_default);
    if (sim.device[p->device].current_pool == p)
        sim.device[p->device].current_pool = NULL;
    trim(p, 0);
    p->destroyed = true;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool handle, size_t keep) {
    ENTER();
    struct pool *p = pool_of(handle);
    CHECK_VALUE(p);
    trim(p, keep);
    return CUDA_SUCCESS;
}
