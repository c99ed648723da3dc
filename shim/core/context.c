/* Contexts for wrappers: the current one, its device, and its charge. */
#include "context.h"

#include "overhead.h"

struct gs_map gs_memory;
struct gs_map gs_contexts;
static int slot_of_ordinal[GS_MAX_ORDINALS]; /* plus 1, so that nothing is granted at first */

/* A thread's current context seldom changes; `epoch` changes when any context is destroyed. */
static _Atomic uint32_t epoch = 1;
static _Thread_local struct {
    struct gs_here here;
    uint32_t epoch;
} last;

void gs_devices_learn(void) {
    __typeof__(&cuDeviceGetCount) get_count = GS_REAL(cuDeviceGetCount);
    __typeof__(&cuDeviceGet) get = GS_REAL(cuDeviceGet);
    __typeof__(&cuDeviceGetUuid) get_uuid = GS_REAL(cuDeviceGetUuid_v2); /* a MIG device's own */
    int count = 0;
    if (!get_uuid)
        get_uuid = GS_REAL(cuDeviceGetUuid);
    if (!get_count || !get || !get_uuid || get_count(&count) != CUDA_SUCCESS)
        return;
    for (int i = 0; i < count; i++) {
        CUdevice device;
        CUuuid uuid;
        int dev = GS_NO_DEV;
        if (get(&device, i) != CUDA_SUCCESS || device < 0 || device >= GS_MAX_ORDINALS)
            continue;
        if (get_uuid(&uuid, device) == CUDA_SUCCESS)
            dev = gs_slot_of_uuid((const uint8_t *)uuid.bytes);
        slot_of_ordinal[device] = dev + 1;
        if (dev == GS_NO_DEV)
            gs_warn(GS_WARN_UNGRANTED);
    }
}

int gs_dev_of(CUdevice device) {
    return device >= 0 && device < GS_MAX_ORDINALS ? slot_of_ordinal[device] - 1 : GS_NO_DEV;
}

bool gs_device_exists(int ordinal) {
    __typeof__(&cuDeviceGet) get = GS_REAL(cuDeviceGet);
    CUdevice device;
    return gs_dev_of(ordinal) != GS_NO_DEV || !get || get(&device, ordinal) == CUDA_SUCCESS;
}

uint64_t gs_context_overhead(int dev) {
    const struct gs_view *view = gs_region();
    return view && dev >= 0
               ? __atomic_load_n(&view->limits->device[dev].context_bytes, __ATOMIC_RELAXED)
               : 0;
}

void gs_context_forget(void) {
    atomic_fetch_add(&epoch, 1);
}

bool gs_context_learn(CUcontext context, CUdevice device, bool own, uint64_t bytes) {
    struct gs_entry entry;
    if (gs_map_get(&gs_contexts, gs_context_key(context), &entry))
        return false;
    entry = (struct gs_entry){.bytes = bytes,
                              .extra = (uint64_t)(uint32_t)device | UINT64_C(1) << 32,
                              .dev = gs_dev_of(device),
                              .kind = own ? GS_KIND_WHOLE : GS_KIND_FOREIGN};
    gs_map_put(&gs_contexts, gs_context_key(context), &entry);
    gs_context_forget();
    if (own)
        gs_overhead_contexts(entry.dev, 1);
    return true;
}

/* Charge a context that no wrapper saw being created (by a library's private interface). */
static bool find_out(CUcontext context, struct gs_here *here) {
    struct gs_self *self = gs_self();
    __typeof__(&cuCtxGetDevice) get_device = GS_REAL(cuCtxGetDevice);
    struct gs_entry entry;
    CUdevice device;
    if (gs_map_get(&gs_contexts, gs_context_key(context), &entry)) {
        *here = (struct gs_here){context, (CUdevice)(uint32_t)entry.extra, entry.dev};
        return true;
    }
    if (!get_device || get_device(&device) != CUDA_SUCCESS)
        return false;
    *here = (struct gs_here){context, device, gs_dev_of(device)};
    uint64_t bytes = gs_context_overhead(here->dev);
    gs_lock(&self->lock_context);
    if (!gs_map_get(&gs_contexts, gs_context_key(context), &entry)) {
        gs_charge_anyway(here->dev, bytes);
        if (gs_overhead_of_context(here->dev, 0, bytes))
            bytes = 0;
        gs_context_learn(context, device, true, bytes);
    }
    gs_unlock(&self->lock_context);
    return true;
}

bool gs_here(struct gs_here *here) {
    __typeof__(&cuCtxGetCurrent) get_current = GS_REAL(cuCtxGetCurrent);
    CUcontext context = NULL;
    if (!get_current || get_current(&context) != CUDA_SUCCESS || !context)
        return false;
    uint32_t now = atomic_load_explicit(&epoch, memory_order_acquire);
    __typeof__(&last) mine = &last;
    if (mine->here.context == context && mine->epoch == now) {
        *here = mine->here;
        return true;
    }
    if (!find_out(context, here))
        return false;
    mine->here = *here;
    mine->epoch = now;
    return true;
}

bool gs_here_of_stream(CUstream stream, struct gs_here *here) {
    __typeof__(&cuStreamGetCtx) get_context = GS_REAL(cuStreamGetCtx);
    struct gs_entry entry;
    CUcontext context;
    bool special = stream == NULL || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD;
    if (special || !get_context || get_context(stream, &context) != CUDA_SUCCESS ||
        !gs_map_get(&gs_contexts, gs_context_key(context), &entry))
        return gs_here(here);
    *here = (struct gs_here){context, (CUdevice)(uint32_t)entry.extra, entry.dev};
    return true;
}
