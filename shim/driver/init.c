/* cuInit: read the limits, then initialise the driver, then claim a slot. Without a limits file
 * there is no GPU: "unlimited" is a value in the file, never a missing file. */
#include "driver.h"

static CUresult refuse(const char *reason) {
    gs_log("cuInit refused", reason);
    return CUDA_ERROR_NOT_PERMITTED;
}

static CUresult init_locked(__typeof__(&cuInit) real, unsigned int flags) {
    const struct gs_view *view = gs_region();
    if (!view)
        return refuse(gs_region_refusal());
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
        return refuse("compute is limited, but the container has no activity files");
    gs_launches_ready();
    if (!gs_slot_claim(view, gs_compute_forget_all))
        return refuse("no free slot: too many processes, or a thread cannot be started");
    return CUDA_SUCCESS;
}

GS_EXPORT CUresult CUDAAPI cuInit(unsigned int flags) {
    GS_NEED(real, cuInit);
    struct gs_self *self = gs_self();
    if (!self)
        return CUDA_ERROR_OUT_OF_MEMORY;
    gs_lock(&self->lock_init);
    if (!gs_slot())
        gs_log_open();
    CUresult result = init_locked(real, flags);
    gs_unlock(&self->lock_init);
    return result;
}
