/* Hosts in virtual time: a host continues when its clock is the earliest, or when the device
 * wakes it. */
#include "vt.h"

static uint64_t late(struct world *world, struct host *host, uint64_t until) {
    if (world->tenant[host->tenant].law == LAW_ORACLE)
        return until;
    uint64_t jitter = (uint64_t)((5 + uniform(&host->rng) * world->jitter_us) * 1000);
    return (until > host->clock_ns ? until : host->clock_ns) + jitter;
}

static struct thread *next_thread(struct host *host) {
    struct thread *next = host->thread;
    for (int i = 1; i < THREADS; i++)
        next = host->thread[i].clock_ns < next->clock_ns ? &host->thread[i] : next;
    return next;
}

static void went(struct host *host) {
    gs_throttle_entered(&host->streams[host->stream], host->clock_ns);
    gs_throttle_went(&host->streams[host->stream]);
}

/* While a thread is between its admission and the driver, other threads are admitted and record
 * events. Sometimes that takes long, because the thread is preempted. */
static void step_threads(struct world *world, struct host *host) {
    struct thread *thread = next_thread(host);
    bool ours = world->tenant[host->tenant].law == LAW_OURS;
    uint64_t until = 0;
    if (!thread->kernel_ns && choose(host)) {
        thread->kernel_ns = host->kernel_ns;
        thread->function = host->function;
    }
    host->function = thread->function;
    host->stream = (uint32_t)(thread - host->thread);
    if (!thread->launching && (until = may_launch(host))) {
        thread->clock_ns = late(world, host, until);
    } else if (!thread->launching) {
        thread->launching = true;
        thread->mark = ours && host->streams[host->stream].mark;
        double us = uniform(&host->rng) < world->stall ? 1000 : 2;
        thread->clock_ns = host->clock_ns + (uint64_t)(us * (1 + uniform(&host->rng)) * 1000);
    } else {
        gpu_push(host->gpu, host->context, host->stream, thread->kernel_ns, KERNEL);
        if (ours && uniform(&host->rng) >= world->lost)
            went(host);
        if (thread->mark)
            gs_throttle_launched(&host->throttle);
        thread->launching = false;
        thread->kernel_ns = 0;
        thread->clock_ns = host->clock_ns + 500;
    }
    uint64_t next = next_thread(host)->clock_ns;
    host->clock_ns = next > host->clock_ns ? next : host->clock_ns;
}

/* The driver hands the kernel to the device at the end of its call. */
static uint64_t launch_ns(struct host *host) {
    const struct tenant *t = &host->world->tenant[host->tenant];
    bool first = t->program == P_TRAIN && host->launches <= STEP;
    double us = first && t->first_us > 0 ? t->first_us : t->latency_us;
    return us > 0 ? (uint64_t)(us * (0.7 + 0.6 * uniform(&host->rng)) * 1000) : 0;
}

static void step(struct world *world, struct host *host) {
    struct gpu *gpu = host->gpu;
    struct tenant *t = &world->tenant[host->tenant];
    struct context *c = gpu->context[host->context];
    bool ours = t->law == LAW_OURS;
    if (host->clock_ns >= t->leave_ns || c->dead) {
        host->clock_ns = UINT64_MAX;
        return;
    }
    if (host->clock_ns >= t->stop_ns && host->clock_ns < t->stop_ns + t->stop_for_ns) {
        host->clock_ns = t->stop_ns + t->stop_for_ns;
        return;
    }
    if (host->clock_ns >= t->limit_at_ns)
        host->throttle.limit.ppm = t->limit_then_ppm;
    host->throttle.capturing =
        host->clock_ns >= t->capture_ns && host->clock_ns - t->capture_ns < 500 * MS;
    if (host->syncing) {
        host->syncing = false;
        if (ours)
            gs_throttle_sync_end(&host->throttle);
        if (t->program == P_INTERACTIVE && host->requests < REQUESTS)
            host->request_us[host->requests++] = (uint32_t)((host->clock_ns - host->asked_ns) / US);
        uint64_t stall = stall_ns(host);
        host->asked_ns = host->clock_ns + stall;
        if (stall) {
            host->clock_ns += stall;
            return;
        }
    }
    if (t->program == P_THREADS && c->kernels < QUEUE) {
        step_threads(world, host);
        return;
    }
    if (!host->chosen && !choose(host)) {
        host->clock_ns += 50 * US;
        return;
    }
    if (c->kernels >= QUEUE) {
        c->waits_room = true;
        host->clock_ns = UINT64_MAX;
        return;
    }
    uint64_t until = host->launching ? 0 : may_launch(host);
    if (until) {
        host->clock_ns = late(world, host, until);
        return;
    }
    uint64_t latency = host->launching ? 0 : launch_ns(host);
    if (latency) {
        host->launching = true;
        host->clock_ns += latency;
        return;
    }
    host->launching = false;
    gpu_push(gpu, host->context, host->stream, host->kernel_ns, host->kind);
    host->chosen = false;
    if (ours)
        went(host);
    if (!t->cpu_us)
        host->clock_ns += 2000 + (uint64_t)(uniform(&host->rng) * 2000);
    if (ours && host->streams[host->stream].mark)
        gs_throttle_launched(&host->throttle);
    host->clock_ns += pause_ns(host) + (uint64_t)(t->cpu_us * 1000);
    if (wants_sync(host) || polls(host)) {
        if (ours && !polls(host))
            gs_throttle_sync_begin(&host->throttle);
        host->syncing = !polls(host);
        c->waits_stream = (int)host->stream;
        host->clock_ns = UINT64_MAX;
    }
}

/* Simulates to the next event: until `until`, or until a host is woken. */
static void advance(struct world *world, uint64_t until) {
    for (int i = 0; i < (int)world->devices; i++) {
        struct gpu *gpu = &world->gpu[i];
        gpu_advance(gpu, until);
        if (gpu->woken < 0)
            continue;
        struct host *host = world->host[gpu->woken];
        host->clock_ns = gpu->now_ns + 5000 + (uint64_t)(uniform(&host->rng) * 10000);
        until = until < gpu->now_ns ? until : gpu->now_ns;
    }
}

/* The next process of the container inherits what a killed one published last. */
static void inherit(struct world *world, int dead) {
    struct gs_page *page = world->page[dead];
    struct host *next = dead + 1 < world->hosts ? world->host[dead + 1] : NULL;
    if (next && next->tenant == world->host[dead]->tenant)
        gs_throttle_inherit(&next->throttle, &page->buffer[atomic_load(&page->index) & 1],
                            next->gpu->now_ns);
}

void simulate(struct world *world) {
    uint64_t now = 0;
    while (now < world->end_ns) {
        struct host *next = world->host[0];
        for (int i = 1; i < world->hosts; i++)
            if (world->host[i]->clock_ns < next->clock_ns)
                next = world->host[i];
        for (int i = 0; i < world->tenants; i++)
            if (world->tenant[i].kill_ns <= now) { /* the container's first process */
                int k = 0;
                while (world->host[k]->tenant != i)
                    k++;
                gpu_kill(world->host[k]->gpu, k);
                inherit(world, k);
                world->tenant[i].kill_ns = UINT64_MAX;
            }
        advance(world, next->clock_ns < world->end_ns ? next->clock_ns : world->end_ns);
        now = world->gpu[0].now_ns;
        for (int i = 1; i < (int)world->devices; i++)
            now = now < world->gpu[i].now_ns ? now : world->gpu[i].now_ns;
        if (next->clock_ns <= now)
            step(world, next);
    }
}
