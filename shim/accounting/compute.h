/* What this process does on its devices: a record for each context, with its streams, events and
 * page. The law itself is throttle.h's. */
#ifndef GPUSHARE_COMPUTE_H
#define GPUSHARE_COMPUTE_H

#include "core/context.h"
#include "limiter/throttle.h"

struct gs_compute;
#define GS_HIDDEN __attribute__((visibility("hidden")))
struct gs_grid {
    uint32_t x, y, z;
};

/* Changes when a context, a stream, a library or a capture came or went: what threads remember of
 * their launches is void. */
extern _Atomic uint64_t gs_compute_epoch GS_HIDDEN; /* never 0 */
extern _Atomic uint32_t gs_computes; /* contexts in the table; 0: nobody has launched anything */
static inline void gs_compute_forget(void) {
    atomic_fetch_add(&gs_compute_epoch, 1);
}

/* The same as a function: limits have changed. */
void gs_compute_forget_all(void);

/* ---- capturing.c ---------------------------------------------------------------------------- */

/* Streams that began a capture which has not ended. */
extern _Atomic uint32_t gs_captures;
/* One is open, and has not been for so long that the limit could not be held. */
bool gs_captures_blind(void);
bool gs_compute_is_capturing(CUstream stream);
void gs_capture_opened(void);
void gs_capture_closed(void);

/* ---- compute.c: contexts that come and go ---------------------------------------------------- */

/* Before a context goes; what its unfinished work is charged is known after it went. */
struct gs_leaving {
    struct gs_compute *compute;
    uint64_t since_ns;
    int64_t paid_ns;
};
void gs_compute_context_goes(struct gs_leaving *leaving, CUcontext context);
/* `result`: what the driver said; `stays`: it is there all the same. */
void gs_compute_context_gone(struct gs_leaving *leaving, CUresult result, bool stays);
/* The same for one that went without being asked for. */
void gs_compute_context_lost(CUcontext context);

/* At cuInit: map the pages of every limited device. False: a limit below 100 cannot be held. */
bool gs_compute_ready(const struct gs_view *view);

#endif
