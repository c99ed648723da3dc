/* The bucket of docs/internals/limiter.md: one theoretical arrival time, which all processes of the
 * container move forward when they pay for work. */
#include "throttle_parts.h"

#define MOST_WALL 1e18 /* 30 years: hours of device time at a rate of 1 ppm would overflow */
static int64_t wall_ns(const struct gs_throttle *t, int64_t device_ns) {
    double ns = (double)device_ns * 1e6 / t->rate_ppm;
    return (int64_t)(ns > MOST_WALL ? MOST_WALL : ns < -MOST_WALL ? -MOST_WALL : ns);
}

void gs_bucket_adjust(struct gs_throttle *t, int64_t device_ns, uint64_t now) {
    uint64_t tat = atomic_load(&t->bucket->tat_ns), next;
    int64_t by = wall_ns(t, device_ns);
    do {
        next = by < 0 && tat < (uint64_t)-by ? 0 : tat + (uint64_t)by;
        next = min64(next, now + DEBT);
    } while (!atomic_compare_exchange_weak(&t->bucket->tat_ns, &tat, next));
}

uint64_t gs_bucket_pay(struct gs_throttle *t, int64_t device_ns, uint64_t burst, uint64_t now,
                       bool anyway) {
    uint64_t tat = atomic_load(&t->bucket->tat_ns), next;
    do {
        /* A later time is invalid: a process of the container wrote it. */
        uint64_t from = tat > now + DEBT ? now : tat;
        if (from > now && !anyway)
            return from;
        next = max64(from, now > burst ? now - burst : 0) + (uint64_t)wall_ns(t, device_ns);
        next = min64(next, now + DEBT);
    } while (!atomic_compare_exchange_weak(&t->bucket->tat_ns, &tat, next));
    return 0;
}

void gs_bucket_give_back(struct gs_throttle *t, int64_t most_ns, uint64_t now) {
    int64_t had = atomic_load(&t->allowance_ns);
    while (had > most_ns && !atomic_compare_exchange_weak(&t->allowance_ns, &had, most_ns))
        ;
    if (had > most_ns && t->limit.mode != GS_THROTTLE_UNLIMITED)
        gs_bucket_adjust(t, most_ns - had, now);
}
