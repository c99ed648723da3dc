/* The work of one process's threads. */
#define _GNU_SOURCE
#include "busy.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    MARKS = 1100, /* more than the driver's queue holds */
    CAPTURE_RELAXED = 2,
    NO_TIMING = 2,
    NON_BLOCKING = 1,
    IPC_LAZY = 1,
    PORTABLE = 3 /* and mapped */
};

/* A point in a stream: all work before it is complete once its event is. */
struct mark {
    void *event;
    uint64_t launches, ns;
};

struct lane {
    unsigned device;
    void *stream, *graph;
    struct mark *mark;
    unsigned first, last;     /* of the pending marks */
    uint64_t launches, ns;    /* since the last mark */
    uint64_t graph_ns, value; /* the last flag value waited for or set */
    uint64_t ahead_ns;
};

struct thread {
    const struct options *o;
    struct shared *shared;
    struct tally *tally;
    unsigned process, index;
    uint64_t random, burst_ns;
    struct lane lane[MAX_STREAMS];
    uint64_t flags; /* device address, in mode pair */
};

static struct kernels kernels[MAX_DEVICES]; /* by device */
static pthread_barrier_t prepared, begin;

uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Return the kernel of launch `n`: its function and duration. */
static void *choose(struct thread *t, const struct kernels *k, uint64_t n, uint64_t *ns) {
    unsigned i = (unsigned)(n % t->o->n_times);
    double us = (double)t->o->time_us[i];
    if (t->o->shape == SHAPE_LOGNORMAL)
        us *= exponential(normal(&t->random));
    else if (t->o->shape == SHAPE_BIMODAL)
        us = uniform(&t->random) < 0.1 ? 20 * us : us;
    bool fixed = t->o->shape == SHAPE_FIXED && !t->o->jitter;
    us *= 1 + (double)t->o->jitter / 100 * normal(&t->random);
    *ns = us < 0.2 ? 200 : (uint64_t)(us * 1000);
    return fixed ? k->fixed[i] : k->argument;
}

static bool enter(struct thread *t, const struct lane *lane) {
    return t->o->devices == 1 || CU(t->tally, "cuCtxSetCurrent", kernels[lane->device].context);
}

static bool launch(struct thread *t, const struct lane *lane, void *function, void **arguments) {
    return CU(t->tally, "cuLaunchKernel", function, kernels[lane->device].blocks, 1u, 1u, 32u, 1u,
              1u, 0u, lane->stream, arguments, NULL);
}

static bool spin(struct thread *t, uint64_t n, const struct lane *lane, uint64_t *ns) {
    const struct kernels *k = &kernels[lane->device];
    void *function = choose(t, k, n, ns);
    uint64_t iterations = (uint64_t)((double)k->iterations_per_ms * (double)*ns / 1e6);
    void *arguments[] = {ns, &iterations};
    iterations += iterations == 0;
    return launch(t, lane, function, arguments);
}

static bool make_graph(struct thread *t, struct lane *lane) {
    void *graph = NULL;
    if (!CU(t->tally, "cuStreamBeginCapture_v2", lane->stream, CAPTURE_RELAXED))
        return false;
    for (uint64_t i = 0; i < t->o->nodes; i++) {
        uint64_t ns;
        if (!spin(t, i, lane, &ns))
            return false;
        lane->graph_ns += ns;
    }
    return CU(t->tally, "cuStreamEndCapture", lane->stream, &graph) &&
           CU(t->tally, "cuGraphInstantiateWithFlags", &lane->graph, graph, 0ull);
}

/* Return the flags of a pair: of this process, or of the first one if several share them. */
static bool open_flags(struct thread *t) {
    struct {
        unsigned char bytes[64];
    } handle;
    if (t->process % 2 && t->o->processes > 1) {
        while (!__atomic_load_n(&t->shared->ipc_ready, __ATOMIC_ACQUIRE) && !t->shared->stop) {
            struct timespec nap = {.tv_nsec = 1000000};
            nanosleep(&nap, NULL);
        }
        memcpy(&handle, t->shared->ipc, sizeof handle);
        return CU(t->tally, "cuIpcOpenMemHandle_v2", &t->flags, handle, (unsigned)IPC_LAZY);
    }
    if (t->o->devices > 1) /* devices share the host's memory */
        return CU(t->tally, "cuMemHostAlloc", &t->flags, (size_t)4096, (unsigned)PORTABLE);
    if (!CU(t->tally, "cuMemAlloc_v2", &t->flags, (size_t)(2 << 20)) ||
        !CU(t->tally, "cuMemsetD32_v2", t->flags, 0u, (size_t)1024) ||
        !CU(t->tally, "cuCtxSynchronize"))
        return false;
    if (t->o->processes == 1)
        return true;
    if (!CU(t->tally, "cuIpcGetMemHandle", &handle, t->flags))
        return false;
    memcpy(t->shared->ipc, &handle, sizeof handle);
    __atomic_store_n(&t->shared->ipc_ready, 1, __ATOMIC_RELEASE);
    return true;
}

/* Launch a kernel that spins until its counterpart in the other stream or process has run. */
static bool pair(struct thread *t, uint64_t n, uint64_t *ns) {
    bool waits = t->o->processes > 1 ? t->process % 2 == 0 : n % 2 == 0;
    struct lane *lane = &t->lane[waits ? 0 : 1];
    uint64_t flag = t->flags, value = ++lane->value;
    void *arguments[] = {&flag, &value};
    const struct kernels *k = &kernels[lane->device];
    if (!enter(t, lane) || (!waits && !spin(t, n, lane, ns)))
        return false;
    return launch(t, lane, waits ? k->wait_flag : k->set_flag, arguments);
}

static void nap(uint64_t ns) {
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    nanosleep(&t, NULL);
}

static void add(uint64_t *counter, uint64_t n) {
    __atomic_store_n(counter, *counter + n, __ATOMIC_RELAXED);
}

static void settle(struct thread *t, struct lane *lane) {
    int (*query)() = cuda_function("cuEventQuery");
    for (; lane->first != lane->last; lane->first++) {
        struct mark *m = &lane->mark[lane->first % MARKS];
        if (query(m->event))
            return;
        lane->ahead_ns -= m->ns;
        add(&t->tally->done, m->launches);
        add(&t->tally->done_ns, m->ns);
    }
}

/* Mark the work since the last mark, if it is enough; wait if too much is pending. */
static bool note(struct thread *t, struct lane *lane, uint64_t ns) {
    lane->launches++;
    lane->ns += ns;
    lane->ahead_ns += ns;
    if (!t->o->mark_us || lane->ns < t->o->mark_us * 1000)
        return true;
    settle(t, lane);
    if (lane->last - lane->first == MARKS)
        return true;
    struct mark *m = &lane->mark[lane->last % MARKS];
    m->launches = lane->launches;
    m->ns = lane->ns;
    lane->launches = lane->ns = 0;
    if (!m->event && !CU(t->tally, "cuEventCreate", &m->event, (unsigned)NO_TIMING))
        return false;
    if (!CU(t->tally, "cuEventRecord", m->event, lane->stream))
        return false;
    lane->last++;
    while (t->o->ahead_us && lane->ahead_ns > t->o->ahead_us * 1000 && lane->first != lane->last) {
        if (!CU(t->tally, "cuEventSynchronize", lane->mark[lane->first % MARKS].event))
            return false;
        settle(t, lane);
    }
    return true;
}

static bool synchronize(struct thread *t, struct lane *lane) {
    if (!CU(t->tally, "cuStreamSynchronize", lane->stream))
        return false;
    settle(t, lane);
    add(&t->tally->done, lane->launches);
    add(&t->tally->done_ns, lane->ns);
    lane->launches = lane->ns = lane->ahead_ns = 0;
    return true;
}

static bool one(struct thread *t, uint64_t n) {
    struct lane *lane = &t->lane[n % t->o->streams];
    struct tally *tally = t->tally;
    uint64_t ns = 0, before = now_ns();
    bool ok;
    if (!enter(t, lane))
        return false;
    __atomic_store_n(&tally->calling_since_ns, before, __ATOMIC_RELAXED);
    if (t->o->mode == MODE_PAIR) {
        ok = pair(t, n, &ns);
    } else if (t->o->mode == MODE_GRAPH) {
        ns = lane->graph_ns;
        ok = CU(tally, "cuGraphLaunch", lane->graph, lane->stream);
    } else {
        ok = spin(t, n, lane, &ns);
    }
    uint64_t took = now_ns() - before;
    __atomic_store_n(&tally->calling_since_ns, 0, __ATOMIC_RELAXED);
    if (took > tally->longest_call_ns)
        tally->longest_call_ns = took;
    if (!ok)
        return false;
    add(&tally->launches, 1);
    add(&tally->asked_ns, ns);
    if (t->o->mode == MODE_SYNC)
        return add(&lane->launches, 1), add(&lane->ns, ns), synchronize(t, lane);
    t->burst_ns += ns;
    if (t->o->mode == MODE_PAUSE && t->burst_ns >= t->o->burst_us * 1000) {
        t->burst_ns = 0;
        nap((uint64_t)(2 * uniform(&t->random) * (double)t->o->pause_us * 1000));
    }
    return note(t, lane, ns);
}

static bool prepare(struct thread *t) {
    if (!CU(t->tally, "cuCtxSetCurrent", kernels[0].context))
        return false;
    for (uint64_t i = 0; i < t->o->streams; i++) {
        struct lane *lane = &t->lane[i];
        lane->device = (unsigned)(i % t->o->devices);
        if (!enter(t, lane) ||
            !CU(t->tally, "cuStreamCreate", &lane->stream, (unsigned)NON_BLOCKING))
            return false;
        lane->mark = calloc(MARKS, sizeof *lane->mark);
        if (!lane->mark)
            return cuda_result(t->tally, "calloc", -1);
        if (t->o->mode == MODE_GRAPH && !make_graph(t, lane))
            return false;
    }
    return t->o->mode != MODE_PAIR || (enter(t, &t->lane[0]) && open_flags(t));
}

static void *run(void *argument) {
    struct thread *t = argument;
    bool ok = prepare(t);
    pthread_barrier_wait(&prepared);
    pthread_barrier_wait(&begin);
    for (uint64_t n = 0; ok && !__atomic_load_n(&t->shared->stop, __ATOMIC_RELAXED); n++)
        ok = one(t, n);
    for (uint64_t i = 0; ok && i < t->o->streams; i++) {
        ok = enter(t, &t->lane[i]);
        if (ok && t->o->drain)
            ok = synchronize(t, &t->lane[i]);
        else
            settle(t, &t->lane[i]);
    }
    __atomic_store_n(&t->tally->finished, 1, __ATOMIC_RELEASE);
    return NULL;
}

int work(const struct options *o, struct shared *shared, unsigned process, void (*ready)(void)) {
    static struct thread threads[MAX_WORKERS];
    pthread_t id[MAX_WORKERS];
    unsigned n = (unsigned)o->threads;
    struct tally *tally = &shared->tally[process * n];
    bool ok = true;
    for (unsigned i = 0; ok && i < o->devices; i++)
        ok = cuda_open(&kernels[i], o, i, tally);
    pthread_barrier_init(&prepared, NULL, n + 1);
    pthread_barrier_init(&begin, NULL, n + 1);
    for (unsigned i = 0; ok && i < n; i++) {
        threads[i] = (struct thread){.o = o,
                                     .shared = shared,
                                     .tally = tally + i,
                                     .process = process,
                                     .index = i,
                                     .random = o->seed + process * 1000 + i};
        ok = pthread_create(&id[i], NULL, run, &threads[i]) == 0;
    }
    if (ok)
        pthread_barrier_wait(&prepared);
    ready();
    if (!ok)
        return 1;
    pthread_barrier_wait(&begin);
    for (unsigned i = 0; i < n; i++)
        pthread_join(id[i], NULL);
    for (unsigned i = 0; i < n; i++)
        ok &= !tally[i].code;
    return !ok;
}
