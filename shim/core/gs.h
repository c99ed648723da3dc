/* The shim's internal header. Three layers, each uses only the ones above it:
 *
 *   region   the two shared files, validated and mapped           region.c
 *   slot     this process's slot in the usage file                slot.c
 *   quota    reserve, release and read, per device                quota.c
 *   account  byte-seconds and peak, per device                    account.c
 *   overhead what the driver takes beyond allocations             overhead.c, driver_count.c
 *   exports  memory that several processes hold                   exports.c
 *   map      key -> entry, lock-free                              map.c
 *   blocks   how many allocations touch a 2 MiB block             blocks.c
 *   charge   an allocation's charge, from call to free            charge.c
 *   cuda_*   one thin wrapper per intercepted function
 *
 * region, slot and quota do not use CUDA: libnvidia-ml.so is built from them too.
 * "dev" is a device's slot in the limits file, 0..15, or GS_NO_DEV (limit 0).
 */
#ifndef GPUSHARE_GS_H
#define GPUSHARE_GS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "include/gpushare_abi.h"

#ifndef GS_EXPORT
#define GS_EXPORT __attribute__((visibility("default")))

/* The compiler must not use the body of this function in its callers. clang, which builds releases,
 * has no such attribute. */
#if __has_attribute(noipa)
#define GS_APART __attribute__((noinline, noipa))
#else
#define GS_APART __attribute__((noinline))
#endif
#endif
#define GS_NO_DEV (-1)
#define GS_BLOCK_SHIFT 21u
#define GS_BLOCK (UINT64_C(1) << GS_BLOCK_SHIFT) /* the driver's physical block */
#define GS_NO_BYTES (UINT64_C(1) << 62)          /* sizes from here on are never granted */

/* ---- region.c ------------------------------------------------------------------------- */

struct gs_view {
    const struct gs_limits *limits;
    struct gs_usage *usage;
};

/* Return both files, mapped once for the life of the process; NULL if they are refused. */
const struct gs_view *gs_region(void);
/* Return why the last gs_region() returned NULL; a static string. */
const char *gs_region_refusal(void);
/* `started_ns` of this process's slot; 0 if the usage file cannot be mapped. */
uint64_t gs_started(void);
/* Whether a forked child of the process that started then lives, or that process itself; also true
 * if that cannot be determined. */
bool gs_has_children(uint64_t started_ns);
/* The slot of the device with this raw uuid, or GS_NO_DEV. */
int gs_slot_of_uuid(const uint8_t uuid[16]);
/* Map one file of exactly `size` bytes, or NULL with `*why`; the descriptor is closed. */
void *gs_map_exact(const char *path, int flags, int prot, size_t size, const char **why);
/* Print "gpushare: TEXT: DETAIL; HINT" on standard error, if GPUSHARE_LOG was 1 when the log was
 * opened. docs/troubleshooting.md has the literals of each call (tools/error_texts.py). */
void gs_log_open(void);
void gs_log(const char *text, const char *detail, const char *hint);
/* The same without GPUSHARE_LOG=1. */
void gs_tell(const char *text, const char *detail, const char *hint);

/* ---- slot.c --------------------------------------------------------------------------- */

/* State of this process that its forked children must not have: the kernel wipes the page in a
 * child (MADV_WIPEONFORK), locks included, so a child neither has a slot nor can hang on a lock
 * that another thread of its parent held. */
struct gs_self {
    _Atomic(struct gs_slot *) slot;
    uint64_t started_ns; /* of the slot; 0: no mapping of this process's own holds the lock */
    uint32_t index;
    _Atomic uint32_t lock_init;
    _Atomic uint32_t lock_context;
    _Atomic uint32_t lock_limit;
    _Atomic uint32_t lock_vmm;
    _Atomic uint32_t lock_pool;
    _Atomic uint32_t lock_virtual;
    _Atomic uint32_t lock_border;
    _Atomic uint32_t lock_exports;
    _Atomic uint32_t lock_overhead;
    _Atomic uint32_t lock_count;
    _Atomic uint32_t lock_compute[64]; /* one for each context: GS_MAX_COMPUTES */
};

/* Return that state, created at the first call; NULL if the kernel has no memory. */
struct gs_self *gs_self(void);
/* Claim a slot for this process; false if all are taken or no thread can be started. Its parked
 * thread calls `changed` whenever limits have changed. */
bool gs_slot_claim(const struct gs_view *view, void (*changed)(void));
/* Small futex locks for slow paths; a plain allocation takes none. */
void gs_lock(_Atomic uint32_t *word);
void gs_unlock(_Atomic uint32_t *word);
/* Call around work for which other threads wait, as with a lock held: a thread that is cancelled
 * in it (open, pread and the driver are cancellation points) would leave them waiting. */
void gs_no_cancel(void);
void gs_cancel_again(void);

extern _Atomic(struct gs_self *) gs_self_page;

/* This process's slot; NULL before cuInit and in a forked child. */
static inline struct gs_slot *gs_slot(void) {
    struct gs_self *self = atomic_load_explicit(&gs_self_page, memory_order_acquire);
    return self ? atomic_load_explicit(&self->slot, memory_order_acquire) : NULL;
}

/* ---- quota.c -------------------------------------------------------------------------- */

/* Bytes charged by all live processes of the container. */
uint64_t gs_used(int dev);
/* The memory limit: 0 for GS_NO_DEV, GS_UNLIMITED when there is none. */
uint64_t gs_limit(int dev);
/* The index that counts the host part of a share. All functions here take it as a "dev"; its limit
 * is 0 if the share has no host part. */
static inline int gs_host_part(int dev) {
    return dev < 0 ? dev : (int)GS_HOST_PART((unsigned)dev);
}
/* Both parts together, as programs see them. `left`: until the limit in force; `request`: what is
 * guaranteed on the device. */
struct gs_whole {
    uint64_t limit, used, left, request;
    bool oversubscribed;
};
struct gs_whole gs_whole(int dev);
/* The limits that may change while a container runs, read consistently. */
struct gs_limit_now {
    uint64_t generation, memory_bytes, virtual_bytes;
    uint32_t percent, priority, weight, flags;
};
struct gs_limit_now gs_limit_now(const struct gs_limits *limits, unsigned dev);
/* The same as in the limits file, also where MPS enforces the percentage. */
struct gs_limit_now gs_limit_stated(const struct gs_limits *limits, unsigned dev);
/* Limits of this container have changed since it began. */
bool gs_limits_changed(void);
/* Charge this process; false when the container would be over its limit. */
bool gs_reserve(int dev, uint64_t bytes);
/* The same for bytes that move from the other part of the share, where the caller releases them
 * afterwards. */
bool gs_reserve_moved(int dev, uint64_t bytes);
/* The same for an upper bound, most of which is released as soon as a call returns. */
bool gs_bound(int dev, uint64_t bytes);
void gs_bound_end(int dev, uint64_t bytes);
/* gs_reserve, but wait a moment for other threads to release their bounds. */
bool gs_reserve_patiently(int dev, uint64_t bytes);
/* Charge memory that is already allocated: cannot be refused. */
void gs_charge_anyway(int dev, uint64_t bytes);
void gs_release(int dev, uint64_t bytes);
/* True when the container holds more than its limit (after gs_charge_anyway). */
bool gs_over(int dev);
/* The same, but ignore an excess by reservations that other threads release at once. */
bool gs_over_lastingly(int dev);
void gs_count_refusal(int dev);
void gs_warn(uint32_t warning);
/* Call `each` for every live process that has charges on `dev`; returns how many there were. */
unsigned gs_processes(int dev, void (*each)(uint32_t pid, uint64_t bytes, void *arg), void *arg);

/* The C library's clock_gettime: now.c. */
extern int (*gs_clock)(clockid_t clock, struct timespec *now) __attribute__((visibility("hidden")));
/* The monotonic clock, in nanoseconds. */
static inline uint64_t gs_now_ns(void) {
    struct timespec now;
    gs_clock(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline uint64_t gs_round_up(uint64_t bytes, uint64_t unit) {
    return bytes >= GS_NO_BYTES ? GS_NO_BYTES : (bytes + unit - 1) / unit * unit;
}

/* Devices whose overhead may have changed since it was compared with the driver's count: low half,
 * by a call; high half: a second has passed. 0 for an ordinary allocation. */
extern _Atomic uint32_t gs_overhead_dirty;
#define GS_OVERHEAD_NEAR (UINT64_C(128) << 20) /* of room: a reservation waits for a comparison */
/* Compare if anything may have changed. */
void gs_overhead_settle(int dev);
/* After a refusal: log once if a program's start alone takes most of the limit. */
void gs_overhead_explain(int dev);

/* ---- suspend.c ------------------------------------------------------------------------ */

enum gs_calling {
    GS_QUIET,     /* no call since the last tick */
    GS_CALLED,    /* there was one */
    GS_SUSPENDED, /* calls wait */
};
extern _Atomic uint32_t gs_calling __attribute__((visibility("hidden")));
void gs_call_noted(void);
/* At the beginning of a call of the program, before it takes a lock. */
static inline void gs_calls(void) {
    if (__builtin_expect(
            atomic_load_explicit(&gs_calling, memory_order_relaxed) != (uint32_t)GS_CALLED, 0))
        gs_call_noted();
}
/* Called by the parked thread: when it has its slot, each second, and after each change. */
void gs_suspension_begin(const struct gs_view *view, const struct gs_slot *slot);
void gs_suspension_tick(const struct gs_view *view, const struct gs_slot *slot);
/* State what this process has done: enum gs_does. */
void gs_does(uint32_t what);

/* ---- lending.c ------------------------------------------------------------------------ */

/* Whether another container on the device may have borrowed memory; `until_evicted`: that only
 * comes back when the agent ends the container. */
bool gs_others_borrow(int dev, bool until_evicted);
/* The free memory that a program sees, where the driver says `free_real`. */
uint64_t gs_free_now(int dev, const struct gs_whole *whole, uint64_t free_real);
/* Call when the driver has no memory for `bytes` that are charged. That happens for a moment, since
 * the memory of a dead process is free in its share before it is free on the device. Wait, and
 * return whether to call the driver again. This ends after a tenth of a second; if others borrow,
 * after some seconds; and after some minutes while the memory of another container is being moved
 * to the host. Afterwards call gs_reclaim_end. */
struct gs_reclaim {
    uint64_t since_ns, began_ns, wants;
    bool lent; /* others borrowed when the wait began */
};
bool gs_reclaim(struct gs_reclaim *reclaim, int dev, uint64_t bytes);
void gs_reclaim_end(const struct gs_reclaim *reclaim);
/* Make `call`, with the memory that is taken back from other containers if need be. */
#define GS_WITH_RECLAIM(result, dev, bytes, call) \
    do { \
        (result) = (call); \
        if (__builtin_expect((result) == CUDA_ERROR_OUT_OF_MEMORY, 0)) { \
            struct gs_reclaim reclaim_ = {0}; \
            while ((result) == CUDA_ERROR_OUT_OF_MEMORY && gs_reclaim(&reclaim_, dev, bytes)) \
                (result) = (call); \
            gs_reclaim_end(&reclaim_); \
        } \
    } while (0)

/* ---- account.c ------------------------------------------------------------------------ */

/* Count the memory that the container holds up to now. Call before it changes. */
void gs_account(int dev);
/* Count a new maximum. Call after a charge. */
void gs_account_peak(int dev);
/* gs_account of every device of the container. */
void gs_account_all(void);

/* ---- exports.c ------------------------------------------------------------------------ */

/* The thread that holds the slot of this process: its owner word while it lives. */
extern uint32_t gs_parked_tid __attribute__((visibility("hidden")));
/* A slot whose process is alive. */
bool gs_alive(const struct gs_slot *slot);
/* A slot whose process has ended, and whose memory the driver keeps for forked children. */
bool gs_is_kept(const struct gs_usage *usage, const struct gs_slot *slot);
/* Count memory that this process exports (`bytes` on `dev`) or opens, and return its row. -1 when
 * there is none: an export must then stay charged while the process lives. */
int gs_export_add(uint64_t id, bool import, int dev, uint64_t bytes);
/* `bytes` of an export were freed here. The container is charged for them from now on while another
 * process has the id open; the caller releases its own charge afterwards. */
void gs_export_freed(int row, uint64_t bytes);
/* The memory was closed here, or was not opened after all. */
void gs_export_closed(int row);
/* Bytes charged to no process: their exporter has freed them or exited, and a living process has
 * them open. */
uint64_t gs_export_orphans(const struct gs_usage *usage, int dev);
/* Bytes on `dev` that this process has open and other processes of the container exported;
 * `orphans`: only what their exporters have freed or left. */
uint64_t gs_export_imported(int dev, bool orphans);
/* An id that no other export of the container has. */
uint64_t gs_export_new_id(void);
/* An id of these bytes, never 0 nor GS_SHARE_ANY. */
uint64_t gs_export_id(const void *name, size_t size);

/* ---- map.c ---------------------------------------------------------------------------- */

enum gs_kind {
    GS_KIND_LINEAR = 1, /* an address range: charged by the blocks that it touches; `extra`: it is
                         * managed memory */
    GS_KIND_WHOLE,      /* charged `bytes` */
    GS_KIND_POOLED,     /* memory of pool number `extra`; the pool is charged, not this */
    GS_KIND_FOREIGN,    /* another process's memory, opened here */
    GS_KIND_CODE,       /* of module or library `extra`: charged `bytes`, 0 if the driver counts */
    GS_KIND_MODULE,     /* `bytes` of variables, `extra` of code: struct gs_image */
    GS_KIND_VIRTUAL,    /* managed: of `bytes`, `extra` count on the device
                         * (oversubscription/residency.c)
                         */
};

struct gs_entry {
    uint64_t bytes;
    uint64_t context; /* CUcontext, 0 when not bound to one */
    uint64_t extra;
    int32_t dev;
    uint32_t kind;
};

struct gs_map_segment;
struct gs_map {
    _Atomic(struct gs_map_segment *) segment[12];
};

/* Keys are never 0 nor >= UINT64_MAX - 1. put: false without memory. take: exactly one taker wins.
 */
bool gs_map_put(struct gs_map *map, uint64_t key, const struct gs_entry *entry);
bool gs_map_take(struct gs_map *map, uint64_t key, struct gs_entry *out);
bool gs_map_get(const struct gs_map *map, uint64_t key, struct gs_entry *out);
/* Replace `extra` if it is `before`. A thread that takes the key out at the same time gets the new
 * value, or this returns false. */
bool gs_map_swap(struct gs_map *map, uint64_t key, uint64_t before, uint64_t after);
/* Take every entry for which `want` is true, one by one; `taken` is called for each. */
void gs_map_take_all(struct gs_map *map,
                     bool (*want)(uint64_t key, const struct gs_entry *e, void *arg),
                     void (*taken)(uint64_t key, const struct gs_entry *e, void *arg), void *arg);

/* ---- blocks.c ------------------------------------------------------------------------- */

/* Count [address, address + bytes); return the bytes of blocks that no allocation touched before.
 */
uint64_t gs_blocks_take(uint64_t address, uint64_t bytes);
/* Remove it from the counts; return the bytes of blocks that no allocation touches any more. */
uint64_t gs_blocks_give(uint64_t address, uint64_t bytes);

#endif
