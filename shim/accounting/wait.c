/* Waiting for the time when a launch may go: asleep on the generation of the limits file, which the
 * host wakes when it changes them. A mapping that is only read can be waited on (futex(2): a file's
 * pages are known by the file). A host that forgets to wake is noticed after a nap. */
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
    /* The default slack of 50 us would add to every wait. */
    int slack = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
    if (slack > 1)
        prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    if (syscall(SYS_futex, (const uint32_t *)&gs_compute_limits_file->generation, FUTEX_WAIT_BITSET,
                (uint32_t)generation, &until, NULL, FUTEX_BITSET_MATCH_ANY) != 0 &&
        errno != ETIMEDOUT && errno != EAGAIN && errno != EINTR)
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL); /* a sandbox without it */
    if (slack > 1)
        prctl(PR_SET_TIMERSLACK, slack, 0, 0, 0);
    errno = saved;
}
