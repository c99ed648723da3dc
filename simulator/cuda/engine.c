/* Streams on the device.
 *
 * Work is scheduled, when it is issued, on its context's own clock: the device time that
 * scheduler.c has given to the context. A kernel begins when earlier work in its stream has
 * ended and enough of the device's sixteen parts are free. A kernel with at least one block per
 * multiprocessor takes all parts, so such kernels run one after another; events and copies take
 * no parts.
 *
 * Work that waits for a value in memory, a host function or another context stays in its stream
 * until that wait is over. A kernel that spins until a value in memory changes takes no part:
 * its context holds the device in its slices while its other streams continue. */
#include "work.h"

#include <stdlib.h>
#include <string.h>

#define QUEUE_DEPTH 1024u

uint64_t engine_sequence;

static struct sim_queue *queue_of(const struct context *ctx) {
    return &device_of(ctx)->state->queue[ctx->queue - 1];
}

CUresult engine_open(struct context *ctx) {
    struct sim_device *d = device_of(ctx);
    sim_lock(d);
    for (unsigned i = 0; i < SIM_MAX_QUEUES && !ctx->queue; i++) {
        struct sim_queue *q = &d->state->queue[i];
        if (q->client)
            continue;
        *q = (struct sim_queue){.client = d->client};
        ctx->queue = i + 1;
        if (i >= d->state->queues_high)
            d->state->queues_high = i + 1;
    }
    sim_unlock(d);
    return ctx->queue ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void engine_close(struct context *ctx) {
    struct sim_device *d = device_of(ctx);
    if (!ctx->queue)
        return;
    sim_lock(d);
    if (queue_of(ctx)->client == d->client)
        queue_of(ctx)->client = 0;
    sim_unlock(d);
}

void mark_drop(struct mark *mark) {
    if (mark && --mark->refs == 0)
        free(mark);
}

/* Returns when the context had attained `end_ns`, computed from the slices that are still
 * recorded. */
static uint64_t instant_of(const struct sim_queue *q, uint64_t end_ns, uint64_t fallback_ns) {
    unsigned n = q->n_slices < SIM_QUEUE_SLICES ? q->n_slices : SIM_QUEUE_SLICES;
    uint64_t at = fallback_ns;
    for (unsigned i = 1; i <= n; i++) {
        const struct sim_slice *s = &q->slice[(q->n_slices - i) % SIM_QUEUE_SLICES];
        if (s->attained_ns + (s->end_ns - s->start_ns) < end_ns)
            break;
        at = s->start_ns + (end_ns > s->attained_ns ? end_ns - s->attained_ns : 0);
    }
    return at;
}

static void finish_mark(struct mark *m, const struct sim_queue *q, uint64_t submitted_at,
                        uint64_t now_ns) {
    uint64_t at = instant_of(q, m->end_ns, now_ns);
    m->at_ns = at > submitted_at ? at : submitted_at;
    m->done = true;
}

/* Updates a kernel that spins on a value in memory. True when the value has changed. */
static bool spin(struct op *op, struct sim_queue *q) {
    bool holds = value_holds(&op->work.kernel.flag);
    if (op->spinning == holds)
        q->spinning += holds ? -1u : 1u;
    op->spinning = !holds;
    return holds;
}

/* True unless the op still waits for memory, a host function or an event of another context. */
static bool is_ready(struct stream *s, struct op *op, struct sim_queue *q) {
    uint64_t attained_ns = q->attained_ns;
    switch (op->work.kind) {
    case WORK_WAIT:
        return op->mark->done || (op->mark->ctx == s->ctx && op->mark->submitted);
    case WORK_VALUE:
        if (s->end_ns > attained_ns)
            return false;
        if (op->work.value.write)
            return true;
        return value_holds(&op->work.value);
    case WORK_KERNEL:
        if (!op->work.kernel.waits)
            return true;
        /* If the flag already holds, it will hold when the kernel begins unless it is written
         * before then. */
        if (s->end_ns > attained_ns && (s->ctx->effects || !value_holds(&op->work.kernel.flag)))
            return false;
        return spin(op, q);
    case WORK_HOST:
        return false; /* service.c runs it and marks it submitted */
    default:
        return true;
    }
}

/* Operations in the legacy default stream and in blocking streams wait for each other's earlier
 * work. */
static bool is_in_legacy_order(const struct stream *s, const struct op *op) {
    if (!stream_blocks_with_legacy(s))
        return true;
    for (const struct stream *o = s->ctx->streams; o; o = o->next) {
        if (o == s || !(s->legacy || o->legacy) || !stream_blocks_with_legacy(o))
            continue;
        if (o->unsubmitted && o->unsubmitted->sequence < op->sequence)
            return false;
    }
    return true;
}

/* True for a kernel that writes memory when it ends; other work writes when it is submitted. */
static bool has_effect(const struct work *w) {
    return w->kind == WORK_KERNEL && w->kernel.sets;
}

static void run_effect(const struct work *w) {
    if (w->kind == WORK_COPY)
        run_copy(&w->copy);
    if (w->kind == WORK_SET)
        run_set(&w->set);
    if (w->kind == WORK_VALUE && w->value.write)
        run_value_write(&w->value);
}

/* Returns when everything that the op depends on has ended: earlier work in its stream or graph,
 * the event it waits for, and work that the legacy stream's rules put first. */
static uint64_t ready_ns(const struct stream *s, const struct op *op, uint64_t attained_ns) {
    uint64_t ns = op->run ? graph_run_ready(op->run, op->node, s->end_ns) : s->end_ns;
    ns = later(ns, attained_ns);
    if (op->work.kind == WORK_WAIT && op->mark->ctx == s->ctx)
        ns = later(ns, op->mark->end_ns);
    for (const struct stream *o = s->ctx->streams; o && stream_blocks_with_legacy(s); o = o->next)
        if ((s->legacy || o->legacy) && stream_blocks_with_legacy(o))
            ns = later(ns, o->end_ns);
    return ns;
}

/* Reserves parts of the device and returns when the kernel begins. Among the parts that are free
 * at `ns` it takes the latest to become free; if they are too few, also the first ones that become
 * free after it. Keeps free_ns in ascending order. */
static uint64_t place(struct context *ctx, unsigned parts, uint64_t ns, uint64_t duration_ns) {
    uint64_t *free_ns = ctx->free_ns;
    unsigned before = 0, at = SIM_PARTS - parts;
    while (before < SIM_PARTS && free_ns[before] <= ns)
        before++;
    unsigned from = before > parts ? before - parts : 0;
    uint64_t start_ns = later(ns, free_ns[from + parts - 1]), end_ns = start_ns + duration_ns;
    memmove(&free_ns[from], &free_ns[from + parts], (at - from) * sizeof *free_ns);
    for (; at > from && free_ns[at - 1] > end_ns; at--)
        free_ns[at - 1 + parts] = free_ns[at - 1];
    for (unsigned i = 0; i < parts; i++)
        free_ns[at + i] = end_ns;
    return start_ns;
}

static void submit(struct stream *s, struct op *op, struct sim_queue *q, uint64_t now_ns) {
    struct context *ctx = s->ctx;
    run_effect(&op->work);
    uint64_t start_ns = ready_ns(s, op, q->attained_ns);
    if (op->work.kind == WORK_KERNEL)
        start_ns = place(ctx, op->work.kernel.parts, start_ns, op->work.duration_ns);
    op->end_ns = start_ns + op->work.duration_ns;
    s->end_ns = later(s->end_ns, op->end_ns);
    if (op->run)
        graph_run_end(op->run, op->node, op->end_ns);
    if (op->end_ns > q->submitted_ns)
        q->submitted_ns = op->end_ns;
    ctx->submitted_ns = q->submitted_ns;
    op->submitted_at = now_ns;
    op->submitted = true;
    s->unsubmitted = op->next;
    if (op->work.kind == WORK_RECORD) {
        op->mark->submitted = true;
        op->mark->end_ns = op->end_ns;
    }
}

void engine_forget(struct op *op, struct context *ctx) {
    struct sim_device *d = device_of(ctx);
    sim_lock(d);
    queue_of(ctx)->spinning -= op->spinning;
    sim_unlock(d);
    ctx->effects -= has_effect(&op->work);
    if (op->work.kind == WORK_FREE)
        late_forget(op->work.free);
}

static bool pump_stream(struct stream *s, struct sim_queue *q, uint64_t now_ns) {
    bool moved = false;
    while (s->unsubmitted) {
        struct op *op = s->unsubmitted;
        if (!is_in_legacy_order(s, op) || !is_ready(s, op, q))
            break;
        submit(s, op, q, now_ns);
        moved = true;
    }
    return moved;
}

/* Removes finished ops from the stream. True if one of them wrote memory. */
static bool retire(struct stream *s, const struct sim_queue *q, uint64_t now_ns) {
    bool wrote = false;
    while (s->first && s->first->submitted && s->first->end_ns <= q->attained_ns) {
        struct op *op = s->first;
        if (op->work.kind == WORK_RECORD && !op->mark->done)
            finish_mark(op->mark, q, op->submitted_at, now_ns);
        if (has_effect(&op->work)) {
            run_value_write(&op->work.kernel.flag);
            s->ctx->effects--;
            wrote = true;
        }
        if (op->work.kind == WORK_FREE)
            late_due(op->work.free);
        mark_drop(op->mark);
        graph_run_drop(op->run);
        s->first = op->next;
        if (!s->first)
            s->last = NULL;
        s->ctx->pending--;
        free(op);
    }
    return wrote;
}

/* Updates the contexts whose events this context waits for. Only one device is locked at a time,
 * since it may be the same one. */
static void progress_others(struct context *ctx) {
    /* stops recursion when contexts wait for each other; the service thread updates them later */
    static bool inside;
    if (inside)
        return;
    inside = true;
    for (struct stream *s = ctx->streams; s; s = s->next) {
        const struct op *op = s->unsubmitted;
        if (op && op->work.kind == WORK_WAIT && op->mark->ctx != ctx && !op->mark->done)
            engine_progress(op->mark->ctx);
    }
    inside = false;
}

/* Updates a context: simulates its device up to now, then submits and retires ops until none is
 * ready. */
void engine_progress(struct context *ctx) {
    if (!ctx || !ctx->pending || !ctx->queue)
        return;
    progress_others(ctx);
    struct sim_device *d = device_of(ctx);
    struct sim_queue *q = queue_of(ctx);
    uint64_t now_ns = sim_now_ns();
    sim_lock(d);
    sim_advance(d, now_ns);
    bool closed = false;
    for (bool wrote = true; wrote;) {
        wrote = closed = false;
        for (bool moved = true; moved;) {
            moved = false;
            for (struct stream *s = ctx->streams; s; s = s->next)
                moved |= pump_stream(s, q, now_ns);
        }
        for (struct stream *s = ctx->streams; s; s = s->next) {
            wrote |= retire(s, q, now_ns);
            closed |= s->closed && !s->first;
        }
    }
    sim_unlock(d);
    late_free_due();
    if (closed)
        streams_drop_closed(ctx);
}

/* Returns the earliest end of a pending op. */
static uint64_t first_end(const struct context *ctx, bool *submitted) {
    uint64_t end_ns = UINT64_MAX;
    for (const struct stream *s = ctx->streams; s; s = s->next)
        if (s->first && s->first->submitted && s->first->end_ns < end_ns)
            end_ns = s->first->end_ns;
    *submitted = end_ns != UINT64_MAX;
    return end_ns;
}

/* Counts programmatic launches in the ledger, as no duration shows whether they overlap. A
 * launch that may overlap the preceding kernel cannot when an event was recorded between the
 * two. */
static void count_programmatic(struct context *ctx, enum work_kind before) {
    struct sim_device *d = device_of(ctx);
    sim_lock(d);
    struct sim_client *client = &d->state->client[d->client - 1];
    client->programmatic++;
    client->parted += before == WORK_RECORD;
    sim_unlock(d);
}

/* Appends work to the stream. Like a launch, it blocks while the context's queue is full. */
CUresult engine_add(struct stream *s, const struct work *work, struct mark *mark) {
    return engine_add_node(s, work, mark, NULL, 0);
}

CUresult engine_add_node(struct stream *s, const struct work *work, struct mark *mark,
                         struct graph_run *run, unsigned node) {
    struct context *ctx = s->ctx;
    while (ctx->pending >= QUEUE_DEPTH) {
        engine_progress(ctx);
        if (ctx->pending < QUEUE_DEPTH)
            break;
        bool submitted;
        uint64_t end_ns = first_end(ctx, &submitted);
        engine_nap(ctx, end_ns, submitted);
    }
    struct op *op = calloc(1, sizeof *op);
    CHECK(op, CUDA_ERROR_OUT_OF_MEMORY);
    op->work = *work;
    op->mark = mark;
    op->run = run;
    op->node = node;
    op->sequence = ++engine_sequence;
    if (mark)
        mark->refs++;
    if (s->last)
        s->last->next = op;
    else
        s->first = op;
    s->last = op;
    if (!s->unsubmitted)
        s->unsubmitted = op;
    if (work->kind == WORK_KERNEL && work->kernel.programmatic)
        count_programmatic(ctx, s->last_kind);
    s->last_kind = work->kind;
    ctx->pending++;
    ctx->effects += has_effect(work);
    engine_progress(ctx);
    if (s->unsubmitted || has_effect(work))
        service_need(); /* something must happen first: have the service thread check for it */
    return CUDA_SUCCESS;
}
