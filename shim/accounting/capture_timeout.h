/* How long captures keep the limiter from measuring launches. Times are parameters, so that tests
 * can run in virtual time. */
#ifndef GPUSHARE_CAPTURE_TIMEOUT_H
#define GPUSHARE_CAPTURE_TIMEOUT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* When the open capture began, moved back by the used part of earlier captures, and when the last
 * capture ended. */
struct gs_capture_timeout {
    _Atomic uint64_t from_ns, ended_ns;
};

/* Called when a capture begins while none is open. */
void gs_capture_timeout_begin(struct gs_capture_timeout *timeout, uint64_t now_ns);
void gs_capture_timeout_end(struct gs_capture_timeout *timeout, uint64_t now_ns);
/* Call only while a capture is open. Return whether markers are still withheld for it. */
bool gs_capture_timed_out(struct gs_capture_timeout *timeout, uint64_t now_ns);

#endif
