#include "gpu.h"

#include <math.h>

double uniform(struct rng *rng) { /* splitmix64 */
    uint64_t z = (rng->state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (double)((z ^ (z >> 31)) >> 11) / 9007199254740992.0;
}

double normal(struct rng *rng) {
    double u = 1 - uniform(rng);
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * uniform(rng));
}

static void stamp(const struct gpu *gpu, struct context *c, int event) {
    uint64_t at = (uint64_t)((int64_t)gpu->now_ns + c->skew_ns);
    c->stamp[event] = at / 500 * 500;
}

void gpu_push(struct gpu *gpu, int index, uint32_t id, double ns, int event) {
    struct context *c = gpu->context[index];
    struct stream *s = &c->stream[id];
    s->ring[s->tail++ % RING] = (struct item){event == WAITER ? 1e18 : ns, event};
    gpu->signals->waiters[c->group] += event == WAITER;
    c->items++;
    c->left_ns += event == WAITER ? 0 : ns;
    c->kernels += event < 0;
}

bool gpu_empty(const struct gpu *gpu, int index, uint32_t id) {
    const struct stream *s = &gpu->context[index]->stream[id];
    return s->head == s->tail;
}

void gpu_kill(struct gpu *gpu, int index) {
    struct context *c = gpu->context[index];
    for (int i = 0; i <= STREAMS; i++)
        c->stream[i].head = c->stream[i].tail;
    c->items = c->kernels = 0;
    c->dead = true;
    if (gpu->current == index)
        gpu->current = -1;
}

/* Adds `ns` of device time to the tenant. */
static void hold(struct gpu *gpu, int tenant, uint64_t from, uint64_t to) {
    gpu->held_ns[tenant] += to - from;
    while (from < to) {
        uint64_t bin = from / BIN, end = (bin + 1) * BIN < to ? (bin + 1) * BIN : to;
        if (bin < gpu->bins)
            gpu->bin[tenant][bin] += end - from;
        from = end;
    }
}

static bool pick(struct gpu *gpu) {
    for (int i = 1; i <= gpu->n; i++) {
        int k = (gpu->last + i) % gpu->n;
        if (!gpu->context[k]->items)
            continue;
        double noise = 1 + gpu->slice_noise * (2 * uniform(&gpu->rng) - 1);
        gpu->current = k;
        gpu->switch_end_ns = gpu->now_ns;
        if (k != gpu->last) {
            bool preempted = gpu->last >= 0 && gpu->context[gpu->last]->items;
            double mean_ns = preempted ? gpu->preempt_ns : gpu->handover_ns;
            gpu->switch_end_ns += (uint64_t)(mean_ns * (0.4 + 1.2 * uniform(&gpu->rng)));
            gpu->switches++;
        }
        gpu->last = k;
        gpu->slice_end_ns = gpu->switch_end_ns + (uint64_t)((double)gpu->slice_ns * noise);
        return true;
    }
    return false;
}

static bool others(const struct gpu *gpu) {
    for (int i = 0; i < gpu->n; i++)
        if (i != gpu->current && gpu->context[i]->items)
            return true;
    return false;
}

/* Removes the finished item at the head of stream `s`. */
static void pop(struct gpu *gpu, struct context *c, struct stream *s) {
    struct item *item = &s->ring[s->head++ % RING];
    c->items--;
    if (item->event >= 0) {
        stamp(gpu, c, item->event);
    } else {
        c->kernels--;
        gpu->signals->released[c->group] += item->event == RELEASER;
        gpu->done[c->tenant]++;
        if (c->waits_room) {
            c->waits_room = false;
            gpu->woken = gpu->current;
        }
    }
    if (s->head == s->tail && c->waits_stream == (int)(s - c->stream)) {
        c->waits_stream = -1;
        gpu->woken = gpu->current;
    }
}

/* Runs the current context for at most `limit` ns. */
static void run(struct gpu *gpu, uint64_t limit_ns) {
    struct context *c = gpu->context[gpu->current];
    double least = 1e30, rate;
    int active = 0;
    bool kernel = false;
    for (int i = 0; i <= STREAMS; i++) {
        struct stream *s = &c->stream[i];
        if (s->head == s->tail)
            continue;
        struct item *item = &s->ring[s->head % RING];
        if (item->event == WAITER && gpu->signals->released[c->group]) {
            gpu->signals->released[c->group]--;
            gpu->signals->waiters[c->group]--;
            item->left_ns = 1;
        }
        active++;
        kernel |= item->event < 0;
        least = item->left_ns < least ? item->left_ns : least;
    }
    rate = active > c->width ? c->width / active : 1;
    uint64_t step = least < 1e15 ? (uint64_t)ceil(least / rate) : limit_ns;
    step = step < limit_ns ? step : limit_ns;
    hold(gpu, c->tenant, gpu->now_ns, gpu->now_ns + step);
    gpu->now_ns += step;
    gpu->work_ns[c->tenant] += kernel ? step : 0;
    for (int i = 0; i <= STREAMS; i++) {
        struct stream *s = &c->stream[i];
        if (s->head == s->tail)
            continue;
        struct item *item = &s->ring[s->head % RING];
        c->left_ns -= item->left_ns < 1e15 ? (double)step * rate : 0;
        item->left_ns -= (double)step * rate;
        if (item->left_ns <= 1e-6)
            pop(gpu, c, s);
    }
    if (!c->items) {
        c->left_ns = 0; /* steps are in whole nanoseconds */
        gpu->current = -1;
    }
}

void gpu_advance(struct gpu *gpu, uint64_t until) {
    gpu->woken = -1;
    while (gpu->now_ns < until && gpu->woken < 0) {
        if (gpu->current < 0 && !pick(gpu)) {
            gpu->now_ns = until;
            return;
        }
        if (gpu->now_ns < gpu->switch_end_ns) {
            uint64_t to = gpu->switch_end_ns < until ? gpu->switch_end_ns : until;
            int tenant = gpu->context[gpu->current]->tenant;
            hold(gpu, tenant, gpu->now_ns, to);
            gpu->switch_ns[tenant] += to - gpu->now_ns;
            gpu->now_ns = to;
        } else if (gpu->now_ns >= gpu->slice_end_ns && others(gpu)) {
            gpu->current = -1;
        } else {
            uint64_t limit = until - gpu->now_ns;
            if (gpu->now_ns < gpu->slice_end_ns && limit > gpu->slice_end_ns - gpu->now_ns)
                limit = gpu->slice_end_ns - gpu->now_ns;
            if (gpu->now_ns >= gpu->slice_end_ns)
                limit = limit < gpu->slice_ns ? limit : gpu->slice_ns;
            run(gpu, limit);
        }
    }
}
