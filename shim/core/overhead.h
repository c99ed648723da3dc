/* Memory that the driver takes for this process beyond its allocations: contexts, code, streams,
 * executable graphs, library handles. The driver's own count is the truth, and the charge follows
 * it (overhead.c). */
#ifndef GPUSHARE_OVERHEAD_H
#define GPUSHARE_OVERHEAD_H

#include "gs.h"

/* ---- driver_count.c --------------------------------------------------------------------- */

/* Open NVML. Called by cuInit without a lock: the dynamic linker may wait for a thread that is in
 * another library's constructor, and that one for a lock of the shim. */
void gs_driver_count_open(void);
enum gs_counted {
    GS_NOT_COUNTED, /* NVML does not answer */
    GS_NOT_LISTED,  /* it answers, and does not list this process */
    GS_LISTED,
};
/* The memory that NVML counts for this process on a device. */
enum gs_counted gs_driver_count(int dev, uint64_t *bytes);

/* ---- overhead.c ------------------------------------------------------------------------- */

/* Charge what cuInit takes of a device that the driver lists; this process has its slot. */
void gs_overhead_begin(int dev);
/* Whether the driver's count is known on a device, so that the charge follows it. */
bool gs_overhead_is_counted(int dev);
/* Before and after a context is created. `counted` is the count before. The second returns whether
 * the driver has a count: then `charge`, which was reserved, follows it, and the caller releases
 * nothing later. */
uint64_t gs_overhead_before_context(int dev);
bool gs_overhead_of_context(int dev, uint64_t counted, uint64_t charge);
/* `bytes` are reserved for a call that has not ended, or no more. */
void gs_overhead_bound(int dev, int64_t bytes);
/* A context was recorded (1) or is gone (-1). */
void gs_overhead_contexts(int dev, int change);

/* A call may make the driver take memory. `bound` is reserved for it before the call. */
struct gs_growth {
    int dev;
    uint64_t bytes; /* what the call may take */
    uint64_t bound; /* of it that is reserved, in whole blocks */
};
/* After the call: charge what the driver counts, and release the bound. Without a count the bound
 * stays charged if the call succeeded. Return the bytes that the caller has to release later. */
uint64_t gs_growth_end(const struct gs_growth *growth, bool done);
/* The driver may have taken memory for which nothing was reserved. `model` bytes are charged until
 * its count is known, for good where it has none. Return the bytes that the caller has to release
 * later. */
uint64_t gs_overhead_grew(int dev, uint64_t model);
/* The driver may have freed some of it. */
void gs_overhead_shrank(int dev);
/* `bytes` more are on the device, charged, and listed by the driver for no process: managed memory.
 */
void gs_overhead_unlisted(int dev, int64_t bytes);
/* The same if it was created after comparison `number`: its model is no longer charged. */
uint64_t gs_overhead_number(int dev);
void gs_overhead_undone(int dev, uint64_t number, uint64_t model);
/* `bytes` that are released now stay on the device until later work is done. */
void gs_overhead_keeps(int dev, uint64_t bytes);
/* Compare before a reservation is refused. */
void gs_overhead_refusing(int dev);

/* Each second, by the parked thread. Return true if the program has made no call for some time that
 * could compare: then its next launch does. */
bool gs_overhead_tick(void);
extern _Atomic bool gs_overhead_is_late;
/* Called before calls that block: compare once a second, while the device works. */
void gs_overhead_second(void);
#define GS_OVERHEAD_SECOND UINT32_C(0xffff0000) /* bits of gs_overhead_dirty */
static inline void gs_overhead_if_second(void) {
    if (__builtin_expect(
            atomic_load_explicit(&gs_overhead_dirty, memory_order_relaxed) & GS_OVERHEAD_SECOND, 0))
        gs_overhead_second();
}
static inline void gs_overhead_if_late(void) {
    if (__builtin_expect(atomic_load_explicit(&gs_overhead_is_late, memory_order_relaxed), 0))
        gs_overhead_second();
}

#endif
