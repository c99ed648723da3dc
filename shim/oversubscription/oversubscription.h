/* Memory beyond the device: what part of a share is on the host, and when it moves. */
#ifndef GPUSHARE_OVERSUBSCRIPTION_H
#define GPUSHARE_OVERSUBSCRIPTION_H

#include "core/context.h"
#include "core/overhead.h"

/* ---- virtual.c: the host part of a share ----------------------------------------------- */

/* Allocate managed memory for what the device has no room for, in the current context; `flags` as
 * in cuMemAllocManaged. CUDA_ERROR_OUT_OF_MEMORY, which is counted: the allocation exceeds both
 * parts together, or the share has no host part. */
CUresult gs_virtual_alloc(CUdeviceptr *out, uint64_t bytes, unsigned int flags);
bool gs_virtual_has(int dev);
/* Return whether `address` is the start of such memory. */
bool gs_virtual_is(CUdeviceptr address);
/* Return whether `address` is within such memory. */
bool gs_virtual_holds(CUdeviceptr address);
struct gs_virtual {
    CUdeviceptr base;
    size_t size;
    struct gs_entry entry;
};
bool gs_virtual_of(CUdeviceptr address, struct gs_virtual *out);
/* Set where these bytes belong: on the device, or on the host, where `device` reads them. */
CUresult gs_virtual_advise(CUdeviceptr address, uint64_t bytes, bool to_device, CUdevice device);
/* Free the memory once the stream has reached this point. Return false if that cannot be deferred.
 */
bool gs_virtual_free_later(CUdeviceptr address, CUstream stream);
/* Free the deferred memory whose streams have reached the point of the free. */
void gs_virtual_drain(void);
extern _Atomic uint32_t gs_virtual_later;
/* Call before a context is destroyed, and again if it was not: meanwhile no thread queries the
 * events of its deferred frees or frees their memory. */
void gs_virtual_context_goes(CUcontext context, bool goes);
void gs_virtual_freed(uint64_t address, const struct gs_entry *entry);
/* Return whether this process has memory in the host part of a device. */
bool gs_virtual_lives(void);
/* Move the memory of the host part to the device, as far as `room_for` grants room to each
 * allocation, or back. */
typedef uint64_t (*gs_room_fn)(int dev, uint64_t bytes);
void gs_virtual_move(const struct gs_here *here, CUstream stream, gs_room_fn room_for);

/* ---- residency.c: how much of such memory is on the device ------------------------------- */

/* Serve a prefetch by the program of memory that gs_virtual_of found, with `real` in its stream. */
typedef CUresult (*gs_prefetch_fn)(CUdeviceptr, size_t, CUdevice, CUstream);
CUresult gs_residency_prefetch(const struct gs_virtual *memory, CUdeviceptr from, size_t bytes,
                               CUdevice to, CUstream stream, gs_prefetch_fn real);
/* Cancel the deferred move of this memory back to the host. */
void gs_residency_stays(CUdeviceptr base);
/* The program has synchronised with the context: move the residency boundary of deferred rows up to
 * number `put_off` back to the host part. */
void gs_residency_synced(uint64_t put_off);
extern _Atomic uint64_t gs_residency_put_off; /* number of deferred moves so far */
extern _Atomic uint32_t gs_residency_waiting; /* number of deferred moves that still wait */

/* ---- migration_slice.c: which container has its host memory on the device ---------------- */

/* Return whether launches on this device need a migration slice. */
bool gs_slices_needed(int dev);
/* Call before a launch: wait for the migration slice, for a bounded time. */
void gs_slice_admit(const struct gs_here *here, CUstream stream);
/* Call around calls that wait for the device: a container that waits is not idle. */
extern _Atomic uint32_t gs_slice_held;
void gs_slice_waits(bool begins);

#endif
