/* A suspended container: the host moves the device memory of its processes to their host memory and
 * back, by the driver's checkpoint functions (docs/suspend.md). Meanwhile every call of a process
 * waits here, before the driver: so the host sees that the process needs its memory again. Some
 * drivers also crash if the first call after a checkpoint is a synchronisation. */
#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "gs.h"

_Atomic uint32_t gs_calling;

static bool is_suspended(const struct gs_limits *limits) {
    return limits->n_devices && gs_limit_stated(limits, 0).flags & GS_DEVICE_SUSPENDED;
}

void gs_does(uint32_t what) {
    const struct gs_view *view = gs_region();
    struct gs_slot *slot = gs_slot();
    if (view && slot)
        atomic_fetch_or(&view->usage->does[slot - view->usage->slot], (uint8_t)what);
}

void gs_suspension_begin(const struct gs_view *view, const struct gs_slot *slot) {
    atomic_store(&view->usage->does[slot - view->usage->slot], 0);
    gs_suspension_tick(view, slot);
}

void gs_suspension_tick(const struct gs_view *view, const struct gs_slot *slot) {
    _Atomic uint8_t *does = &view->usage->does[slot - view->usage->slot];
    bool now = is_suspended(view->limits);
    uint32_t before =
        atomic_exchange(&gs_calling, now ? (uint32_t)GS_SUSPENDED : (uint32_t)GS_QUIET);
    if (before == GS_CALLED || (before == GS_SUSPENDED && !now)) /* calls of waiters go ahead */
        atomic_store(&view->usage->called_ns, gs_now_ns());
    if (before == GS_SUSPENDED && !now) /* what it asked for has happened */
        atomic_store(&view->usage->asks, 0);
    if (now)
        atomic_fetch_or(does, (uint8_t)GS_DOES_WAIT);
    else
        atomic_fetch_and(does, (uint8_t)~GS_DOES_WAIT);
}

static void sleep_on(const uint64_t *generation, uint32_t seen) {
    const struct timespec nap = {.tv_nsec = 200000000};
    if (syscall(SYS_futex, (const uint32_t *)generation, FUTEX_WAIT, seen, &nap, NULL, 0) != 0 &&
        errno != EINTR && errno != EAGAIN && errno != ETIMEDOUT)
        nanosleep(&nap, NULL); /* a sandbox has no futex */
}

void gs_call_noted(void) {
    uint32_t quiet = GS_QUIET;
    if (atomic_compare_exchange_strong(&gs_calling, &quiet, GS_CALLED))
        return;
    const struct gs_view *view = gs_region();
    struct gs_slot *slot = gs_slot();
    int saved = errno;
    while (view && slot && is_suspended(view->limits)) {
        uint32_t seen = (uint32_t)__atomic_load_n(&view->limits->generation, __ATOMIC_ACQUIRE);
        __atomic_store_n(&slot->wants, 1, __ATOMIC_SEQ_CST); /* again: other threads clear it */
        if (is_suspended(view->limits))
            sleep_on(&view->limits->generation, seen);
    }
    if (slot)
        __atomic_store_n(&slot->wants, 0, __ATOMIC_SEQ_CST);
    errno = saved;
}
