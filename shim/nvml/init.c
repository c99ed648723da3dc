/* Initialise NVML: as with cuInit, there is no GPU without a limits file. */
#include "nvml_shim.h"

static bool refused(void) {
    gs_log_open();
    if (gs_region())
        return false;
    gs_log("nvmlInit refused", gs_region_refusal(), "start a new container");
    return true;
}

#define GS_INIT(fn, ...) \
    GS_NVML_ENTER(real, fn, __VA_ARGS__); \
    if (refused()) \
        return NVML_ERROR_NO_PERMISSION; \
    gs_nvml_forget(); \
    return GS_NVML_CALL(real, __VA_ARGS__)

GS_EXPORT nvmlReturn_t nvmlInit(void) {
    GS_INIT(nvmlInit);
}

GS_EXPORT nvmlReturn_t nvmlInit_v2(void) {
    GS_INIT(nvmlInit_v2);
}

GS_EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    GS_INIT(nvmlInitWithFlags, flags);
}
