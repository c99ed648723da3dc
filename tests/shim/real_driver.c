/* A future driver's libcuda, for what today's does not do: its cuGetProcAddress returns
 * functions that it does not export. */
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

static int newer(void) {
    return 4242;
}

EXPORT int cuInit(unsigned int flags) {
    (void)flags;
    return 0;
}

EXPORT int cuMemAlloc_v2(void) {
    return 0;
}

EXPORT int cuLaunchHostFunc(void) {
    return 0;
}

EXPORT int cuDriverGetVersion(int *version) {
    *version = 99000;
    return 0;
}

/* Like 535: not found is CUDA_SUCCESS, NULL and status 1. From version 99000 on it returns
 * functions that are not exported. */
EXPORT int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long flags,
                               int *status) {
    (void)flags;
    *function = NULL;
    if (strcmp(name, "cuMemAlloc") == 0)
        *function = version < 99000 ? (void *)cuMemAlloc_v2 : (void *)newer;
    if (strcmp(name, "cuDriverGetVersion") == 0)
        *function = version < 99000 ? (void *)cuDriverGetVersion : (void *)newer;
    if (strcmp(name, "cuLaunchHostFunc") == 0)
        *function = version < 99000 ? (void *)cuLaunchHostFunc : (void *)newer;
    if (version >= 99000 && strncmp(name, "cuNewer", 7) == 0)
        *function = (void *)newer;
    if (status)
        *status = *function ? 0 : 1;
    return 0;
}

/* Like 535: not found is CUDA_ERROR_NOT_FOUND and the pointer is unchanged. */
EXPORT int cuGetProcAddress(const char *name, void **function, int version, unsigned long flags) {
    void *found;
    cuGetProcAddress_v2(name, &found, version, flags, NULL);
    if (!found)
        return 500;
    *function = found;
    return 0;
}
