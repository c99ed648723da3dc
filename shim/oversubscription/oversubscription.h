/* Memory beyond the device: what of a share lies on the host, and when it moves. */
#ifndef GPUSHARE_OVERSUBSCRIPTION_H
#define GPUSHARE_OVERSUBSCRIPTION_H

#include "core/context.h"

/* ---- virtual.c: the part of a share that lies on the host ------------------------------ */

/* Managed memory for what the device has no room for, in the current context; `flags` as
 * cuMemAllocManaged has them. CUDA_ERROR_OUT_OF_MEMORY, counted: beyond both parts together, or the
 * share has none on the host. */
CUresult gs_virtual_alloc(CUdeviceptr *out, uint64_t bytes, unsigned int flags);
bool gs_virtual_has(int dev);
/* `address` is such memory. */
bool gs_virtual_is(CUdeviceptr address);
/* The same of one that may lie within it. */
bool gs_virtual_holds(CUdeviceptr address);
struct gs_virtual {
    CUdeviceptr base;
    size_t size;
    struct gs_entry entry;
};
bool gs_virtual_of(CUdeviceptr address, struct gs_virtual *out);
/* Where these bytes belong: on the device, or on the host, where `device` reads them. */
CUresult gs_virtual_advise(CUdeviceptr address, uint64_t bytes, bool to_device, CUdevice device);
/* Free it when the stream has come so far. False: it could not be put off. */
bool gs_virtual_free_later(CUdeviceptr address, CUstream stream);
/* Free what was put off, as far as the streams have come. */
void gs_virtual_drain(void);
extern _Atomic uint32_t gs_virtual_later;
/* Before a context is destroyed, and after it was not: of what was put off, nobody asks its events
 * or frees its memory meanwhile. */
void gs_virtual_context_goes(CUcontext context, bool goes);
void gs_virtual_freed(uint64_t address, const struct gs_entry *entry);
/* This process has some on the host of a device. */
bool gs_virtual_lives(void);
/* Move what lies on the host to the device, as far as there is room for each allocation, or back.
 */
typedef uint64_t (*gs_room_fn)(int dev, uint64_t bytes);
void gs_virtual_move(const struct gs_here *here, CUstream stream, gs_room_fn room_for);

/* ---- residency.c: how much of such memory is on the device ------------------------------- */

/* A prefetch of the program, of memory that gs_virtual_of found, by `real` in its stream. */
typedef CUresult (*gs_prefetch_fn)(CUdeviceptr, size_t, CUdevice, CUstream);
CUresult gs_residency_prefetch(const struct gs_virtual *memory, CUdeviceptr from, size_t bytes,
                               CUdevice to, CUstream stream, gs_prefetch_fn real);
/* Nothing of it is given back that was to be. */
void gs_residency_stays(CUdeviceptr base);
/* The context was waited for: what was put off until then, by the count of before, is given back.
 */
void gs_residency_synced(uint64_t put_off);
extern _Atomic uint64_t gs_residency_put_off; /* how often anything was, so far */
extern _Atomic uint32_t gs_residency_waiting; /* of that how much still waits */

/* ---- turn.c: whose memory on the host is on the device just now ------------------------ */

/* Launches on this device are to ask. */
bool gs_turns(int dev);
/* Before a launch: waits for the turn, but not for ever. */
void gs_slice_admit(const struct gs_here *here, CUstream stream);
/* Around calls that wait for the device: who waits is not idle. */
extern _Atomic uint32_t gs_slice_held;
void gs_slice_waits(bool begins);

#endif
