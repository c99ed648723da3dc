/* How much of an allocation that lies on the host is on the device: its first bytes, up to a
 * border, which count there (virtual.c). A program that prefetches to the device moves the
 * border, as far as the share has room there, and one that prefetches back moves it back. So a hint
 * takes nothing of the device that an allocation could not have taken.
 *
 * What goes back to the host counts on the device until the program has waited for its context:
 * before that it may still be there. */
#include "oversubscription.h"

#define ATTEMPTS 8
#define MOST_ROWS 256u

_Atomic uint64_t gs_residency_put_off;
_Atomic uint32_t gs_residency_waiting;

static struct row {
    CUdeviceptr base;
    CUcontext context;
    uint64_t border; /* which it gets */
    uint64_t number; /* of gs_residency_put_off */
} rows[MOST_ROWS];   /* behind lock_border; the first gs_residency_waiting are in use */

static uint64_t least(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static bool border_of(CUdeviceptr base, struct gs_entry *entry) {
    return gs_map_get(&gs_memory, base, entry) && entry->kind == GS_KIND_VIRTUAL;
}

/* What moves counts in both parts for a moment, so never in none. False: no room, or somebody else
 * moved it. */
static bool move(CUdeviceptr base, const struct gs_entry *entry, uint64_t border) {
    bool up = border > entry->extra;
    uint64_t bytes = up ? border - entry->extra : entry->extra - border;
    int device = entry->dev, host = gs_host_part(device);
    if (!gs_reserve_moved(up ? device : host, bytes))
        return false;
    bool moved = gs_map_swap(&gs_memory, base, entry->extra, border);
    gs_release(up == moved ? host : device, bytes);
    return moved;
}

/* ---- to the device -------------------------------------------------------------------------- */

/* Room for a context is left: a hint shall not be why a process of the container cannot begin. */
static uint64_t room_on(int dev) {
    uint64_t limit = gs_limit(dev);
    uint64_t used = gs_used(dev) + gs_region()->limits->device[dev].context_bytes;
    return used < limit ? (limit - used) / GS_BLOCK * GS_BLOCK : 0;
}

/* The border, now at `to` where there is room for that. It does not leap over what is not asked
 * for. */
static uint64_t grow(CUdeviceptr base, uint64_t from, uint64_t to) {
    struct gs_entry entry = {.extra = 0};
    for (unsigned attempt = 0; attempt < ATTEMPTS && border_of(base, &entry); attempt++) {
        uint64_t wanted = least(gs_round_up(to, GS_BLOCK), entry.bytes);
        if (from > entry.extra || wanted <= entry.extra)
            break;
        uint64_t more = least(wanted - entry.extra, room_on(entry.dev));
        if (!more)
            break;
        if (move(base, &entry, entry.extra + more))
            return entry.extra + more;
    }
    return entry.extra;
}

static CUresult bring(const struct gs_virtual *memory, uint64_t from, uint64_t to, CUdevice device,
                      CUstream stream, gs_prefetch_fn real) {
    gs_residency_stays(memory->base);
    uint64_t until = least(to, grow(memory->base, from, to));
    if (from >= until)
        return CUDA_SUCCESS;
    gs_virtual_advise(memory->base + from, until - from, true, device);
    return real(memory->base + from, until - from, device, stream);
}

/* ---- to the host ---------------------------------------------------------------------------- */

static void put_off(const struct gs_virtual *memory, uint64_t border, CUcontext context) {
    gs_lock(&gs_self()->lock_border);
    uint32_t n = atomic_load(&gs_residency_waiting);
    if (n < MOST_ROWS) { /* else it stays charged where it was */
        uint64_t number = atomic_fetch_add(&gs_residency_put_off, 1) + 1;
        rows[n] = (struct row){memory->base, context, border, number};
        atomic_store(&gs_residency_waiting, n + 1);
    }
    gs_unlock(&gs_self()->lock_border);
}

static CUresult send(const struct gs_virtual *memory, uint64_t from, uint64_t to, CUstream stream,
                     gs_prefetch_fn real) {
    struct gs_entry entry;
    struct gs_here here;
    uint64_t border = gs_round_up(from, GS_BLOCK);
    bool shrinks = border_of(memory->base, &entry) && border < entry.extra &&
                   to >= least(entry.extra, memory->size) && gs_here_of_stream(stream, &here) &&
                   here.dev == entry.dev;
    /* Before it goes, so that no kernel fetches it again. */
    if (shrinks &&
        gs_virtual_advise(memory->base + border, least(entry.extra, memory->size) - border, false,
                          here.device) != CUDA_SUCCESS)
        shrinks = false;
    CUresult result = real(memory->base + from, to - from, CU_DEVICE_CPU, stream);
    if (result == CUDA_SUCCESS && shrinks)
        put_off(memory, border, here.context);
    return result;
}

void gs_residency_stays(CUdeviceptr base) {
    if (!atomic_load(&gs_residency_waiting))
        return;
    gs_lock(&gs_self()->lock_border);
    uint32_t n = atomic_load(&gs_residency_waiting);
    for (uint32_t i = 0; i < n;)
        if (rows[i].base == base)
            rows[i] = rows[--n];
        else
            i++;
    atomic_store(&gs_residency_waiting, n);
    gs_unlock(&gs_self()->lock_border);
}

/* Where the host's part has no room for it, it stays charged where it was. */
static void move_back(const struct row *row) {
    struct gs_entry entry;
    if (border_of(row->base, &entry) && row->border < entry.extra)
        move(row->base, &entry, row->border);
}

void gs_residency_synced(uint64_t number) {
    struct gs_here here;
    if (!gs_slot() || !gs_here(&here))
        return;
    gs_lock(&gs_self()->lock_border);
    uint32_t n = atomic_load(&gs_residency_waiting);
    for (uint32_t i = 0; i < n;) {
        if (rows[i].context != here.context || rows[i].number > number) {
            i++;
            continue;
        }
        move_back(&rows[i]);
        rows[i] = rows[--n];
    }
    atomic_store(&gs_residency_waiting, n);
    gs_unlock(&gs_self()->lock_border);
}

/* ---- prefetches ----------------------------------------------------------------------------- */

/* A graph's prefetch goes when the graph does, and then nobody asks whether there is room. */
static bool captured(CUstream stream) {
    __typeof__(&cuStreamIsCapturing) ask = GS_REAL(cuStreamIsCapturing);
    CUstreamCaptureStatus status;
    return !ask || ask(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

CUresult gs_residency_prefetch(const struct gs_virtual *memory, CUdeviceptr from, size_t bytes,
                               CUdevice to, CUstream stream, gs_prefetch_fn real) {
    uint64_t offset = from - memory->base;
    if (!bytes || bytes > memory->size - offset)
        return real(from, bytes, to, stream); /* the driver has a word for it */
    if (captured(stream))
        return CUDA_SUCCESS;
    if (to == (CUdevice)CU_DEVICE_CPU)
        return send(memory, offset, offset + bytes, stream, real);
    if (gs_dev_of(to) != memory->entry.dev) /* where it counts for nothing */
        return CUDA_SUCCESS;
    return bring(memory, offset, offset + bytes, to, stream, real);
}
