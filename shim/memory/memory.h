/* Common functions of the wrappers that allocate. A wrapper decides nothing: it reports an upper
 * bound of what a call allocates, makes the call, and reports what it allocated. */
#ifndef GPUSHARE_MEMORY_H
#define GPUSHARE_MEMORY_H

#include "core/busy.h"
#include "core/context.h"
#include "core/overhead.h"
#include "oversubscription/oversubscription.h"

/* ---- charge.c: from the call to the free --------------------------------------------- */

struct gs_charge {
    CUcontext context;
    int dev;
    /* Nothing known to charge: the driver refuses the call itself, or the call is undone. */
    bool passed;
    uint64_t bytes;   /* reserved */
    uint64_t counted; /* of a context: the driver's count before (core/overhead.h) */
    bool managed;     /* the driver counts it for no process */
};

/* Reserve for an allocation in the current context. After CUDA_SUCCESS, call the driver. */
CUresult gs_charge_begin(struct gs_charge *charge, uint64_t bytes);
/* The same for a caller that then tries gs_virtual_alloc: no refusal is counted. */
CUresult gs_charge_try(struct gs_charge *charge, uint64_t bytes);
/* The same on a given device, bound to no context. */
CUresult gs_charge_begin_on(struct gs_charge *charge, CUdevice device, uint64_t bytes);
/* The same for a caller that then tries another place: no refusal is counted. */
CUresult gs_charge_try_on(struct gs_charge *charge, CUdevice device, uint64_t bytes);
void gs_charge_abort(struct gs_charge *charge);
/* Reserve a bound for what the driver may take in a call that is no allocation. After CUDA_SUCCESS,
 * make the call and gs_growth_end. */
CUresult gs_growth_begin(struct gs_growth *growth, CUdevice device, uint64_t bound);
/* The driver allocated [address, +bytes). Returns CUDA_ERROR_OUT_OF_MEMORY if that exceeds the
 * limit; then free it. */
CUresult gs_charge_linear(struct gs_charge *charge, uint64_t address, uint64_t bytes);
/* The driver created an object of `bytes`. If this returns CUDA_ERROR_OUT_OF_MEMORY, destroy it. */
CUresult gs_charge_object(struct gs_charge *charge, struct gs_map *map, uint64_t handle,
                          uint64_t bytes);
/* Release the charge of an entry that was taken out of its map. */
void gs_uncharge(uint64_t key, const struct gs_entry *entry);

extern struct gs_map gs_objects; /* arrays, mipmapped arrays, modules */
extern struct gs_map gs_loaded;  /* code and local memory of contexts: code/use.c, local.c */
/* launch/stream.c: streams; extra = the number of the comparison before they were created */
extern struct gs_map gs_streams;
/* launch/graph.c: executable graphs; extra = 1 once they have run */
extern struct gs_map gs_graphs;

/* Entries of a context that is about to be destroyed: taken out of the maps, then released, or put
 * back if the context remains. */
struct gs_dropped;
struct gs_dropped *gs_drop_begin(CUcontext context);
void gs_drop_end(struct gs_dropped *dropped, bool gone);

/* Take the entry out, call, then release its charge or put it back. The driver may give the address
 * to another thread before its free returns, so the entry must be out by then. `call` may read
 * `known_`. */
#define GS_FREE(map, key, call) \
    ({ \
        GS_CHANGES; \
        struct gs_entry entry_; \
        bool known_ = gs_map_take(&(map), (uint64_t)(key), &entry_); \
        CUresult result_ = (call); \
        if (known_ && result_ == CUDA_SUCCESS) \
            gs_uncharge((uint64_t)(key), &entry_); \
        else if (known_) \
            gs_map_put(&(map), (uint64_t)(key), &entry_); \
        result_; \
    })

/* ---- foreign.c: memory that other processes may have open (core/exports.c) ---------------- */

/* Return false if it cannot be tracked when the memory is closed; it then stays charged. */
bool gs_export_address_freed(uint64_t address);
/* Mark an exported descriptor with an id (gs_export_new_id). Return the id by which an importer
 * knows it: another one if the file cannot be marked. */
uint64_t gs_export_mark(int fd, uint64_t id);
/* The id of an imported descriptor, GS_SHARE_ANY if it is none. */
uint64_t gs_export_id_of_file(int fd);

/* ---- pool.c --------------------------------------------------------------------------- */

/* Ask the driver what this process's pools reserve on a device, and charge that. */
void gs_pools_settle(int dev);
/* The same after trimming the pools: unused reserved memory is returned to the driver. */
void gs_pools_trim(int dev);
/* Memory was freed to a pool since all pools were last settled. */
extern _Atomic uint32_t gs_pools_freed;
/* The same for plain memory, by device. */
extern _Atomic uint32_t gs_freed_later;
void gs_pools_synced(void);
/* An allocation from a pool was freed: settle the pool. */
void gs_pooled_freed(const struct gs_entry *entry);

#endif
