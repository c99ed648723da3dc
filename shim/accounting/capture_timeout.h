/* How long captures keep anybody from looking at what launches take. Times are given, so that it is
 * tested in virtual time. */
#ifndef GPUSHARE_BLIND_H
#define GPUSHARE_BLIND_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* When captures began, as if those before had been a part of the open one, and when the last one
 * ended. */
struct gs_capture_timeout {
    _Atomic uint64_t from_ns, ended_ns;
};

/* A capture begins while none is open. */
void gs_capture_timeout_begin(struct gs_capture_timeout *blind, uint64_t now_ns);
void gs_capture_timeout_end(struct gs_capture_timeout *blind, uint64_t now_ns);
/* While one is open. */
bool gs_capture_timed_out(struct gs_capture_timeout *blind, uint64_t now_ns);

#endif
