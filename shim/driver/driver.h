/* Contexts that are made and go, and MPS. */
#ifndef GPUSHARE_DRIVER_H
#define GPUSHARE_DRIVER_H

#include "launch/launch.h"
#include "memory/memory.h"

/* ---- context.c ------------------------------------------------------------------------------ */

/* Around the making of a context: its overhead is reserved, then kept with it. */
CUresult gs_context_begin(struct gs_charge *charge, CUdevice device);
CUresult gs_context_made(struct gs_charge *charge, CUresult result, const CUcontext *context,
                         CUdevice device);
/* A process that died gives its memory back a moment after its share is free again: a context that
 * fits the limit and not the device waits for that. True after a pause, when `result` of the
 * driver is worth another call; `round` counts from 0. */
bool gs_context_again(const struct gs_charge *charge, CUresult result, unsigned *round);
#define GS_CONTEXT_CALL(result, charge, call) \
    do { \
        unsigned round_ = 0; \
        do \
            (result) = (call); \
        while (gs_context_again(&(charge), (result), &round_)); \
    } while (0)
/* A context's charge changed (it was reserved or released by the caller). */
void gs_context_grow(CUcontext context, int64_t bytes);
/* Around `call`, which makes something that keeps the device's primary context alive. */
CUresult gs_primary_used(CUdevice device, CUresult (*call)(void *arg), void *arg);
void gs_primary_unused(CUdevice device);

/* ---- mps.c: a client of MPS ----------------------------------------------------------- */

/* Around the driver's cuInit: which daemon this process connects to, and with which limits; and
 * that it was there all the time. Anything but CUDA_SUCCESS: this container has MPS and cannot
 * reach it. */
CUresult gs_mps_enter(const struct gs_limits *limits);
CUresult gs_mps_entered(const struct gs_limits *limits);

#endif
