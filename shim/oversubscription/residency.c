/* How much of an allocation in the host part is on the device: its first bytes, up to the residency
 * boundary, which count in the device part (virtual.c). A prefetch to the device moves the boundary
 * up, as far as the share has room there, and a prefetch to the host moves it down. So a hint uses
 * no device memory that an allocation could not have used.
 *
 * Memory that goes to the host counts on the device until the program has synchronised with its
 * context: until then it may still be there. */
#include "oversubscription.h"

#define ATTEMPTS 8
#define MOST_ROWS 256u

_Atomic uint64_t gs_residency_put_off;
_Atomic uint32_t gs_residency_waiting;

static struct row {
    CUdeviceptr base;
    CUcontext context;
    uint64_t boundary; /* the new one */
    uint64_t number;   /* of gs_residency_put_off */
} rows[MOST_ROWS];     /* behind lock_border; the first gs_residency_waiting are in use */

static uint64_t smaller(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static bool boundary_entry(CUdeviceptr base, struct gs_entry *entry) {
    return gs_map_get(&gs_memory, base, entry) && entry->kind == GS_KIND_VIRTUAL;
}

/* The bytes that move count in both parts for a moment, so that they never count in neither. Return
 * false if there is no room or another thread moved the boundary. */
static bool move_boundary(CUdeviceptr base, const struct gs_entry *entry, uint64_t boundary) {
    bool up = boundary > entry->extra;
    uint64_t bytes = up ? boundary - entry->extra : entry->extra - boundary;
    int device = entry->dev, host = gs_host_part(device);
    if (!gs_reserve_moved(up ? device : host, bytes))
        return false;
    bool moved = gs_map_swap(&gs_memory, base, entry->extra, boundary);
    if (moved)
        gs_overhead_unlisted(device, up ? (int64_t)bytes : -(int64_t)bytes);
    gs_release(up == moved ? host : device, bytes);
    return moved;
}

/* ---- to the device -------------------------------------------------------------------------- */

/* Leave room for one context: a hint must not keep a process of the container from starting. */
static uint64_t room_on(int dev) {
    uint64_t limit = gs_limit(dev);
    uint64_t used = gs_used(dev) + gs_region()->limits->device[dev].context_bytes;
    return used < limit ? (limit - used) / GS_BLOCK * GS_BLOCK : 0;
}

/* Return the boundary after moving it to `to`, as far as there is room. It never skips bytes that
 * were not requested. */
static uint64_t grow_boundary(CUdeviceptr base, uint64_t from, uint64_t to) {
    struct gs_entry entry = {.extra = 0};
    for (unsigned attempt = 0; attempt < ATTEMPTS && boundary_entry(base, &entry); attempt++) {
        uint64_t wanted = smaller(gs_round_up(to, GS_BLOCK), entry.bytes);
        if (from > entry.extra || wanted <= entry.extra)
            break;
        uint64_t more = smaller(wanted - entry.extra, room_on(entry.dev));
        if (!more)
            break;
        if (move_boundary(base, &entry, entry.extra + more))
            return entry.extra + more;
    }
    return entry.extra;
}

static CUresult prefetch_to_device(const struct gs_virtual *memory, uint64_t from, uint64_t to,
                                   CUdevice device, CUstream stream, gs_prefetch_fn real) {
    gs_residency_stays(memory->base);
    uint64_t until = smaller(to, grow_boundary(memory->base, from, to));
    if (from >= until)
        return CUDA_SUCCESS;
    gs_virtual_advise(memory->base + from, until - from, true, device);
    return real(memory->base + from, until - from, device, stream);
}

/* ---- to the host ---------------------------------------------------------------------------- */

static void defer_move(const struct gs_virtual *memory, uint64_t boundary, CUcontext context) {
    gs_lock(&gs_self()->lock_border);
    uint32_t n = atomic_load(&gs_residency_waiting);
    if (n < MOST_ROWS) { /* else the bytes stay charged to the device part */
        uint64_t number = atomic_fetch_add(&gs_residency_put_off, 1) + 1;
        rows[n] = (struct row){memory->base, context, boundary, number};
        atomic_store(&gs_residency_waiting, n + 1);
    }
    gs_unlock(&gs_self()->lock_border);
}

static CUresult prefetch_to_host(const struct gs_virtual *memory, uint64_t from, uint64_t to,
                                 CUstream stream, gs_prefetch_fn real) {
    struct gs_entry entry;
    struct gs_here here;
    uint64_t boundary = gs_round_up(from, GS_BLOCK);
    bool shrinks = boundary_entry(memory->base, &entry) && boundary < entry.extra &&
                   to >= smaller(entry.extra, memory->size) && gs_here_of_stream(stream, &here) &&
                   here.dev == entry.dev;
    /* Before the prefetch, so that no kernel brings the memory back. */
    if (shrinks &&
        gs_virtual_advise(memory->base + boundary, smaller(entry.extra, memory->size) - boundary,
                          false, here.device) != CUDA_SUCCESS)
        shrinks = false;
    CUresult result = real(memory->base + from, to - from, CU_DEVICE_CPU, stream);
    if (result == CUDA_SUCCESS && shrinks)
        defer_move(memory, boundary, here.context);
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

/* If the host part has no room, the bytes stay charged to the device part. */
static void move_back(const struct row *row) {
    struct gs_entry entry;
    if (boundary_entry(row->base, &entry) && row->boundary < entry.extra)
        move_boundary(row->base, &entry, row->boundary);
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

/* A captured prefetch runs with its graph, when the shim cannot check for room. */
static bool is_capturing(CUstream stream) {
    __typeof__(&cuStreamIsCapturing) ask = GS_REAL(cuStreamIsCapturing);
    CUstreamCaptureStatus status;
    return !ask || ask(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

CUresult gs_residency_prefetch(const struct gs_virtual *memory, CUdeviceptr from, size_t bytes,
                               CUdevice to, CUstream stream, gs_prefetch_fn real) {
    uint64_t offset = from - memory->base;
    if (!bytes || bytes > memory->size - offset)
        return real(from, bytes, to, stream); /* the driver reports the error */
    if (is_capturing(stream))
        return CUDA_SUCCESS;
    if (to == (CUdevice)CU_DEVICE_CPU)
        return prefetch_to_host(memory, offset, offset + bytes, stream, real);
    if (gs_dev_of(to) != memory->entry.dev) /* a device where the memory is not charged */
        return CUDA_SUCCESS;
    return prefetch_to_device(memory, offset, offset + bytes, to, stream, real);
}
