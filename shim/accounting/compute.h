/* Compute accounting of this process: a record for each context, with its streams, events and
 * activity. The rate limiter itself is in limiter/throttle.h. */
#ifndef GPUSHARE_COMPUTE_H
#define GPUSHARE_COMPUTE_H

#include "core/context.h"
#include "limiter/throttle.h"

struct gs_compute;
#define GS_HIDDEN __attribute__((visibility("hidden")))
struct gs_grid {
    uint32_t x, y, z;
};

/* The epoch changes when a context, stream, library or capture begins or ends: launches that
 * threads remember are then void. */
extern _Atomic uint64_t gs_compute_epoch GS_HIDDEN; /* never 0 */
extern _Atomic uint32_t gs_computes;                /* contexts in the table; 0: no launch so far */
static inline void gs_compute_forget(void) {
    atomic_fetch_add(&gs_compute_epoch, 1);
}

/* The same as a function whose address can be taken: limits have changed. */
void gs_compute_forget_all(void);

/* ---- capturing.c ---------------------------------------------------------------------------- */

/* Streams with an open capture. */
extern _Atomic uint32_t gs_captures;
/* Return whether a capture is open and has not yet been open for so long that the limit could not
 * be enforced. */
bool gs_captures_stop_markers(void);
bool gs_compute_is_capturing(CUstream stream);
void gs_capture_opened(void);
void gs_capture_closed(void);

/* ---- compute.c: contexts that begin and end -------------------------------------------------- */

/* State while a context is destroyed; the charge for its unfinished work is known afterwards. */
struct gs_leaving {
    struct gs_compute *compute;
    uint64_t since_ns;
    int64_t paid_ns;
};
void gs_compute_context_goes(struct gs_leaving *leaving, CUcontext context);
/* `result`: what the driver returned; `stays`: the context exists although it returned success. */
void gs_compute_context_gone(struct gs_leaving *leaving, CUresult result, bool stays);
/* Called for a context that ended without being destroyed by the program. */
void gs_compute_context_lost(CUcontext context);

/* At cuInit: map the activity files of every limited device. Return false if a limit below 100
 * cannot be enforced. */
bool gs_compute_ready(const struct gs_view *view);

#endif
