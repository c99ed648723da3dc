/* Memory pools are charged for what they reserve, not for what is allocated from them.
 *
 * A pool's charge and a version share one word. After each call that can change a pool, the caller
 * reads the word, asks the driver how much the pool reserves, and swaps in {that, version + 1}. If
 * another thread changed the word meanwhile, it asks again. So the last value written is the
 * driver's last answer, and no lock is needed. The graph memory of a device is one more pool, which
 * the driver itself keeps.
 *
 * The table grows to the number of pools that exist at one time. A thread holds lock_pool while it
 * walks the table (before a refusal, and in cuMemGetInfo) and while it destroys a pool, so no
 * thread queries a destroyed handle. */
#include "pool.h"

#define UNIT_SHIFT 12u /* charges are kept in pages: 40 bits of them, 24 bits of version */
#define VERSION_MASK UINT64_C(0xffffff)

static struct gs_map numbers; /* CUmemoryPool -> entry whose `extra` is its index in pools */
static struct gs_map passing; /* pools that are not charged: on the host, or imported */
static struct gs_pool pools[GS_MAX_POOLS];
static _Atomic uint32_t pools_high;

static uint64_t charged_bytes(uint64_t word) {
    return word >> 24 << UNIT_SHIFT;
}

static bool get_reserved(const struct gs_pool *pool, uint64_t *bytes) {
    cuuint64_t value = 0;
    CUresult result;
    if (pool->graph) {
        __typeof__(&cuDeviceGetGraphMemAttribute) get = GS_REAL(cuDeviceGetGraphMemAttribute);
        result = get ? get(pool->device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &value)
                     : CUDA_ERROR_NOT_SUPPORTED;
    } else {
        __typeof__(&cuMemPoolGetAttribute) get = GS_REAL(cuMemPoolGetAttribute);
        result = get ? get(pool->handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &value)
                     : CUDA_ERROR_NOT_SUPPORTED;
    }
    *bytes = value;
    return result == CUDA_SUCCESS;
}

bool gs_pool_ask(const struct gs_pool *pool, struct gs_pool_state_now *now) {
    cuuint64_t used = 0;
    int reuses = 1;
    __typeof__(&cuMemPoolGetAttribute) get = GS_REAL(cuMemPoolGetAttribute);
    __typeof__(&cuDeviceGetGraphMemAttribute) get_graph = GS_REAL(cuDeviceGetGraphMemAttribute);
    if (!get_reserved(pool, &now->reserved))
        return false;
    CUresult result = pool->graph
                          ? get_graph(pool->device, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &used)
                          : get(pool->handle, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used);
    if (result == CUDA_SUCCESS && !pool->graph)
        result = get(pool->handle, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, &reuses);
    now->used = used;
    now->reuses = reuses != 0;
    return result == CUDA_SUCCESS;
}

bool gs_pool_pass(CUmemoryPool handle) {
    struct gs_entry entry = {.kind = GS_KIND_FOREIGN, .dev = GS_NO_DEV};
    return gs_pool_passes(handle) || gs_map_put(&passing, (uint64_t)(uintptr_t)handle, &entry);
}

bool gs_pool_passes(CUmemoryPool handle) {
    struct gs_entry entry;
    return gs_map_get(&passing, (uint64_t)(uintptr_t)handle, &entry);
}

static void apply_change(struct gs_pool *pool, uint64_t before, uint64_t after) {
    if (after > before)
        gs_charge_anyway(pool->dev, after - before);
    else
        gs_release(pool->dev, before - after);
}

uint64_t gs_pool_settle(struct gs_pool *pool) {
    uint64_t word, bytes;
    do {
        word = atomic_load(&pool->word);
        if (atomic_load(&pool->state) != GS_POOL_OPEN || !get_reserved(pool, &bytes))
            return 0;
        bytes = gs_round_up(bytes, UINT64_C(1) << UNIT_SHIFT);
    } while (!atomic_compare_exchange_strong(
        &pool->word, &word, bytes >> UNIT_SHIFT << 24 | ((word + 1) & VERSION_MASK)));
    apply_change(pool, charged_bytes(word), bytes);
    return bytes > charged_bytes(word) ? bytes - charged_bytes(word) : 0;
}

static void settle(struct gs_pool *pool) {
    gs_pool_settle(pool);
}

/* Release the charge and the entry of a pool that no longer exists. */
static void close_pool(struct gs_pool *pool) {
    uint64_t word = atomic_exchange(&pool->word, 0);
    apply_change(pool, charged_bytes(word), 0);
    atomic_store(&pool->state, GS_POOL_NONE);
}

static struct gs_pool *claim_entry(void) {
    for (uint32_t i = 0; i < GS_MAX_POOLS; i++) {
        uint32_t none = GS_POOL_NONE;
        if (!atomic_compare_exchange_strong(&pools[i].state, &none, GS_POOL_CLAIMED))
            continue;
        uint32_t high = atomic_load(&pools_high);
        while (high < i + 1 && !atomic_compare_exchange_strong(&pools_high, &high, i + 1))
            ;
        return &pools[i];
    }
    return NULL;
}

static struct gs_pool *add_pool(CUmemoryPool handle, CUdevice device, bool graph) {
    struct gs_pool *pool = claim_entry();
    if (!pool)
        return NULL;
    pool->handle = handle;
    pool->device = device;
    pool->dev = gs_dev_of(device);
    pool->graph = graph;
    atomic_store(&pool->live, 0);
    atomic_store(&pool->growths, 0);
    atomic_store(&pool->word, 0);
    atomic_store(&pool->state, GS_POOL_OPEN);
    return pool;
}

static struct gs_pool *find_or_add(CUmemoryPool handle, CUdevice device, bool graph) {
    uint64_t key = graph ? (uint64_t)(uint32_t)device + 1 : (uint64_t)(uintptr_t)handle;
    struct gs_pool *pool = NULL;
    struct gs_entry entry;
    if (gs_map_get(&numbers, key, &entry))
        return &pools[entry.extra];
    gs_lock(&gs_self()->lock_pool);
    if (gs_map_get(&numbers, key, &entry)) {
        pool = &pools[entry.extra];
    } else if ((pool = add_pool(handle, device, graph))) {
        entry = (struct gs_entry){.extra = (uint64_t)(pool - pools), .dev = pool->dev};
        if (!gs_map_put(&numbers, key, &entry)) {
            close_pool(pool);
            pool = NULL;
        }
    }
    gs_unlock(&gs_self()->lock_pool);
    return pool;
}

struct gs_pool *gs_pool_of(CUmemoryPool handle, CUdevice device) {
    return find_or_add(handle, device, false);
}

struct gs_pool *gs_pool_known(CUmemoryPool handle) {
    struct gs_entry entry;
    return gs_map_get(&numbers, (uint64_t)(uintptr_t)handle, &entry) ? &pools[entry.extra] : NULL;
}

uint64_t gs_pool_number(const struct gs_pool *pool) {
    return (uint64_t)(pool - pools);
}

struct gs_pool *gs_pool_of_graphs(CUdevice device) {
    return find_or_add(NULL, device, true);
}

struct gs_pool *gs_pool_of_stream(const struct gs_here *here) {
    __typeof__(&cuDeviceGetMemPool) get = GS_REAL(cuDeviceGetMemPool);
    CUmemoryPool handle;
    if (!get || get(&handle, here->device) != CUDA_SUCCESS)
        return NULL;
    return gs_pool_of(handle, here->device);
}

/* Managed memory counts in full wherever its pages are, as with cuMemAllocManaged. If its location
 * is no device, the current device is charged. A pool on the host that is not managed never uses
 * device memory, so it is not charged. */
bool gs_pool_register(CUmemoryPool handle, const CUmemLocation *location,
                      CUmemAllocationType type) {
    struct gs_here here = {.device = 0};
    if (type == CU_MEM_ALLOCATION_TYPE_MANAGED)
        gs_does(GS_DOES_MANAGE);
    if (location->type == CU_MEM_LOCATION_TYPE_DEVICE)
        return gs_pool_of(handle, location->id);
    if (type != CU_MEM_ALLOCATION_TYPE_MANAGED)
        return gs_pool_pass(handle);
    if (gs_pool_known(handle))
        return true;
    gs_here(&here);
    return gs_pool_of(handle, here.device);
}

static void for_each_pool(int dev, void (*act)(struct gs_pool *pool)) {
    if (dev < 0 || atomic_load_explicit(&pools_high, memory_order_acquire) == 0)
        return;
    gs_lock(&gs_self()->lock_pool);
    uint32_t high = atomic_load(&pools_high);
    for (uint32_t i = 0; i < high; i++)
        if (atomic_load(&pools[i].state) == GS_POOL_OPEN && pools[i].dev == dev)
            act(&pools[i]);
    gs_unlock(&gs_self()->lock_pool);
}

static void trim(struct gs_pool *pool) {
    __typeof__(&cuMemPoolTrimTo) trim_to = GS_REAL(cuMemPoolTrimTo);
    __typeof__(&cuDeviceGraphMemTrim) trim_graphs = GS_REAL(cuDeviceGraphMemTrim);
    if (pool->graph && trim_graphs) {
        atomic_store(&pool->last, 0);
        trim_graphs(pool->device);
    } else if (!pool->graph && trim_to) {
        trim_to(pool->handle, 0);
    }
    gs_pool_settle(pool);
}

void gs_pools_settle(int dev) {
    for_each_pool(dev, settle);
}

void gs_pools_trim(int dev) {
    for_each_pool(dev, trim);
}

_Atomic uint32_t gs_pools_freed;
_Atomic uint32_t gs_freed_later;

void gs_pools_synced(void) {
    if (!atomic_exchange(&gs_pools_freed, 0))
        return;
    uint32_t later = atomic_exchange(&gs_freed_later, 0);
    for (int dev = 0; dev < (int)GS_MAX_DEVICES; dev++) {
        gs_pools_settle(dev);
        if (later & UINT32_C(1) << dev)
            gs_overhead_shrank(dev);
    }
}

/* A destroyed pool exists until its last allocation is freed; its charge stays until then. */
void gs_pooled_freed(const struct gs_entry *entry) {
    struct gs_pool *pool = &pools[entry->extra];
    if (atomic_fetch_sub(&pool->live, 1) == 1 && atomic_load(&pool->state) == GS_POOL_GHOST) {
        uint32_t ghost = GS_POOL_GHOST;
        if (atomic_compare_exchange_strong(&pool->state, &ghost, GS_POOL_CLAIMED))
            close_pool(pool);
        return;
    }
    gs_pool_settle(pool);
    atomic_store(&gs_pools_freed, 1);
}

GS_EXPORT CUresult CUDAAPI cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props) {
    GS_NEED(real, cuMemPoolCreate);
    if (!gs_slot())
        return CUDA_ERROR_NOT_INITIALIZED;
    CUresult result = real(pool, props);
    if (result != CUDA_SUCCESS || !pool || !props)
        return result;
    if (gs_pool_register(*pool, &props->location, props->allocType))
        return result;
    GS_REAL(cuMemPoolDestroy)(*pool);
    *pool = NULL;
    return CUDA_ERROR_OUT_OF_MEMORY;
}

GS_EXPORT CUresult CUDAAPI cuMemPoolDestroy(CUmemoryPool handle) {
    GS_NEED(real, cuMemPoolDestroy);
    GS_CHANGES;
    struct gs_entry entry;
    if (!gs_slot())
        return real(handle);
    if (gs_map_take(&passing, (uint64_t)(uintptr_t)handle, &entry)) {
        CUresult result = real(handle);
        if (result != CUDA_SUCCESS)
            gs_pool_pass(handle);
        return result;
    }
    gs_lock(&gs_self()->lock_pool);
    bool known = gs_map_take(&numbers, (uint64_t)(uintptr_t)handle, &entry);
    struct gs_pool *pool = known ? &pools[entry.extra] : NULL;
    if (pool) { /* the driver frees its unused memory; memory in use stays charged */
        trim(pool);
        atomic_store(&pool->state, GS_POOL_GHOST);
    }
    CUresult result = real(handle);
    if (pool && result != CUDA_SUCCESS) {
        atomic_store(&pool->state, GS_POOL_OPEN);
        gs_map_put(&numbers, (uint64_t)(uintptr_t)handle, &entry);
    } else if (pool && atomic_load(&pool->live) == 0) {
        uint32_t ghost = GS_POOL_GHOST;
        if (atomic_compare_exchange_strong(&pool->state, &ghost, GS_POOL_CLAIMED))
            close_pool(pool);
    }
    gs_unlock(&gs_self()->lock_pool);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
    GS_NEED(real, cuMemPoolTrimTo);
    GS_CHANGES;
    CUresult result = real(pool, keep);
    struct gs_pool *known = gs_slot() && result == CUDA_SUCCESS ? gs_pool_known(pool) : NULL;
    if (known)
        gs_pool_settle(known);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr,
                                                 void *value) {
    GS_NEED(real, cuMemPoolSetAttribute);
    GS_CHANGES;
    CUresult result = real(pool, attr, value);
    struct gs_pool *known = gs_slot() && result == CUDA_SUCCESS ? gs_pool_known(pool) : NULL;
    if (known)
        gs_pool_settle(known);
    return result;
}

/* The pool that a device's streams will use from now on: record it before the first allocation. */
GS_EXPORT CUresult CUDAAPI cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool) {
    GS_NEED(real, cuDeviceSetMemPool);
    CUresult result = real(dev, pool);
    if (gs_slot() && result == CUDA_SUCCESS)
        gs_pool_of(pool, dev);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type,
                                           CUmemoryPool pool) {
    GS_NEED(real, cuMemSetMemPool);
    CUresult result = real(location, type, pool);
    if (gs_slot() && result == CUDA_SUCCESS && location)
        gs_pool_register(pool, location, type);
    return result;
}
