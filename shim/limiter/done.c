/* Detect completed intervals, and publish this context's activity to its peers. */
#include <string.h>

#include "throttle_parts.h"

/* ---- the activity file ----------------------------------------------------------------- */

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

void gs_throttle_inherit(struct gs_throttle *t, const struct gs_activity *a, uint64_t now) {
    uint64_t from = max64(a->busy_from_ns, a->horizon_ns);
    if (!a->busy_from_ns || from >= now || t->limit.mode == GS_THROTTLE_UNLIMITED)
        return;
    uint64_t owed = min64(min64(now - from, a->owes_ns), DEBT);
    atomic_fetch_add(&t->bucket->busy_ns, owed);
    /* The next launch of an unknown function pays more in advance. */
    if (owed > atomic_load(&t->bucket->launch_ns))
        atomic_store(&t->bucket->launch_ns, owed);
    gs_throttle_adjust(t, (int64_t)owed, now);
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

/* ---- completed intervals --------------------------------------------------------------- */

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

/* The device has no work until the driver has the launch, which takes long if the driver loads code
 * first or the thread is interrupted. Start events on an idle device tell how timestamps differ
 * from the host's clock. */
static uint64_t begins_with_launch(struct gs_throttle *t, const struct gs_segment *segment) {
    int64_t lag = (int64_t)(segment->start_ns - segment->launch_ns);
    if (!segment->entered_ns)
        return segment->start_ns;
    if (segment->start_event >= 0 && (!t->lag_known || lag < t->lag_ns + (int64_t)EDGE)) {
        t->lag_ns = t->lag_known ? t->lag_ns + (lag - t->lag_ns) / 8 : lag;
        t->lag_known = true;
        return segment->start_ns + segment->entered_ns - segment->launch_ns;
    }
    /* There was other work first, or a wait. */
    return t->lag_known ? max64(segment->start_ns, segment->entered_ns + (uint64_t)t->lag_ns)
                        : segment->start_ns;
}

static void finish_interval(struct gs_throttle *t, struct gs_segment *segment, uint64_t now) {
    gs_throttle_waited(t, segment);
    segment->before_ns = t->covered_ns;
    segment->clean |= segment->start_event < 0 && t->covered_ns >= segment->marked_ns + EDGE;
    segment->start_ns =
        max64(min64(begins_with_launch(t, segment), segment->end_ns), t->covered_ns);
    segment->end_ns = max64(segment->start_ns, segment->end_ns);
    t->covered_ns = segment->end_ns;
    t->in_flight_ns -= segment->work_ns;
    atomic_store(&t->bucket->done_ns, now);
    gs_throttle_sighted(t, segment);
    /* The run after a preemption is never empty: its start tells when that ended. */
    uint64_t start = min64(max64(segment->start_ns, t->told_ns),
                           segment->end_ns - (segment->preemptions > 0)),
             took = segment->end_ns - start;
    struct gs_run run = {start, segment->end_ns, took};
    if (!segment->sighted || !segment->preemptions)
        run.run_ns = min64(took, gs_throttle_first_guess(t, segment));
    t->told_ns = segment->end_ns;
    SHOW(t->finished, t->finished + 1);
    gs_throttle_publish(t, &run, now);
}

void gs_throttle_poll(struct gs_throttle *t, uint64_t now) {
    struct gs_peer peer[MAX_PEERS];
    unsigned n = 0;
    bool news = false;
    gs_throttle_probed(t, now);
    while (t->finished != t->marked &&
           gs_throttle_events_done(t, &t->segment[t->finished % GS_SEGMENTS])) {
        if (!news) {
            n = t->env->peers(t->env->arg, peer, MAX_PEERS);
            gs_throttle_survey(t, peer, n, now);
        }
        news = true;
        gs_throttle_probed(t, now);
        finish_interval(t, &t->segment[t->finished % GS_SEGMENTS], now);
    }
    struct gs_segment *next = &t->segment[t->finished % GS_SEGMENTS];
    bool busy = t->marked != t->finished,
         begun = busy && gs_throttle_started(t, next) && next->start_ns > t->busy_from_ns;
    if (begun) /* use the start on the device, not the time when it was queued */
        t->busy_from_ns = next->start_ns;
    if (begun || (busy && t->told_until_ns < now + EXTEND))
        gs_throttle_publish(t, NULL, now);
    if (t->charged == t->finished)
        return;
    if (!news)
        n = t->env->peers(t->env->arg, peer, MAX_PEERS);
    while (t->charged != t->finished &&
           gs_throttle_charge(t, &t->segment[t->charged % GS_SEGMENTS], peer, n, now))
        t->charged++;
    if (news && t->finished == t->marked)
        gs_throttle_publish(t, NULL, now);
}
