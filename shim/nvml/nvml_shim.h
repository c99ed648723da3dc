/* What the NVML wrappers share. */
#ifndef GPUSHARE_NVML_SHIM_H
#define GPUSHARE_NVML_SHIM_H

#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>

#include "core/gs.h"
#include "core/real.h"

/* How deep this thread is inside the driver through one of our wrappers. */
extern _Thread_local unsigned gs_nvml_depth;

/* NVML calls itself through its PLT, and so reaches us. True for such a call: it wants the driver's
 * own answer. The depth tells when the outer call came through a wrapper, the return address when
 * it came through a function that we pass. A tail call out of a passed function is taken for the
 * program's, which it is: what we answer goes straight to it. */
static inline bool gs_nvml_inside(const void *return_address) {
    return gs_nvml_depth > 0 || gs_real_contains(return_address);
}

/* `real` = the driver's own function. Without one, and for a call out of the driver, the wrapper
 * ends here. */
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

/* The slot of a device in the limits file. NVML_ERROR_NO_PERMISSION for one that was not granted:
 * it has no limit to report and its real numbers are nobody's business here. */
nvmlReturn_t gs_nvml_dev(nvmlDevice_t device, int *dev);
/* Handles may mean other devices after the next start of NVML. */
void gs_nvml_forget(void);

#endif
