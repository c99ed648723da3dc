/* Common declarations of the NVML wrappers. */
#ifndef GPUSHARE_NVML_SHIM_H
#define GPUSHARE_NVML_SHIM_H

#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>

#include "core/gs.h"
#include "core/real.h"

/* How many wrapper calls into the driver this thread is in. */
extern _Thread_local unsigned gs_nvml_depth;

/* NVML calls its own functions through its PLT, which resolves to the shim. Return whether this is
 * such a call: it must get the driver's own result. The depth shows it if the outer call came
 * through a wrapper, the return address if it came through a function without one. A tail call from
 * a function without a wrapper counts as the program's own call, which is right: the result goes
 * directly to the program. */
static inline bool gs_nvml_inside(const void *return_address) {
    return gs_nvml_depth > 0 || gs_real_contains(return_address);
}

/* `real` = the driver's own function. The wrapper returns here if there is none, or for a call from
 * the driver itself. */
#define GS_NVML_ENTER(real, fn, ...) \
    __typeof__(&fn) real = GS_REAL(fn); \
    if (!real) \
        return NVML_ERROR_FUNCTION_NOT_FOUND; \
    if (gs_nvml_inside(__builtin_return_address(0))) \
    return real(__VA_ARGS__)

/* Call the driver from a wrapper. */
#define GS_NVML_CALL(real, ...) \
    ({ \
        gs_nvml_depth++; \
        nvmlReturn_t result_ = (real)(__VA_ARGS__); \
        gs_nvml_depth--; \
        result_; \
    })

/* Return the slot of a device in the limits file. NVML_ERROR_NO_PERMISSION for a device that was
 * not granted: it has no limit to report, and its real numbers must not be visible here. */
nvmlReturn_t gs_nvml_dev(nvmlDevice_t device, int *dev);
/* Forget all handles: after NVML is initialised again they may mean other devices. */
void gs_nvml_forget(void);

#endif
