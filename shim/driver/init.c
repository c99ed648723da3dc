/* cuInit: read the limits, then initialise the driver, then claim a slot. Without a limits file
 * there is no GPU: "unlimited" is a value in the file, never a missing file. */
#include "core/busy.h"
#include "core/overhead.h"
#include "driver.h"

static CUresult refuse(const char *reason, const char *hint) {
    gs_log("cuInit refused", reason, hint);
    return CUDA_ERROR_NOT_PERMITTED;
}

static CUresult init_locked(__typeof__(&cuInit) real, unsigned int flags) {
    const struct gs_view *view = gs_region();
    if (!view)
        return refuse(gs_region_refusal(), "start a new container");
    if (gs_slot())
        return real(flags);
    CUresult result = gs_mps_enter(view->limits);
    if (result == CUDA_SUCCESS)
        result = real(flags);
    if (result == CUDA_SUCCESS)
        result = gs_mps_entered(view->limits);
    if (result != CUDA_SUCCESS)
        return result;
    gs_devices_learn(); /* before the slot is claimed: afterwards other threads may allocate */
    if (!gs_compute_ready(view))
        return refuse("the container has a compute limit, but no activity files",
                      "start a new container");
    gs_launches_ready();
    gs_busy_ready();
    if (!gs_slot_claim(view, gs_compute_forget_all))
        return refuse("the container has its maximum number of processes, or cannot start a thread",
                      "run fewer processes");
    for (CUdevice device = 0; device < GS_MAX_ORDINALS; device++)
        gs_overhead_begin(gs_dev_of(device));
    return CUDA_SUCCESS;
}

GS_EXPORT CUresult CUDAAPI cuInit(unsigned int flags) {
    GS_FIND(real, cuInit);
    struct gs_self *self = gs_self();
    if (!self)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!gs_slot() && gs_region()) {
        gs_real_find_all();
        gs_driver_count_open();
    }
    gs_lock(&self->lock_init);
    if (!gs_slot())
        gs_log_open();
    CUresult result = init_locked(real, flags);
    gs_unlock(&self->lock_init);
    return result;
}
