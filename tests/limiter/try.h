/* The inline check of a launch, as launch.h makes it with what a thread remembers. */
#ifndef VT_TRY_H
#define VT_TRY_H

#include "limiter/throttle.h"

/* Return whether the launch may go on what is paid for. */
static inline bool gs_throttle_try(struct gs_throttle *t, struct gs_throttle_stream *s,
                                   struct gs_predictor *f) {
    int64_t ns = gs_throttle_expects(f);
    return gs_throttle_counts(t, s, f) && gs_throttle_covers(gs_throttle_allowance(t), ns) &&
           gs_throttle_pay(t, s, ns);
}

#endif
