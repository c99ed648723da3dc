/* The current context and its device, which every wrapper reads first. */
#ifndef GPUSHARE_CONTEXT_H
#define GPUSHARE_CONTEXT_H

#ifndef __CUDA_API_VERSION_INTERNAL
#define __CUDA_API_VERSION_INTERNAL
#endif
#include <cuda.h>

#include "gs.h"
#include "real.h"

#define GS_MAX_ORDINALS 64

/* `real` = the driver's own function; without one the wrapper ends here. */
#define GS_FIND(real, fn) \
    __typeof__(&fn) real = GS_REAL(fn); \
    if (!real) \
    return CUDA_ERROR_NOT_SUPPORTED
/* The same, where a suspended container waits. */
#define GS_NEED(real, fn) \
    GS_FIND(real, fn); \
    gs_calls()

struct gs_here {
    CUcontext context;
    CUdevice device;
    int dev;
};
/* The calling thread's current context; false when there is none. */
bool gs_here(struct gs_here *here);
/* Return a device's slot in the limits file, GS_NO_DEV if it was not granted. */
int gs_dev_of(CUdevice device);
/* False for a number that the driver does not know: it refuses the call with its own error. */
bool gs_device_exists(int ordinal);
/* Filled in by cuInit. */
void gs_devices_learn(void);
/* The device that a stream works on. */
bool gs_here_of_stream(CUstream stream, struct gs_here *here);

/* The stream that a function of per-thread streams means by this argument. */
static inline CUstream gs_per_thread(CUstream stream) {
    return stream ? stream : CU_STREAM_PER_THREAD;
}

/* Addresses of device memory that this process has. */
extern struct gs_map gs_memory;

/* ---- the table of contexts, for functions that create and destroy them ----------------------- */

/* context -> entry: bytes = its charge, extra = device | attached uses << 32 */
extern struct gs_map gs_contexts;
static inline uint64_t gs_context_key(CUcontext context) {
    return (uint64_t)(uintptr_t)context;
}
/* The memory that a context takes on a device, by the limits file. */
uint64_t gs_context_overhead(int dev);
/* Record a context that was created, and its charge; false if it is recorded already. `own`: it has
 * memory of its own, unlike one made from a green context. A new context
 * may have the handle of a destroyed one, which other threads still remember. Without memory for a
 * record the charge stays. */
bool gs_context_learn(CUcontext context, CUdevice device, bool own, uint64_t bytes);
/* A context was destroyed: threads must look up their current context again. */
void gs_context_forget(void);

#endif
