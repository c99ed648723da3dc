/* The driver's own thread. It starts when a stream waits for more than the device: it runs host
 * functions and checks values that streams wait for or write. Otherwise it sleeps. */
#include "work.h"

#include <signal.h>
#include <sys/prctl.h>
#include <time.h>

#define CHECK_INTERVAL_NS 100000u

static pthread_cond_t needed = PTHREAD_COND_INITIALIZER;
static bool running, wanted;

/* Returns the first host function whose dependencies have ended. */
static struct op *due_host_function(struct context *ctx) {
    uint64_t attained_ns = sim.device[ctx->device].sim.state->queue[ctx->queue - 1].attained_ns;
    for (struct stream *s = ctx->streams; s; s = s->next) {
        struct op *op = s->unsubmitted;
        if (op && op->work.kind == WORK_HOST && !op->host_running && s->end_ns <= attained_ns) {
            for (struct op *before = s->first; before; before = before->next) {
                if (before == op)
                    return op;
                if (!before->submitted)
                    break;
            }
        }
    }
    return NULL;
}

/* Runs the function without the lock: it may block while other threads continue. */
static void run_host_function(struct op *op) {
    CUDA_HOST_NODE_PARAMS call = op->work.host;
    op->host_running = true;
    pthread_mutex_unlock(&sim.lock);
    call.fn(call.userData);
    pthread_mutex_lock(&sim.lock);
    op->work.kind = WORK_EMPTY;
}

/* Returns the next time at which work that writes memory or unblocks a waiting op may end, as
 * far as known. */
static uint64_t next_need_ns(struct context *ctx, uint64_t latest_ns) {
    struct sim_device *d = &sim.device[ctx->device].sim;
    uint64_t end_ns = UINT64_MAX;
    sim_lock(d);
    uint64_t attained_ns = d->state->queue[ctx->queue - 1].attained_ns;
    for (struct stream *s = ctx->streams; s; s = s->next) {
        struct op *op = ctx->effects ? s->first : NULL;
        while (op && op->submitted && (op->work.kind != WORK_KERNEL || !op->work.kernel.sets))
            op = op->next;
        if (op && op->submitted && op->end_ns < end_ns)
            end_ns = op->end_ns;
        if (s->unsubmitted && s->end_ns > attained_ns && s->end_ns < end_ns)
            end_ns = s->end_ns;
    }
    uint64_t at_ns = end_ns == UINT64_MAX ? end_ns : sim_foresee(d, ctx->queue - 1, end_ns);
    sim_unlock(d);
    return at_ns < latest_ns ? at_ns : latest_ns;
}

/* Checks all contexts. True if one must be checked again, at *next_ns. */
static bool check_contexts(uint64_t *next_ns) {
    bool blocked = false;
    *next_ns = sim_now_ns() + CHECK_INTERVAL_NS;
    for (struct context *ctx = sim.contexts; ctx; ctx = ctx->next) {
        engine_progress(ctx);
        struct op *op = ctx->queue ? due_host_function(ctx) : NULL;
        if (op) {
            run_host_function(op);
            *next_ns = 0;
            return true;
        }
        bool needed = ctx->effects;
        for (struct stream *s = ctx->streams; s; s = s->next)
            needed |= s->unsubmitted != NULL;
        if (needed && ctx->queue)
            *next_ns = next_need_ns(ctx, *next_ns);
        blocked |= needed;
    }
    return blocked;
}

static void *serve(void *unused) {
    (void)unused;
    prctl(PR_SET_TIMERSLACK, 1);
    pthread_mutex_lock(&sim.lock);
    for (;;) {
        while (!wanted)
            pthread_cond_wait(&needed, &sim.lock);
        uint64_t next_ns;
        wanted = check_contexts(&next_ns);
        if (!wanted)
            continue;
        struct timespec t = {.tv_sec = (time_t)(next_ns / 1000000000u),
                             .tv_nsec = (long)(next_ns % 1000000000u)};
        pthread_mutex_unlock(&sim.lock);
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
        pthread_mutex_lock(&sim.lock);
    }
    return NULL;
}

/* Starts or wakes the service thread. Call with the process lock held. */
void service_need(void) {
    wanted = true;
    if (!running) {
        pthread_t thread;
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        running = pthread_create(&thread, NULL, serve, NULL) == 0;
        if (running)
            pthread_detach(thread);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    pthread_cond_signal(&needed);
}
