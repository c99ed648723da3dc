/* The workloads: kinds of kernels in kinds of programs. */
#include <math.h>

#include "vt.h"

const char *const kernel_name[KERNELS] = {"5us",     "50us",     "1ms",     "20ms", "lognormal",
                                          "bimodal", "changing", "cycling", "cold", "growing",
                                          "endless", "5to65us",  "30to80us"};
const char *const program_name[PROGRAMS] = {"stream", "streams", "graph",   "sync",  "pause",
                                            "pair",   "poll",    "threads", "train", "interactive"};

static double kernel_ns(struct host *host, enum kernel kernel, int function) {
    static const double mean_us[KERNELS] = {5, 50, 1000, 20000};
    static const double factor[FUNCTIONS] = {0.7, 1, 1.3};
    double us = mean_us[kernel];
    if (kernel == K_LOGNORMAL)
        us = 100 * exp(normal(&host->rng));
    else if (kernel == K_BIMODAL)
        us = uniform(&host->rng) < 0.1 ? 1000 : 50;
    return us * factor[function] * (1 + 0.02 * normal(&host->rng)) * 1000;
}

/* A training step: functions whose durations differ, and stay the same in each step. */
static double training_ns(struct host *host, enum kernel kernel) {
    double least = kernel == K_5_TO_65US ? 5e3 : 30e3, most = kernel == K_5_TO_65US ? 65e3 : 80e3;
    struct rng of_function = {(uint64_t)host->function};
    return least + (most - least) * uniform(&of_function) * (1 + 0.01 * normal(&host->rng));
}

/* One function and grid whose launches change their duration at launch `n`. */
static double turning_ns(enum kernel kernel, uint32_t n) {
    enum { FIRST = 200, LONG = 300, SHORT = 40, FEW_LONG = 50, MANY_SHORT = 2000, GROWN = 60000 };
    switch (kernel) {
    case K_CHANGING: /* repeatedly */
        return n < FIRST || (n - FIRST) % (LONG + SHORT) >= LONG ? 5e3 : 10e6;
    case K_CYCLING: /* with enough short launches in between to be predicted as short again */
        return n < FIRST || (n - FIRST) % (FEW_LONG + MANY_SHORT) >= FEW_LONG ? 5e3 : 10e6;
    case K_COLD: /* only the first launches */
        return n < 3 ? 10e6 : 5e3;
    case K_GROWING: /* from then on */
        return n < GROWN ? 50e3 : 150e3;
    default:
        return 5e9;
    }
}

/* A kernel that waits on the device for another one: in the other stream, or in the other
 * process. */
static bool choose_of_pair(struct host *host) {
    const struct signals *signals = &host->world->signals;
    const struct context *c = host->gpu->context[host->context];
    const struct tenant *tenant = &host->world->tenant[host->tenant];
    bool waiter = host->launches % 2 == 0;
    if (tenant->processes > 1)
        waiter = host->context % 2 == 0;
    if (host->world->pairs_of[c->group] > 1)
        waiter = tenant->waits_for >= 0;
    if (waiter == (signals->waiters[c->group] > 0))
        return false;
    host->kind = waiter ? WAITER : RELEASER;
    host->function = host->stream = waiter ? 0 : 1;
    host->kernel_ns = 50e3;
    return true;
}

bool choose(struct host *host) {
    const struct tenant *tenant = &host->world->tenant[host->tenant];
    static const int nodes[KERNELS] = {10, 10, 3, 2, 6, 6, 1, 1, 1, 1, 1, 1, 1};
    host->kind = KERNEL;
    if (tenant->program == P_PAIR && !choose_of_pair(host))
        return false;
    if (tenant->program == P_PAIR) {
        host->launches++;
        return host->chosen = true;
    }
    host->function = (int)(host->launches % FUNCTIONS);
    host->stream = tenant->program == P_STREAMS ? host->launches % STREAMS : 0;
    host->kernel_ns = kernel_ns(host, tenant->kernel, host->function);
    if (tenant->program == P_TRAIN)
        host->function = (int)(host->launches % STEP);
    if (tenant->kernel >= K_5_TO_65US) {
        host->kernel_ns = training_ns(host, tenant->kernel);
    } else if (tenant->kernel >= K_CHANGING) {
        host->function = 0;
        host->kernel_ns = turning_ns(tenant->kernel, host->launches);
    }
    if (tenant->program == P_GRAPH) {
        host->function = 0;
        for (int i = 1; i < nodes[tenant->kernel]; i++)
            host->kernel_ns += kernel_ns(host, tenant->kernel, i % FUNCTIONS);
    }
    host->kernel_ns = host->kernel_ns < 200 ? 200 : host->kernel_ns;
    host->launches++;
    return host->chosen = true;
}

bool wants_sync(const struct host *host) {
    enum program program = host->world->tenant[host->tenant].program;
    return program == P_SYNC || (program == P_TRAIN && host->launches % STEP == 0) ||
           (program == P_INTERACTIVE && host->launches % REQUEST == 0);
}

uint64_t stall_ns(struct host *host) {
    const struct tenant *tenant = &host->world->tenant[host->tenant];
    bool now = tenant->program == P_TRAIN && host->launches % (20 * STEP) == 0;
    if (tenant->program == P_INTERACTIVE) /* a request each 50 ms on average */
        return (uint64_t)(-log(1 - uniform(&host->rng)) * 50e6);
    return now ? (uint64_t)(tenant->stall_ms * 1e6) : 0;
}

/* Waits by polling, or by reading memory that the kernel writes: the limiter does not observe
 * it. */
bool polls(const struct host *host) {
    return host->world->tenant[host->tenant].program == P_POLL;
}

/* Bursts of some 2 ms of launches or 40 launches, then a pause without synchronisation. */
uint64_t pause_ns(struct host *host) {
    const struct tenant *tenant = &host->world->tenant[host->tenant];
    static const uint32_t burst[KERNELS] = {400, 40, 4, 2, 20, 20, 1, 1, 400, 40, 1, 1, 1};
    if (tenant->program != P_PAUSE && !host->pauses)
        return 0;
    if (host->burst_left--)
        return 0;
    host->burst_left = burst[tenant->kernel];
    double mean_ns = host->pauses ? 20e6 : 1e6;
    return (uint64_t)(-log(1 - uniform(&host->rng)) * mean_ns);
}
