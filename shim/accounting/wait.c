/* Wait until a launch may go: sleep on the generation of the limits file, which the host wakes when
 * it changes a limit. A futex in a read-only mapping works, since the kernel identifies pages of a
 * file by the file (futex(2)). If the host does not wake it, the process notices a change after NAP
 * at the latest. */
#include <errno.h>
#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "compute_parts.h"

#define NAP (50 * MS)

void gs_compute_wait(uint64_t until_ns, uint64_t generation) {
    uint64_t now = gs_compute_now();
    int saved = errno;
    if (until_ns <= now)
        return;
    until_ns = min64(until_ns, now + NAP);
    struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000u),
                             .tv_nsec = (long)(until_ns % 1000000000u)};
    /* The default timer slack of 50 us would add to every wait. */
    int slack = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
    if (slack > 1)
        prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    if (syscall(SYS_futex, (const uint32_t *)&gs_compute_limits_file->generation, FUTEX_WAIT_BITSET,
                (uint32_t)generation, &until, NULL, FUTEX_BITSET_MATCH_ANY) != 0 &&
        errno != ETIMEDOUT && errno != EAGAIN && errno != EINTR)
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL); /* a sandbox has no futex */
    if (slack > 1)
        prctl(PR_SET_TIMERSLACK, slack, 0, 0, 0);
    errno = saved;
}
