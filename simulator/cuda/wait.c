/* Waiting for the device: a thread sleeps until the time at which the awaited work ends if no
 * other work is added, then checks again. */
#include "work.h"

#include <sys/prctl.h>
#include <time.h>

#define SPUN_WAIT_NS 25000u /* spin for the end of a wait, because a sleep overshoots */
#define BLOCKED_WAIT_NS 100000u

void engine_spend(uint64_t until_ns) {
    while (sim_now_ns() < until_ns) {
    }
}

static void sleep_until(uint64_t until_ns) {
    struct timespec t = {.tv_sec = (time_t)(until_ns / 1000000000u),
                         .tv_nsec = (long)(until_ns % 1000000000u)};
    int slack_ns = prctl(PR_GET_TIMERSLACK); /* save the slack: the thread belongs to the program */
    prctl(PR_SET_TIMERSLACK, 1);
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
    prctl(PR_SET_TIMERSLACK, slack_ns);
}

void engine_nap(struct context *ctx, uint64_t end_ns, bool submitted) {
    uint64_t until_ns = sim_now_ns() + BLOCKED_WAIT_NS;
    if (submitted) {
        struct sim_device *d = device_of(ctx);
        sim_lock(d);
        until_ns = sim_foresee(d, ctx->queue - 1, end_ns);
        sim_unlock(d);
    }
    pthread_mutex_unlock(&sim.lock);
    if (!submitted)
        sleep_until(until_ns);
    else if (until_ns > sim_now_ns() + 2 * SPUN_WAIT_NS)
        sleep_until(until_ns - SPUN_WAIT_NS);
    engine_spend(until_ns);
    pthread_mutex_lock(&sim.lock);
}

CUresult engine_wait_stream(struct stream *s) {
    struct context *ctx = s->ctx;
    uint64_t last = s->last ? s->last->sequence : 0;
    for (;;) {
        engine_progress(ctx);
        if (!s->first || s->first->sequence > last)
            break;
        engine_nap(ctx, s->end_ns, !s->unsubmitted);
    }
    return CUDA_SUCCESS;
}

CUresult engine_wait_streams(struct context *ctx, bool blocking_only) {
    uint64_t last = engine_sequence;
    while (ctx->pending) {
        bool busy = false, blocked = false;
        engine_progress(ctx);
        for (struct stream *s = ctx->streams; s; s = s->next) {
            if (blocking_only && !stream_blocks_with_legacy(s))
                continue;
            busy |= s->first && s->first->sequence <= last;
            blocked |= s->unsubmitted != NULL;
        }
        if (!busy)
            break;
        engine_nap(ctx, ctx->submitted_ns, !blocked);
    }
    return CUDA_SUCCESS;
}

CUresult engine_wait_context(struct context *ctx) {
    return ctx->pending ? engine_wait_streams(ctx, false) : CUDA_SUCCESS;
}

bool engine_mark_done(struct mark *m) {
    if (!m->done)
        engine_progress(m->ctx);
    return m->done;
}

CUresult engine_wait_mark(struct mark *m) {
    m->refs++;
    while (!engine_mark_done(m))
        engine_nap(m->ctx, m->end_ns, m->submitted);
    mark_drop(m);
    return CUDA_SUCCESS;
}

bool engine_stream_idle(struct stream *s) {
    engine_progress(s->ctx);
    return !s->first;
}
