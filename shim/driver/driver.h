/* Creating and destroying contexts, and MPS. */
#ifndef GPUSHARE_DRIVER_H
#define GPUSHARE_DRIVER_H

#include "launch/launch.h"
#include "memory/memory.h"

/* ---- context.c ------------------------------------------------------------------------------ */

/* Call before and after a context is created: the first reserves its overhead, the second records
 * it with the context. */
CUresult gs_context_begin(struct gs_charge *charge, CUdevice device);
CUresult gs_context_made(struct gs_charge *charge, CUresult result, const CUcontext *context,
                         CUdevice device);
/* Return true, after a pause, if `result` of the driver is worth another call. */
bool gs_context_again(const struct gs_charge *charge, CUresult result, struct gs_reclaim *reclaim);
#define GS_CONTEXT_CALL(result, charge, call) \
    do { \
        struct gs_reclaim reclaim_ = {0}; \
        do \
            (result) = (call); \
        while (gs_context_again(&(charge), (result), &reclaim_)); \
        gs_reclaim_end(&reclaim_); \
    } while (0)
/* Record that a context's charge changed; the caller reserved or released the difference. */
void gs_context_grow(CUcontext context, int64_t bytes);
/* Run `call`, which creates something that keeps the device's primary context alive. */
CUresult gs_primary_used(CUdevice device, CUresult (*call)(void *arg), void *arg);
void gs_primary_unused(CUdevice device);

/* ---- mps.c: a client of MPS ----------------------------------------------------------- */

/* Call before and after the driver's cuInit. The first sets the daemon that this process connects
 * to, and its limits; the second checks that this daemon was there all the time. Any result but
 * CUDA_SUCCESS: this container uses MPS and cannot connect to it. */
CUresult gs_mps_enter(const struct gs_limits *limits);
CUresult gs_mps_entered(const struct gs_limits *limits);

#endif
