/* cuGetProcAddress: returns what a real 535 driver returned, from exports/procaddress-535.txt. */
#include "sim.h"

#include <dlfcn.h>
#include <string.h>

#include "procaddress.h"

extern const struct sim_proc sim_procs[];
extern const unsigned sim_n_procs;

#define KNOWN_FLAGS \
    (CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM)

/* Finds the newest version that is not newer than the requested one. The table for per-thread
 * streams is complete by itself: a function without such a variant is in it under its plain
 * name. */
static void *look_up(const char *name, unsigned version, bool per_thread, bool *known) {
    void *found = NULL;
    *known = false;
    for (unsigned i = 0; i < sim_n_procs; i++) {
        const struct sim_proc *p = &sim_procs[i];
        if (strcmp(p->name, name) != 0)
            continue;
        *known = true;
        if (p->per_thread == per_thread && version >= p->version)
            found = p->function;
    }
    return found;
}

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion,
                                    cuuint64_t flags, CUdriverProcAddressQueryResult *status) {
    bool known;
    CHECK_VALUE(symbol && pfn && !(flags & ~(cuuint64_t)KNOWN_FLAGS));
    *pfn = look_up(symbol, (unsigned)cudaVersion,
                   flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, &known);
    if (status)
        *status = *pfn    ? CU_GET_PROC_ADDRESS_SUCCESS
                  : known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                          : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion,
                                 cuuint64_t flags) {
    void *found;
    CHECK_VALUE(pfn);
    CUresult result = cuGetProcAddress_v2(symbol, &found, cudaVersion, flags, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    CHECK(found, CUDA_ERROR_NOT_FOUND);
    *pfn = found;
    return CUDA_SUCCESS;
}
