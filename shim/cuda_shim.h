/* What the wrappers (cuda_*.c) share. A wrapper decides nothing: it says how many bytes a call may
 * take, makes the call, and says what it took; charge.c, context.c and pool.c do the rest. */
#ifndef GPUSHARE_CUDA_SHIM_H
#define GPUSHARE_CUDA_SHIM_H

#ifndef __CUDA_API_VERSION_INTERNAL
#define __CUDA_API_VERSION_INTERNAL
#endif
#include <cuda.h>

#include "gs.h"
#include "real.h"

#define GS_MAX_ORDINALS 64

/* `real` = the driver's own function; without one the wrapper ends here. */
#define GS_NEED(real, fn) \
    __typeof__(&fn) real = GS_REAL(fn); \
    if (!real) \
    return CUDA_ERROR_NOT_SUPPORTED

/* ---- cuda_context.c: which device, which context ------------------------------------------ */

struct gs_here {
    CUcontext context;
    CUdevice device;
    int dev;
};
/* The calling thread's current context; false when there is none. */
bool gs_here(struct gs_here *here);
/* A device's slot in the limits file, GS_NO_DEV when it was not granted. */
int gs_dev_of(CUdevice device);
/* Filled in by cuInit. */
void gs_devices_learn(void);
/* The device that a stream works on. */
bool gs_here_of_stream(CUstream stream, struct gs_here *here);

struct gs_charge;
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

/* ---- cuda_mps.c: a client of MPS ----------------------------------------------------------- */

/* Around the driver's cuInit: which daemon this process connects to, and with which limits; and
 * that it was there all the time. Anything but CUDA_SUCCESS: this container has MPS and cannot
 * reach it. */
CUresult gs_mps_enter(const struct gs_limits *limits);
CUresult gs_mps_entered(const struct gs_limits *limits);

/* ---- cuda_charge.c: from the call to the free --------------------------------------------- */

struct gs_charge {
    CUcontext context;
    int dev;
    bool passed;    /* nothing known to charge: the driver refuses this itself, or it is undone */
    uint64_t bytes; /* reserved */
};

/* Reserve for an allocation in the current context. CUDA_SUCCESS: go on and call the driver. */
CUresult gs_charge_begin(struct gs_charge *charge, uint64_t bytes);
/* The same for a caller that goes on to gs_virtual_alloc: no refusal is counted. */
CUresult gs_charge_try(struct gs_charge *charge, uint64_t bytes);
/* The same on a named device, bound to no context. */
CUresult gs_charge_begin_on(struct gs_charge *charge, CUdevice device, uint64_t bytes);
/* The same for a caller that goes on elsewhere: no refusal is counted. */
CUresult gs_charge_try_on(struct gs_charge *charge, CUdevice device, uint64_t bytes);
void gs_charge_abort(struct gs_charge *charge);
/* The driver gave [address, +bytes). CUDA_ERROR_OUT_OF_MEMORY: it took more than there is; free it.
 */
CUresult gs_charge_linear(struct gs_charge *charge, uint64_t address, uint64_t bytes);
/* The driver gave an object that takes `bytes`. CUDA_ERROR_OUT_OF_MEMORY: destroy it. */
CUresult gs_charge_object(struct gs_charge *charge, struct gs_map *map, uint64_t handle,
                          uint64_t bytes);
/* Give up the charge of an entry that was taken out of its map. */
void gs_uncharge(uint64_t key, const struct gs_entry *entry);

extern struct gs_map gs_memory;  /* addresses */
extern struct gs_map gs_objects; /* arrays, mipmapped arrays, modules */
extern struct gs_map gs_loaded;  /* libraries, once for each context in which they were used */

/* Entries of a context that is about to go: out of the maps, then gone or put back. */
struct gs_dropped;
struct gs_dropped *gs_drop_begin(CUcontext context);
void gs_drop_end(struct gs_dropped *dropped, bool gone);

/* Take out, call, uncharge or put back: the driver may give the address to another thread before
 * its free returns, so the entry must be out by then. `call` may look at `known_`. */
#define GS_FREE(map, key, call) \
    ({ \
        struct gs_entry entry_; \
        bool known_ = gs_map_take(&(map), (uint64_t)(key), &entry_); \
        CUresult result_ = (call); \
        if (known_ && result_ == CUDA_SUCCESS) \
            gs_uncharge((uint64_t)(key), &entry_); \
        else if (known_) \
            gs_map_put(&(map), (uint64_t)(key), &entry_); \
        result_; \
    })

/* ---- cuda_foreign.c: memory that others may have open (share.c) ----------------------------- */

/* False: nobody can tell when it is closed, so it stays charged. */
bool gs_share_address_freed(uint64_t address);
/* 0 when it is no file. */
uint64_t gs_share_id_of_file(int fd);

/* ---- cuda_virtual.c: the part of a share that lies on the host ------------------------------ */

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

/* ---- cuda_border.c: how much of such memory is on the device ------------------------------- */

/* A prefetch of the program, of memory that gs_virtual_of found, by `real` in its stream. */
typedef CUresult (*gs_prefetch_fn)(CUdeviceptr, size_t, CUdevice, CUstream);
CUresult gs_border_prefetch(const struct gs_virtual *memory, CUdeviceptr from, size_t bytes,
                            CUdevice to, CUstream stream, gs_prefetch_fn real);
/* Nothing of it is given back that was to be. */
void gs_border_stays(CUdeviceptr base);
/* The context was waited for: what was put off until then, by the count of before, is given back.
 */
void gs_border_synced(uint64_t put_off);
extern _Atomic uint64_t gs_border_put_off; /* how often anything was, so far */
extern _Atomic uint32_t gs_border_waiting; /* of that how much still waits */

/* ---- cuda_turn.c: whose memory on the host is on the device just now ------------------------ */

/* Launches on this device are to ask. */
bool gs_turns(int dev);
/* Before a launch: waits for the turn, but not for ever. */
void gs_turn_admit(const struct gs_here *here, CUstream stream);
/* Around calls that wait for the device: who waits is not idle. */
extern _Atomic uint32_t gs_turn_held;
void gs_turn_waits(bool begins);

/* ---- cuda_pool.c --------------------------------------------------------------------------- */

/* Ask the driver what this process's pools hold on a device, and charge that. */
void gs_pools_settle(int dev);
/* The same after trimming them: what is reserved but not used goes back. */
void gs_pools_trim(int dev);
/* Something was freed out of a pool since the last time that all pools were settled. */
extern _Atomic uint32_t gs_pools_freed;
void gs_pools_synced(void);
/* A pooled allocation is gone: settle its pool. */
void gs_pooled_freed(const struct gs_entry *entry);

#endif
