/* The known work of this context, and the part of it that its activity file publishes. */
#include <string.h>

#include "throttle_parts.h"

bool gs_throttle_started(struct gs_throttle *t, struct gs_segment *segment) {
    return segment->start_event < 0 || segment->start_ns ||
           t->env->done(t->env->arg, segment->start_event, &segment->start_ns);
}

bool gs_throttle_events_done(struct gs_throttle *t, struct gs_segment *segment) {
    const struct gs_throttle_env *env = t->env;
    while (segment->n_events) {
        uint64_t stamp;
        if (!env->done(env->arg, segment->event[segment->n_events - 1], &stamp))
            return false;
        segment->end_ns = max64(segment->end_ns, stamp);
        segment->n_events--;
    }
    return gs_throttle_started(t, segment);
}

/* Merge run `a` into run `b` if `b` follows without a gap and the context had the device for all of
 * both: one run then carries the same information. */
static bool merge_runs(const struct gs_run *a, struct gs_run *b) {
    if (a->end_ns != b->start_ns || a->run_ns != a->end_ns - a->start_ns ||
        b->run_ns != b->end_ns - b->start_ns)
        return false;
    b->start_ns = a->start_ns;
    b->run_ns += a->run_ns;
    return true;
}

/* Append a run. When the array is full, merge two adjacent runs of the older half: peers have not
 * yet charged the time of the newer ones, so these timestamps must stay. Any process of the
 * container may write to `a` concurrently, so `n` is read once. */
static void append_run(struct gs_activity *a, const struct gs_run *run) {
    uint32_t n = __atomic_load_n(&a->n, __ATOMIC_RELAXED), i = 1, half = GS_RUNS / 2;
    if (n >= GS_RUNS) {
        while (i < half && !merge_runs(&a->run[i - 1], &a->run[i]))
            i++;
        i = i < half ? i : 1; /* none can be merged: drop the oldest */
        memmove(&a->run[i - 1], &a->run[i], (GS_RUNS - i) * sizeof(a->run[0]));
        n = GS_RUNS - 1;
    }
    a->run[n] = *run;
    a->last = n;
    a->n = n + 1;
}

/* The most that is charged for work in progress if the process dies: the expected work, or ORPHAN
 * if an unknown launch is among it. */
static int64_t owed_ns(const struct gs_throttle *t) {
    int64_t ns = t->open.launches ? t->open.hint_ns : 0;
    bool unknown = t->open.probe;
    for (uint32_t i = t->charged; i != t->marked; i++) {
        unknown |= t->segment[i % GS_SEGMENTS].probe;
        ns += t->segment[i % GS_SEGMENTS].work_ns;
    }
    return unknown && ns < (int64_t)ORPHAN ? (int64_t)ORPHAN : ns;
}

void gs_throttle_publish(struct gs_throttle *t, const struct gs_run *run, uint64_t now) {
    uint32_t index = atomic_load(&t->page->index) & 1;
    struct gs_activity *a = &t->page->buffer[index ^ 1];
    bool idle = t->marked == t->finished && !t->open.launches;
    int64_t work = t->in_flight_ns + (t->open.launches ? QUANTUM + t->open.hint_ns : 0);
    *a = t->page->buffer[index];
    a->busy_from_ns = idle ? 0 : t->busy_from_ns;
    a->busy_until_ns = idle ? 0 : now + 2 * (t->contexts + 1) * (uint64_t)work + 10 * MS;
    t->told_until_ns = a->busy_until_ns;
    a->horizon_ns = idle ? now : max64(t->covered_ns, t->told_ns);
    const struct gs_segment *next =
        t->finished != t->marked ? &t->segment[t->finished % GS_SEGMENTS] : &t->open;
    a->expects_ns = next->probe ? 2 * (uint64_t)t->slice_ns
                                : (uint64_t)gs_throttle_when_hit(
                                      next, next == &t->open ? next->hint_ns : next->work_ns);
    a->owes_ns = (uint64_t)owed_ns(t);
    a->switch_ns = 0;
    for (unsigned i = 0; i < GS_SWITCHES; i++)
        if (t->cost[i].finds >= FINDS)
            a->switch_ns |= (uint64_t)t->cost[i].found_ns << 32 * i;
    a->priority = t->limit.priority;
    if (run && run->end_ns > run->start_ns)
        append_run(a, run);
    atomic_store(&t->page->index, index ^ 1);
}
