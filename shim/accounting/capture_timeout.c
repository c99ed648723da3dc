#include "capture_timeout.h"

#define MOST UINT64_C(200000000) /* ns, for one capture or several in close succession */
#define REGAINED 32 /* time without a capture that regains one unit of the allowed time */

static uint64_t smaller(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

void gs_capture_timeout_begin(struct gs_capture_timeout *timeout, uint64_t now_ns) {
    uint64_t ended = atomic_load(&timeout->ended_ns);
    uint64_t used = ended - smaller(ended, atomic_load(&timeout->from_ns));
    used -= smaller(used, (now_ns - smaller(now_ns, ended)) / REGAINED);
    atomic_store(&timeout->from_ns, now_ns - smaller(used, MOST));
}

void gs_capture_timeout_end(struct gs_capture_timeout *timeout, uint64_t now_ns) {
    atomic_store(&timeout->ended_ns, now_ns);
}

bool gs_capture_timed_out(struct gs_capture_timeout *timeout, uint64_t now_ns) {
    uint64_t from = atomic_load(&timeout->from_ns);
    /* The capture may have begun after `now_ns` was read. */
    return now_ns - smaller(now_ns, from) < MOST;
}
