/* The host part of a share. Memory that a program allocates beyond the device part, or when other
 * users fill the device, is managed memory. Its pages are advised to stay on the host, where the
 * device reads them, so it needs no device memory, however it is used.
 *
 * The host part has its own limit, counted as one more device (gs_host_part). An allocation that
 * fits in neither part alone is divided: its first pages may move to the device and count there,
 * the rest stays on the host. So every request that fits in both parts together succeeds. */
#include "accounting/compute.h"
#include "oversubscription.h"

#define ATTEMPTS 8
#define MOST_LATER 1024u

_Atomic uint32_t gs_virtual_later; /* deferred frees */
static _Atomic uint32_t live;      /* allocations of this kind; 0: nothing to look up */

bool gs_virtual_has(int dev) {
    return gs_limit(gs_host_part(dev)) != 0;
}

bool gs_virtual_is(CUdeviceptr address) {
    struct gs_entry entry;
    return atomic_load_explicit(&live, memory_order_relaxed) &&
           gs_map_get(&gs_memory, address, &entry) && entry.kind == GS_KIND_VIRTUAL;
}

bool gs_virtual_of(CUdeviceptr address, struct gs_virtual *out) {
    __typeof__(&cuMemGetAddressRange_v2) range = GS_REAL(cuMemGetAddressRange_v2);
    return atomic_load_explicit(&live, memory_order_relaxed) && range &&
           range(&out->base, &out->size, address) == CUDA_SUCCESS &&
           gs_map_get(&gs_memory, out->base, &out->entry) && out->entry.kind == GS_KIND_VIRTUAL;
}

bool gs_virtual_holds(CUdeviceptr address) {
    struct gs_virtual found;
    return gs_virtual_of(address, &found);
}

bool gs_virtual_lives(void) {
    return atomic_load_explicit(&live, memory_order_relaxed) != 0;
}

/* ---- taking --------------------------------------------------------------------------------- */

struct parts {
    uint64_t device, host;
};

static void release_parts(int dev, struct parts parts) {
    gs_release(dev, parts.device);
    gs_release(gs_host_part(dev), parts.host);
}

/* Reserve as much as possible in the host part, and the rest in the device part. Other processes
 * may reserve concurrently. */
static bool reserve_parts(int dev, uint64_t bytes, struct parts *parts) {
    int host = gs_host_part(dev);
    for (unsigned attempt = 0; attempt < ATTEMPTS; attempt++) {
        uint64_t limit = gs_limit(host), used = gs_used(host);
        uint64_t left = used < limit ? (limit - used) / GS_BLOCK * GS_BLOCK : 0;
        parts->host = bytes < left ? bytes : left;
        parts->device = bytes - parts->host;
        if (!gs_reserve(host, parts->host))
            continue;
        if (gs_reserve(dev, parts->device))
            return true;
        gs_release(host, parts->host);
        if (gs_whole(dev).used + bytes > gs_whole(dev).limit)
            break;
    }
    return false;
}

CUresult gs_virtual_advise(CUdeviceptr address, uint64_t bytes, bool to_device, CUdevice device) {
    __typeof__(&cuMemAdvise) real = GS_REAL(cuMemAdvise);
    CUdevice place = to_device ? device : (CUdevice)CU_DEVICE_CPU;
    if (!real)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (!bytes)
        return CUDA_SUCCESS;
    CUresult result = real(address, bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, place);
    if (result == CUDA_SUCCESS && !to_device)
        result = real(address, bytes, CU_MEM_ADVISE_SET_ACCESSED_BY, device);
    return result;
}

/* Whether the host part is borrowed memory: on the device while that has room. The driver moves it
 * to the host when another container allocates there. */
static bool is_lent(int dev) {
    return gs_limit_now(gs_region()->limits, (unsigned)dev).flags & GS_DEVICE_LENT;
}

/* The start may migrate to the device; any reader of the rest reads it from the host. */
static CUresult advise_parts(CUdeviceptr address, uint64_t bytes, struct parts parts,
                             const struct gs_here *here) {
    uint64_t from = parts.device < bytes ? parts.device : bytes;
    CUresult result = gs_virtual_advise(address, from, true, here->device);
    if (result == CUDA_SUCCESS)
        result = gs_virtual_advise(address + from, bytes - from, is_lent(here->dev), here->device);
    return result;
}

static CUresult alloc_managed(CUdeviceptr *out, uint64_t bytes, unsigned int flags,
                              struct parts parts, const struct gs_here *here) {
    __typeof__(&cuMemAllocManaged) real = GS_REAL(cuMemAllocManaged);
    CUresult result = real ? real(out, bytes, flags) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result != CUDA_SUCCESS)
        return result;
    struct gs_entry entry = {.bytes = parts.device + parts.host,
                             .extra = parts.device,
                             .context = (uint64_t)(uintptr_t)here->context,
                             .dev = here->dev,
                             .kind = GS_KIND_VIRTUAL};
    if (advise_parts(*out, bytes, parts, here) != CUDA_SUCCESS) {
        gs_log("allocation refused", "this device cannot use memory that stays on the host",
               "unset GPUSHARE_OVERSUBSCRIBE for this container");
    } else {
        /* A deferred move belongs to an earlier allocation at this address. */
        gs_residency_stays(*out);
        atomic_fetch_add(&live, 1);
        if (gs_map_put(&gs_memory, *out, &entry)) {
            gs_overhead_unlisted(here->dev, (int64_t)parts.device);
            gs_compute_forget(); /* launches that threads remember skip the migration slice */
            return CUDA_SUCCESS;
        }
        atomic_fetch_sub(&live, 1);
    }
    GS_REAL(cuMemFree_v2)(*out);
    *out = 0;
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult gs_virtual_alloc(CUdeviceptr *out, uint64_t bytes, unsigned int flags) {
    struct gs_here here;
    struct parts parts;
    if (!gs_here(&here))
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t rounded = gs_round_up(bytes, GS_BLOCK);
    bool fits = gs_virtual_has(here.dev) && reserve_parts(here.dev, rounded, &parts);
    if (!fits && gs_virtual_has(here.dev) && atomic_load(&gs_virtual_later)) {
        gs_virtual_drain();
        fits = reserve_parts(here.dev, rounded, &parts);
    }
    if (!fits) {
        gs_count_refusal(here.dev);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUresult result = alloc_managed(out, bytes, flags, parts, &here);
    if (result != CUDA_SUCCESS)
        release_parts(here.dev, parts);
    return result;
}

/* ---- giving back ---------------------------------------------------------------------------- */

/* The driver can free such memory only at once, and waits for the device before it does. A free in
 * a stream must not wait: the work in the stream may depend on what this thread does next. */
static struct deferred {
    CUdeviceptr address;
    CUevent event;      /* NULL: its context has ended, and with it the work before the free */
    CUcontext context;  /* of the event */
    bool leaves;        /* its own context is being destroyed */
} deferred[MOST_LATER]; /* behind lock_virtual; the first gs_virtual_later are in use */

static bool defer_free(CUdeviceptr address, CUevent event, CUcontext context) {
    gs_lock(&gs_self()->lock_virtual);
    uint32_t n = atomic_load(&gs_virtual_later);
    bool room = n < MOST_LATER;
    if (room) {
        deferred[n] = (struct deferred){address, event, context, false};
        atomic_store(&gs_virtual_later, n + 1);
    }
    gs_unlock(&gs_self()->lock_virtual);
    return room;
}

/* Remove one entry for which `want` is true. */
static bool remove_one(bool (*want)(const struct deferred *one, uint64_t arg), uint64_t arg,
                       struct deferred *out) {
    bool found = false;
    gs_lock(&gs_self()->lock_virtual);
    uint32_t n = atomic_load(&gs_virtual_later);
    for (uint32_t i = 0; i < n && !found; i++) {
        if (!want(&deferred[i], arg))
            continue;
        *out = deferred[i];
        deferred[i] = deferred[n - 1];
        atomic_store(&gs_virtual_later, n - 1);
        found = true;
    }
    gs_unlock(&gs_self()->lock_virtual);
    return found;
}

bool gs_virtual_free_later(CUdeviceptr address, CUstream stream) {
    __typeof__(&cuEventCreate) create = GS_REAL(cuEventCreate);
    __typeof__(&cuEventRecord) record = GS_REAL(cuEventRecord);
    __typeof__(&cuEventDestroy_v2) destroy = GS_REAL(cuEventDestroy_v2);
    struct gs_here here;
    CUevent event;
    if (!create || !record || !destroy || !GS_REAL(cuEventQuery) || !gs_here(&here) ||
        create(&event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
        return false;
    if (record(event, stream) == CUDA_SUCCESS && defer_free(address, event, here.context))
        return true;
    destroy(event);
    return false;
}

static bool is_reached(const struct deferred *one, uint64_t arg) {
    (void)arg;
    return !one->leaves && (!one->event || GS_REAL(cuEventQuery)(one->event) == CUDA_SUCCESS);
}

/* An address that is no longer in the map is being freed with its context in another thread, and
 * may already belong to another allocation. */
void gs_virtual_drain(void) {
    struct deferred one;
    while (remove_one(is_reached, 0, &one)) {
        if (one.event)
            GS_REAL(cuEventDestroy_v2)(one.event);
        struct gs_entry entry;
        if (!gs_map_take(&gs_memory, one.address, &entry))
            continue;
        if (entry.kind == GS_KIND_VIRTUAL && GS_REAL(cuMemFree_v2)(one.address) == CUDA_SUCCESS)
            gs_virtual_freed(one.address, &entry);
        else
            gs_map_put(&gs_memory, one.address, &entry);
    }
}

void gs_virtual_context_goes(CUcontext context, bool goes) {
    struct gs_entry entry;
    if (!atomic_load(&gs_virtual_later))
        return;
    gs_lock(&gs_self()->lock_virtual);
    for (uint32_t i = 0; i < atomic_load(&gs_virtual_later); i++) {
        struct deferred *one = &deferred[i];
        if (goes && one->event && one->context == context) {
            GS_REAL(cuEventDestroy_v2)(one->event);
            one->event = NULL;
        }
        if (gs_map_get(&gs_memory, one->address, &entry) &&
            entry.context == (uint64_t)(uintptr_t)context)
            one->leaves = goes;
    }
    gs_unlock(&gs_self()->lock_virtual);
}

static bool is_at(const struct deferred *one, uint64_t address) {
    return one->address == address;
}

/* Also called when its context ends: the address may soon belong to another allocation. */
void gs_virtual_freed(uint64_t address, const struct gs_entry *entry) {
    struct deferred one = {.event = NULL};
    if (atomic_load(&gs_virtual_later) && remove_one(is_at, address, &one) && one.event)
        GS_REAL(cuEventDestroy_v2)(one.event);
    gs_residency_stays(address);
    atomic_fetch_sub(&live, 1);
    gs_overhead_unlisted(entry->dev, -(int64_t)entry->extra);
    release_parts(entry->dev, (struct parts){entry->extra, entry->bytes - entry->extra});
}

/* ---- moving, for migration slices ----------------------------------------------------------- */

struct move {
    const struct gs_here *here;
    CUstream stream;
    gs_room_fn room_for; /* grants room on the device; NULL: move to the host */
};

/* Called for every entry; returns false so that none is taken. */
static bool move_one(uint64_t address, const struct gs_entry *entry, void *arg) {
    const struct move *m = arg;
    CUdeviceptr base;
    size_t size;
    if (entry->kind != GS_KIND_VIRTUAL || entry->dev != m->here->dev ||
        GS_REAL(cuMemGetAddressRange_v2)(&base, &size, address) != CUDA_SUCCESS ||
        entry->extra >= size)
        return false;
    uint64_t bytes = size - entry->extra;
    if (m->room_for)
        bytes = m->room_for(entry->dev, bytes);
    if (bytes)
        GS_REAL(cuMemPrefetchAsync)
    (address + entry->extra, bytes, m->room_for ? m->here->device : CU_DEVICE_CPU, m->stream);
    return false;
}

static void never_taken(uint64_t address, const struct gs_entry *entry, void *arg) {
    (void)address, (void)entry, (void)arg;
}

void gs_virtual_move(const struct gs_here *here, CUstream stream, gs_room_fn room_for) {
    struct move move = {here, stream, room_for};
    if (gs_virtual_lives() && GS_REAL(cuMemPrefetchAsync) && GS_REAL(cuMemGetAddressRange_v2))
        gs_map_take_all(&gs_memory, move_one, never_taken, &move);
}
