/* The charge of an allocation: reserved before the call to the driver, corrected to what the driver
 * allocated. */
#include <stdlib.h>

#include "memory.h"

struct gs_map gs_objects;
struct gs_map gs_loaded;
struct gs_map gs_streams;
struct gs_map gs_graphs;

/* Before a refusal, return the unused memory of this process's pools to the driver. If the caller
 * then allocates on the host (oversubscription/virtual.c), no refusal is counted. */
static bool reserve_or_trim(int dev, uint64_t bytes) {
    if (gs_reserve(dev, bytes))
        return true;
    if (bytes <= gs_limit(dev)) {
        gs_overhead_refusing(dev);
        gs_pools_settle(dev);
        if (gs_reserve(dev, bytes))
            return true;
        gs_pools_trim(dev);
        if (gs_reserve_patiently(dev, bytes))
            return true;
    }
    return false;
}

CUresult gs_charge_try(struct gs_charge *charge, uint64_t bytes) {
    struct gs_here here;
    if (!gs_slot())
        return CUDA_ERROR_NOT_INITIALIZED;
    charge->passed = !gs_here(&here);
    charge->managed = false;
    charge->dev = GS_NO_DEV;
    if (charge->passed)
        return CUDA_SUCCESS;
    charge->context = here.context;
    charge->dev = here.dev;
    charge->bytes = gs_round_up(bytes, GS_BLOCK);
    return reserve_or_trim(charge->dev, charge->bytes) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult gs_charge_begin(struct gs_charge *charge, uint64_t bytes) {
    CUresult result = gs_charge_try(charge, bytes);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        gs_count_refusal(charge->dev);
    return result;
}

CUresult gs_charge_try_on(struct gs_charge *charge, CUdevice device, uint64_t bytes) {
    if (!gs_slot())
        return CUDA_ERROR_NOT_INITIALIZED;
    *charge = (struct gs_charge){.dev = gs_dev_of(device), .bytes = gs_round_up(bytes, GS_BLOCK)};
    return reserve_or_trim(charge->dev, charge->bytes) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult gs_charge_begin_on(struct gs_charge *charge, CUdevice device, uint64_t bytes) {
    CUresult result = gs_charge_try_on(charge, device, bytes);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        gs_count_refusal(charge->dev);
    return result;
}

CUresult gs_growth_begin(struct gs_growth *growth, CUdevice device, uint64_t bound) {
    struct gs_charge charge = {.bytes = 0};
    *growth = (struct gs_growth){.dev = gs_dev_of(device)};
    CUresult result = bound ? gs_charge_begin_on(&charge, device, bound) : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS)
        return result;
    growth->bytes = bound;
    growth->bound = charge.bytes;
    gs_overhead_bound(growth->dev, (int64_t)growth->bound);
    return result;
}

void gs_charge_abort(struct gs_charge *charge) {
    if (!charge->passed)
        gs_release(charge->dev, charge->bytes);
}

CUresult gs_charge_linear(struct gs_charge *charge, uint64_t address, uint64_t bytes) {
    if (charge->passed) /* the driver should have refused it */
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t took = gs_blocks_take(address, bytes);
    if (took > charge->bytes && !gs_reserve(charge->dev, took - charge->bytes)) {
        /* An address that is not aligned to a block can touch one block more. Other allocations may
         * have come to share a block that this one counted first: that block stays charged. */
        uint64_t keep = took - gs_blocks_give(address, bytes);
        if (keep > charge->bytes)
            gs_charge_anyway(charge->dev, keep - charge->bytes);
        else
            gs_release(charge->dev, charge->bytes - keep);
        gs_count_refusal(charge->dev);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (took < charge->bytes)
        gs_release(charge->dev, charge->bytes - took);
    struct gs_entry entry = {.bytes = bytes,
                             .context = (uint64_t)(uintptr_t)charge->context,
                             .dev = charge->dev,
                             .kind = GS_KIND_LINEAR,
                             .extra = charge->managed};
    if (charge->managed)
        gs_overhead_unlisted(charge->dev, (int64_t)took);
    if (gs_map_put(&gs_memory, address, &entry))
        return CUDA_SUCCESS;
    if (charge->managed)
        gs_overhead_unlisted(charge->dev, -(int64_t)took);
    gs_release(charge->dev, gs_blocks_give(address, bytes));
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult gs_charge_object(struct gs_charge *charge, struct gs_map *map, uint64_t handle,
                          uint64_t bytes) {
    if (charge->passed)
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t keep = gs_round_up(bytes, GS_BLOCK);
    struct gs_entry entry = {.bytes = keep,
                             .context = (uint64_t)(uintptr_t)charge->context,
                             .dev = charge->dev,
                             .kind = GS_KIND_WHOLE};
    bool fits = keep <= charge->bytes || gs_reserve(charge->dev, keep - charge->bytes);
    if (!fits) {
        gs_release(charge->dev, charge->bytes);
        gs_count_refusal(charge->dev);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (keep < charge->bytes)
        gs_release(charge->dev, charge->bytes - keep);
    if (gs_map_put(map, handle, &entry))
        return CUDA_SUCCESS;
    gs_release(charge->dev, keep);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static void release_linear(uint64_t address, const struct gs_entry *entry) {
    uint64_t bytes = gs_blocks_give(address, entry->bytes);
    if (entry->extra)
        gs_overhead_unlisted(entry->dev, -(int64_t)bytes);
    gs_release(entry->dev, bytes);
}

void gs_uncharge(uint64_t key, const struct gs_entry *entry) {
    switch (entry->kind) {
    case GS_KIND_LINEAR:
        if (gs_export_address_freed(key))
            release_linear(key, entry);
        break;
    case GS_KIND_WHOLE:
    case GS_KIND_CODE:
        gs_release(entry->dev, entry->bytes);
        break;
    case GS_KIND_VIRTUAL:
        gs_virtual_freed(key, entry);
        break;
    case GS_KIND_POOLED:
        gs_pooled_freed(entry);
        break;
    }
}

/* ---- a context ends, with everything allocated in it ---------------------------------------- */

struct gs_dropped {
    CUcontext context;
    struct gs_map *map; /* that is being walked now */
    size_t n, room;
    struct dropped_one {
        struct gs_map *map;
        uint64_t key;
        struct gs_entry entry;
    } * one;
};

static bool of_context(uint64_t key, const struct gs_entry *entry, void *arg) {
    struct gs_dropped *d = arg;
    (void)key;
    if (entry->context != (uint64_t)(uintptr_t)d->context)
        return false;
    if (d->n < d->room)
        return true;
    size_t room = d->room ? 2 * d->room : 256;
    struct dropped_one *more = realloc(d->one, room * sizeof(*more));
    if (more) {
        d->one = more;
        d->room = room;
    }
    return more; /* if memory is short, the entry stays in the map and charged */
}

static void collect(uint64_t key, const struct gs_entry *entry, void *arg) {
    struct gs_dropped *d = arg;
    d->one[d->n++] = (struct dropped_one){.map = d->map, .key = key, .entry = *entry};
}

struct gs_dropped *gs_drop_begin(CUcontext context) {
    struct gs_map *const maps[] = {&gs_memory, &gs_objects, &gs_loaded, &gs_streams, &gs_graphs};
    struct gs_dropped *dropped = calloc(1, sizeof(*dropped));
    if (!dropped || !context)
        return dropped;
    dropped->context = context;
    gs_virtual_context_goes(context, true);
    for (size_t i = 0; i < sizeof(maps) / sizeof(maps[0]); i++) {
        dropped->map = maps[i];
        gs_map_take_all(maps[i], of_context, collect, dropped);
    }
    return dropped;
}

void gs_drop_end(struct gs_dropped *dropped, bool gone) {
    if (!dropped)
        return;
    for (size_t i = 0; i < dropped->n; i++) {
        struct dropped_one *one = &dropped->one[i];
        if (gone)
            gs_uncharge(one->key, &one->entry);
        else
            gs_map_put(one->map, one->key, &one->entry);
    }
    if (!gone && dropped->context)
        gs_virtual_context_goes(dropped->context, false);
    free(dropped->one);
    free(dropped);
}
