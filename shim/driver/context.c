/* Contexts: each uses memory before the program allocates any (context_bytes of the limits file),
 * and everything that was allocated in it is freed with it. */

#include "core/overhead.h"
#include "driver.h"

static struct {
    uint32_t retained;
    CUcontext context;
    uint64_t unnamed; /* charged before the handle of the context was known */
} primary[GS_MAX_ORDINALS];

/* ---- creating contexts (context_make.c) -------------------------------------------------- */

/* Reserve the overhead exactly, not in blocks: it is a measured number. */
CUresult gs_context_begin(struct gs_charge *charge, CUdevice device) {
    uint64_t exact = gs_context_overhead(gs_dev_of(device));
    CUresult result = gs_charge_begin_on(charge, device, exact);
    if (result == CUDA_SUCCESS && charge->bytes > exact) {
        gs_release(charge->dev, charge->bytes - exact);
        charge->bytes = exact;
    }
    if (result != CUDA_SUCCESS)
        return result;
    charge->counted = gs_overhead_before_context(charge->dev);
    gs_overhead_bound(charge->dev, (int64_t)charge->bytes);
    return result;
}

/* The estimate was reserved. If the context was created and the driver has a count, that replaces
 * the estimate. */
static void true_up(struct gs_charge *charge, CUresult result) {
    if (charge->passed)
        return;
    gs_overhead_bound(charge->dev, -(int64_t)charge->bytes);
    if (result == CUDA_SUCCESS &&
        gs_overhead_of_context(charge->dev, charge->counted, charge->bytes))
        charge->bytes = 0;
}

bool gs_context_again(const struct gs_charge *charge, CUresult result, struct gs_reclaim *reclaim) {
    return result == CUDA_ERROR_OUT_OF_MEMORY && !charge->passed &&
           gs_reclaim(reclaim, charge->dev, charge->bytes);
}

CUresult gs_context_made(struct gs_charge *charge, CUresult result, const CUcontext *context,
                         CUdevice device) {
    gs_now_current(NULL); /* a new context becomes current in this thread */
    true_up(charge, result);
    if (result != CUDA_SUCCESS || !context ||
        !gs_context_learn(*context, device, !charge->passed, charge->bytes))
        gs_charge_abort(charge);
    return result;
}

void gs_context_grow(CUcontext context, int64_t bytes) {
    struct gs_entry entry;
    gs_lock(&gs_self()->lock_context);
    if (gs_map_take(&gs_contexts, gs_context_key(context), &entry)) {
        entry.bytes += (uint64_t)bytes;
        gs_map_put(&gs_contexts, gs_context_key(context), &entry);
    }
    gs_unlock(&gs_self()->lock_context);
}

/* ---- destroying contexts -------------------------------------------------------------------- */

static void release_context(const struct gs_entry *entry) {
    gs_release(entry->dev, entry->bytes);
    gs_context_forget();
    if (entry->kind == GS_KIND_WHOLE)
        gs_overhead_contexts(entry->dev, -1);
}

static CUresult destroy_context(CUcontext context, CUresult (*call)(CUcontext)) {
    struct gs_entry entry;
    if (!gs_slot())
        return call(context);
    GS_CHANGES;
    bool known = gs_map_take(&gs_contexts, gs_context_key(context), &entry);
    struct gs_dropped *dropped = gs_drop_begin(context);
    struct gs_leaving leaving;
    gs_compute_context_goes(&leaving, context);
    CUresult result = call(context);
    gs_compute_context_gone(&leaving, result, false);
    gs_captures_context_gone(context);
    gs_now_current(NULL);
    gs_drop_end(dropped, result == CUDA_SUCCESS);
    if (known && result == CUDA_SUCCESS)
        release_context(&entry);
    else if (known)
        gs_map_put(&gs_contexts, gs_context_key(context), &entry);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuCtxDestroy(CUcontext ctx) {
    GS_NEED(real, cuCtxDestroy);
    return destroy_context(ctx, real);
}

GS_EXPORT CUresult CUDAAPI cuCtxDestroy_v2(CUcontext ctx) {
    GS_NEED(real, cuCtxDestroy_v2);
    return destroy_context(ctx, real);
}

/* Count the uses of a context by cuCtxAttach and cuCtxDetach. Return the new number, 0 for an
 * unknown context. */
static uint32_t count_use(CUcontext context, int change) {
    struct gs_self *self = gs_self();
    struct gs_entry entry;
    uint32_t uses = 0;
    gs_lock(&self->lock_context);
    if (gs_map_take(&gs_contexts, gs_context_key(context), &entry)) {
        uses = (uint32_t)((int)(entry.extra >> 32) + change);
        entry.extra = (uint64_t)uses << 32 | (uint32_t)entry.extra;
        gs_map_put(&gs_contexts, gs_context_key(context), &entry);
    }
    gs_unlock(&self->lock_context);
    return uses;
}

GS_EXPORT CUresult CUDAAPI cuCtxAttach(CUcontext *pctx, unsigned int flags) {
    GS_NEED(real, cuCtxAttach);
    CUresult result = real(pctx, flags);
    if (gs_slot() && result == CUDA_SUCCESS && pctx)
        count_use(*pctx, 1);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuCtxDetach(CUcontext ctx) {
    GS_NEED(real, cuCtxDetach);
    if (!gs_slot())
        return real(ctx);
    if (count_use(ctx, -1) == 0)
        return destroy_context(ctx, real);
    CUresult result = real(ctx);
    if (result != CUDA_SUCCESS)
        count_use(ctx, 1);
    return result;
}

/* ---- the primary context: one per process and device, counted ------------------------------- */

static bool primary_active(CUdevice device) {
    __typeof__(&cuDevicePrimaryCtxGetState) get_state = GS_REAL(cuDevicePrimaryCtxGetState);
    unsigned int flags;
    int active = 0;
    return get_state && get_state(device, &flags, &active) == CUDA_SUCCESS && active;
}

/* The driver reports that the primary context is not active any more; the caller holds the lock. */
static void primary_gone(CUdevice device) {
    struct gs_entry entry;
    CUcontext context = primary[device].context;
    gs_compute_context_lost(context);
    gs_captures_context_gone(context);
    if (context && gs_map_take(&gs_contexts, gs_context_key(context), &entry))
        release_context(&entry);
    gs_release(gs_dev_of(device), primary[device].unnamed);
    primary[device].context = NULL;
    primary[device].unnamed = 0;
    primary[device].retained = 0;
}

/* A green context keeps the primary context alive, like one more retain. */
CUresult gs_primary_used(CUdevice device, CUresult (*call)(void *arg), void *arg) {
    struct gs_charge charge = {.passed = true};
    CUresult result = CUDA_SUCCESS;
    gs_lock(&gs_self()->lock_context);
    if (!primary_active(device))
        result = gs_context_begin(&charge, device);
    bool begun = result == CUDA_SUCCESS;
    if (begun) {
        GS_CONTEXT_CALL(result, charge, call(arg));
        true_up(&charge, result);
    }
    if (begun && result != CUDA_SUCCESS)
        gs_charge_abort(&charge);
    else if (result == CUDA_SUCCESS && device >= 0 && device < GS_MAX_ORDINALS) {
        primary[device].retained++;
        if (!charge.passed)
            primary[device].unnamed += charge.bytes;
    }
    gs_unlock(&gs_self()->lock_context);
    return result;
}

void gs_primary_unused(CUdevice device) {
    if (device < 0 || device >= GS_MAX_ORDINALS)
        return;
    gs_lock(&gs_self()->lock_context);
    if (primary[device].retained)
        primary[device].retained--;
    if (!primary_active(device)) {
        gs_drop_end(gs_drop_begin(primary[device].context), true);
        primary_gone(device);
    }
    gs_unlock(&gs_self()->lock_context);
}

static CUresult retain_locked(__typeof__(&cuDevicePrimaryCtxRetain) real, CUcontext *pctx,
                              CUdevice device) {
    struct gs_charge charge = {.passed = true};
    CUresult result = CUDA_SUCCESS;
    if (!primary_active(device) && (result = gs_context_begin(&charge, device)) != CUDA_SUCCESS)
        return result;
    GS_CONTEXT_CALL(result, charge, real(pctx, device));
    true_up(&charge, result);
    if (result != CUDA_SUCCESS || !pctx) {
        gs_charge_abort(&charge);
        return result;
    }
    primary[device].retained++;
    primary[device].context = *pctx;
    if (primary[device].unnamed && gs_context_learn(*pctx, device, true, primary[device].unnamed))
        primary[device].unnamed = 0;
    if (!charge.passed && !gs_context_learn(*pctx, device, true, charge.bytes))
        gs_charge_abort(&charge);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev) {
    GS_NEED(real, cuDevicePrimaryCtxRetain);
    if (!gs_slot() || dev < 0 || dev >= GS_MAX_ORDINALS)
        return real(pctx, dev);
    gs_lock(&gs_self()->lock_context);
    CUresult result = retain_locked(real, pctx, dev);
    gs_unlock(&gs_self()->lock_context);
    return result;
}

/* Release and reset: afterwards the driver reports whether the context is still active. */
static CUresult primary_goes(CUresult (*call)(CUdevice), CUdevice device, bool reset) {
    if (!gs_slot() || device < 0 || device >= GS_MAX_ORDINALS)
        return call(device);
    GS_CHANGES;
    gs_lock(&gs_self()->lock_context);
    CUcontext context = primary[device].context;
    bool last_use = reset || primary[device].retained <= 1;
    struct gs_dropped *dropped = last_use && context ? gs_drop_begin(context) : NULL;
    struct gs_leaving leaving = {0};
    if (last_use)
        gs_compute_context_goes(&leaving, context);
    CUresult result = call(device);
    /* The driver's own number of uses decides, not the number seen here. */
    bool gone = result == CUDA_SUCCESS && !primary_active(device);
    if (gone && context && !dropped)
        dropped = gs_drop_begin(context);
    gs_compute_context_gone(&leaving, result, result == CUDA_SUCCESS && !reset && !gone);
    gs_drop_end(dropped, gone || (reset && result == CUDA_SUCCESS));
    if (result == CUDA_SUCCESS && !reset && primary[device].retained)
        primary[device].retained--;
    if (gone)
        primary_gone(device);
    gs_unlock(&gs_self()->lock_context);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice dev) {
    GS_NEED(real, cuDevicePrimaryCtxRelease);
    return primary_goes(real, dev, false);
}

GS_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRelease_v2(CUdevice dev) {
    GS_NEED(real, cuDevicePrimaryCtxRelease_v2);
    return primary_goes(real, dev, false);
}

GS_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxReset(CUdevice dev) {
    GS_NEED(real, cuDevicePrimaryCtxReset);
    return primary_goes(real, dev, true);
}

GS_EXPORT CUresult CUDAAPI cuDevicePrimaryCtxReset_v2(CUdevice dev) {
    GS_NEED(real, cuDevicePrimaryCtxReset_v2);
    return primary_goes(real, dev, true);
}
