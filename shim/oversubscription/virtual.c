/* The part of a share that lies on the host. What a program allocates beyond the device part, or
 * when the device is full for others' doing, is managed memory: its pages are told to stay on the
 * host, and the device reads them there, so that it takes nothing of the device however it is used.
 *
 * The host part has a limit of its own, counted as one more device (gs_host_part). An allocation
 * that fits in neither part alone is divided: the first pages of it may come to the device, and
 * count there, the rest stays on the host. So whatever fits in both together is given. */
#include "accounting/compute.h"
#include "oversubscription.h"

#define ATTEMPTS 8
#define MOST_LATER 1024u

_Atomic uint32_t gs_virtual_later; /* frees that were put off */
static _Atomic uint32_t live;      /* allocations of this kind; 0: there is nothing to look for */

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

static void release(int dev, struct parts parts) {
    gs_release(dev, parts.device);
    gs_release(gs_host_part(dev), parts.host);
}

/* On the host as much as there is room for, the rest on the device. Others may come in between. */
static bool reserve(int dev, uint64_t bytes, struct parts *parts) {
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

/* The start may come to the device; whoever reads the rest does so from there. */
static CUresult advise(CUdeviceptr address, uint64_t bytes, struct parts parts, CUdevice device) {
    uint64_t from = parts.device < bytes ? parts.device : bytes;
    CUresult result = gs_virtual_advise(address, from, true, device);
    if (result == CUDA_SUCCESS)
        result = gs_virtual_advise(address + from, bytes - from, false, device);
    return result;
}

static CUresult take(CUdeviceptr *out, uint64_t bytes, unsigned int flags, struct parts parts,
                     const struct gs_here *here) {
    __typeof__(&cuMemAllocManaged) real = GS_REAL(cuMemAllocManaged);
    CUresult result = real ? real(out, bytes, flags) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result != CUDA_SUCCESS)
        return result;
    struct gs_entry entry = {.bytes = parts.device + parts.host,
                             .extra = parts.device,
                             .context = (uint64_t)(uintptr_t)here->context,
                             .dev = here->dev,
                             .kind = GS_KIND_VIRTUAL};
    if (advise(*out, bytes, parts, here->device) != CUDA_SUCCESS) {
        gs_log("oversubscription", "this device cannot use memory that stays on the host");
    } else {
        gs_residency_stays(*out); /* what is put off was another's, of this address */
        atomic_fetch_add(&live, 1);
        if (gs_map_put(&gs_memory, *out, &entry)) {
            gs_compute_forget(); /* launches that are remembered ask for no turn */
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
    bool fits = gs_virtual_has(here.dev) && reserve(here.dev, rounded, &parts);
    if (!fits && gs_virtual_has(here.dev) && atomic_load(&gs_virtual_later)) {
        gs_virtual_drain();
        fits = reserve(here.dev, rounded, &parts);
    }
    if (!fits) {
        gs_count_refusal(here.dev);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUresult result = take(out, bytes, flags, parts, &here);
    if (result != CUDA_SUCCESS)
        release(here.dev, parts);
    return result;
}

/* ---- giving back ---------------------------------------------------------------------------- */

/* The driver frees such memory at once only, and waits for the device before that. A free in a
 * stream must not: the work in it may wait for what this thread does next. */
static struct later {
    CUdeviceptr address;
    CUevent event;     /* NULL: its context is gone, and what was in front of the free with it */
    CUcontext context; /* of the event */
    bool leaves;       /* with its own context, which is being destroyed */
} later[MOST_LATER];   /* behind lock_virtual; the first gs_virtual_later are in use */

static bool put(CUdeviceptr address, CUevent event, CUcontext context) {
    gs_lock(&gs_self()->lock_virtual);
    uint32_t n = atomic_load(&gs_virtual_later);
    bool room = n < MOST_LATER;
    if (room) {
        later[n] = (struct later){address, event, context, false};
        atomic_store(&gs_virtual_later, n + 1);
    }
    gs_unlock(&gs_self()->lock_virtual);
    return room;
}

/* Take out one for which `want` is true. */
static bool pick(bool (*want)(const struct later *one, uint64_t arg), uint64_t arg,
                 struct later *out) {
    bool found = false;
    gs_lock(&gs_self()->lock_virtual);
    uint32_t n = atomic_load(&gs_virtual_later);
    for (uint32_t i = 0; i < n && !found; i++) {
        if (!want(&later[i], arg))
            continue;
        *out = later[i];
        later[i] = later[n - 1];
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
    if (record(event, stream) == CUDA_SUCCESS && put(address, event, here.context))
        return true;
    destroy(event);
    return false;
}

static bool is_reached(const struct later *one, uint64_t arg) {
    (void)arg;
    return !one->leaves && (!one->event || GS_REAL(cuEventQuery)(one->event) == CUDA_SUCCESS);
}

/* What is not in the map any more goes with its context, in another thread: its address may be
 * somebody else's by now. */
void gs_virtual_drain(void) {
    struct later one;
    while (pick(is_reached, 0, &one)) {
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
        struct later *one = &later[i];
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

static bool is_at(const struct later *one, uint64_t address) {
    return one->address == address;
}

/* Also when its context goes: the address may soon be another allocation's. */
void gs_virtual_freed(uint64_t address, const struct gs_entry *entry) {
    struct later one = {.event = NULL};
    if (atomic_load(&gs_virtual_later) && pick(is_at, address, &one) && one.event)
        GS_REAL(cuEventDestroy_v2)(one.event);
    gs_residency_stays(address);
    atomic_fetch_sub(&live, 1);
    release(entry->dev, (struct parts){entry->extra, entry->bytes - entry->extra});
}

/* ---- moving, for turns ---------------------------------------------------------------------- */

struct move {
    const struct gs_here *here;
    CUstream stream;
    gs_room_fn room_for; /* on the device; NULL: to the host */
};

/* Asked of every entry, of which none is wanted. */
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

static void taken(uint64_t address, const struct gs_entry *entry, void *arg) {
    (void)address, (void)entry, (void)arg;
}

void gs_virtual_move(const struct gs_here *here, CUstream stream, gs_room_fn room_for) {
    struct move move = {here, stream, room_for};
    if (gs_virtual_lives() && GS_REAL(cuMemPrefetchAsync) && GS_REAL(cuMemGetAddressRange_v2))
        gs_map_take_all(&gs_memory, move_one, taken, &move);
}
