/* The driver's own thread: started when a stream waits for more than the device, it runs host
 * functions and looks after values that streams wait for or write. It sleeps otherwise. */
#include "work.h"

#include <signal.h>
#include <time.h>

#define LOOK_NS 100000

static pthread_cond_t needed = PTHREAD_COND_INITIALIZER;
static bool running, wanted;

/* The first host function whose stream has come to it. */
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

/* Runs it without the lock: it may block, and other threads go on. */
static void run_host_function(struct op *op) {
    CUDA_HOST_NODE_PARAMS call = op->work.host;
    op->host_running = true;
    pthread_mutex_unlock(&sim.lock);
    call.fn(call.userData);
    pthread_mutex_lock(&sim.lock);
    op->work.kind = WORK_EMPTY;
}

static bool look(void) {
    bool blocked = false;
    for (struct context *ctx = sim.contexts; ctx; ctx = ctx->next) {
        engine_progress(ctx);
        struct op *op = ctx->queue ? due_host_function(ctx) : NULL;
        if (op) {
            run_host_function(op);
            return true;
        }
        for (struct stream *s = ctx->streams; s; s = s->next)
            blocked |= s->unsubmitted != NULL;
    }
    return blocked;
}

static void *serve(void *unused) {
    (void)unused;
    pthread_mutex_lock(&sim.lock);
    for (;;) {
        while (!wanted)
            pthread_cond_wait(&needed, &sim.lock);
        wanted = look();
        if (!wanted)
            continue;
        struct timespec t = {.tv_nsec = LOOK_NS};
        pthread_mutex_unlock(&sim.lock);
        nanosleep(&t, NULL);
        pthread_mutex_lock(&sim.lock);
    }
    return NULL;
}

/* Call with the process lock held. */
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
