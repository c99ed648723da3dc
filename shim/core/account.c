/* Byte-seconds and peak of the container on each device. A large change of a charge (quota.c) and a
 * new process first count what the container held until then: the exchange of `until_ns`
 * gives each interval to one process, which is the only one to add it. A process that is killed in
 * between loses its interval. The parked thread counts once a second, so no interval is longer, and
 * the memory of a killed process is counted to within a second of its end. */
#include <time.h>

#include "gs.h"

#define LOAD(member) atomic_load_explicit(member, memory_order_relaxed)

static struct gs_account *account_of(int dev) {
    const struct gs_view *view = gs_region();
    return view && dev >= 0 && (unsigned)dev < GS_MAX_DEVICES ? &view->usage->account[dev] : NULL;
}

/* The time of the last tick: a fifth of the cost of an exact one. Errors of at most 4 ms for each
 * charge cancel out. */
static uint64_t ticks_ns(void) {
    struct timespec now;
    gs_clock(CLOCK_MONOTONIC_COARSE, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void gs_account(int dev) {
    struct gs_account *a = account_of(dev);
    uint64_t now = ticks_ns(), from = a ? LOAD(&a->until_ns) : now;
    if (from >= now)
        return;
    uint64_t bytes = gs_used(dev);
    while (!atomic_compare_exchange_weak(&a->until_ns, &from, now))
        if (from >= now)
            return;
    if (from && bytes && bytes < GS_NO_BYTES) {
        unsigned __int128 held = (unsigned __int128)bytes * (now - from) + (1u << 29);
        atomic_fetch_add(&a->held_gib_ns, (uint64_t)(held >> 30));
    }
}

void gs_account_peak(int dev) {
    struct gs_account *a = account_of(dev);
    if (!a)
        return;
    uint64_t bytes = gs_used(dev), seen = LOAD(&a->peak_bytes);
    while (bytes > seen && bytes < GS_NO_BYTES &&
           !atomic_compare_exchange_weak(&a->peak_bytes, &seen, bytes))
        ;
}

void gs_account_all(void) {
    const struct gs_view *view = gs_region();
    for (uint32_t dev = 0; view && dev < view->limits->n_devices; dev++)
        gs_account((int)dev);
}

/* Most programs exit without freeing their memory. The driver frees it now, so it is not kept for
 * forked children (gs_is_kept): no process locks byte 0. */
__attribute__((destructor)) static void at_exit(void) {
    struct gs_slot *slot = gs_slot();
    if (!slot)
        return;
    gs_account_all();
    __atomic_store_n(&slot->started_ns, 0, __ATOMIC_SEQ_CST);
}
