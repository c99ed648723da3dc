/* Detect completed intervals, and charge them. */
#include "throttle_parts.h"

void gs_throttle_inherit(struct gs_throttle *t, const struct gs_activity *a, uint64_t now) {
    uint64_t from = max64(a->busy_from_ns, a->horizon_ns);
    if (!a->busy_from_ns || from >= now || t->limit.mode == GS_THROTTLE_UNLIMITED)
        return;
    uint64_t owed = min64(min64(now - from, a->owes_ns), DEBT);
    atomic_fetch_add(&t->bucket->busy_ns, owed);
    /* The next launch of an unknown function pays more in advance. */
    if (owed > atomic_load(&t->bucket->launch_ns))
        atomic_store(&t->bucket->launch_ns, owed);
    gs_bucket_adjust(t, (int64_t)owed, now);
}

/* ---- completed intervals --------------------------------------------------------------- */

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
    if (news && t->finished == t->marked && !t->open.launches)
        gs_turn_rests(t, now);
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
