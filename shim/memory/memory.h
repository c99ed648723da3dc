/* What the wrappers that allocate share. A wrapper decides nothing: it says how many bytes a call
 * may take, makes the call, and says what it took. */
#ifndef GPUSHARE_MEMORY_H
#define GPUSHARE_MEMORY_H

#include "core/context.h"
#include "oversubscription/oversubscription.h"

/* ---- charge.c: from the call to the free --------------------------------------------- */

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

extern struct gs_map gs_objects; /* arrays, mipmapped arrays, modules */
extern struct gs_map gs_loaded;  /* code and local memory of contexts: code/code.c */

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

/* ---- foreign.c: memory that others may have open (share.c) ----------------------------- */

/* False: nobody can tell when it is closed, so it stays charged. */
bool gs_share_address_freed(uint64_t address);
/* 0 when it is no file. */
uint64_t gs_share_id_of_file(int fd);

/* ---- pool.c --------------------------------------------------------------------------- */

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
