/* Probe events: timing events in a stream of the shim that has no other work. Such an event
 * completes as soon as this context is on the device, so a late completion shows when this
 * context was switched in, whatever peers report. The time from the last known activity of this
 * context to that moment belonged to another context, except for the rest of this context's slice
 * before it. */
#include "throttle_parts.h"

#define PROMPT (45 * US) /* a probe event on a device that runs this context completes in less */
#define SOON (200 * US)
#define SELDOM (2 * MS)
#define TIED_ALL 1024u

/* Return whether another context may run meanwhile: not during the own turn, unless work is late.
 */
static bool is_shared(const struct gs_throttle *t, uint64_t now) {
    bool alone = t->in_turn && now <= t->turn_work_until_ns;
    return t->contexts > (alone ? 1 + t->siblings : 1);
}

/* Return the time to the next probe event: long while no other context seems to be active. */
static uint64_t probe_interval(const struct gs_throttle *t, uint64_t now) {
    return is_shared(t, now) ? SOON : SELDOM;
}

/* After a longer time without a known activity, another context may have run and stopped. */
static uint64_t max_gap(const struct gs_throttle *t, uint64_t now) {
    return is_shared(t, now) ? 700 * US : 3 * MS;
}

uint64_t gs_throttle_next_probe(const struct gs_throttle *t, uint64_t now) {
    if (t->capturing || t->marked == t->finished || !t->others_ppm || t->tiny ||
        t->limit.mode == GS_THROTTLE_UNLIMITED) /* probe events would slow it down */
        return UINT64_MAX;
    return max64(now, t->look_ns) + probe_interval(t, now);
}

void gs_throttle_probe(struct gs_throttle *t, uint64_t now) {
    if (t->look_event >= 0 || gs_throttle_next_probe(t, now) == UINT64_MAX ||
        now < t->look_ns + probe_interval(t, now) * 3 / 4)
        return;
    t->look_event = t->env->mark(t->env->arg, GS_LOOKS);
    t->look_ns = now;
}

/* This context was on the device at `at`. */
static void note_own_activity(struct gs_throttle *t, uint64_t at) {
    if (at > t->sign_ns + max_gap(t, at))
        t->sight_ns = at;
    t->sign_ns = max64(t->sign_ns, at);
}

/* Another context had the device from `from`; this context was switched in at `at`. */
static void note_preemption(struct gs_throttle *t, struct gs_segment *segment, uint64_t from,
                            uint64_t at, uint64_t now) {
    uint64_t start = max64(t->told_ns, segment->start_ns);
    struct gs_run run = {start, from, GS_CUT_OFF};
    /* A prompt probe event in the same interval was not queued behind its work. */
    t->late_ns = t->prompt_ns > max64(segment->start_ns, t->covered_ns) + EDGE ? 0 : at;
    t->tied -= t->tied / 8;
    segment->preemptions++;
    segment->away_ns += (int64_t)(at - from);
    t->told_ns = at;
    gs_throttle_publish(t, &run, now);
}

/* Return the middle of the time in which a preemption began. Without it, an interval of several
 * even launches would have completed. A context that was idle starts with a whole slice. */
static uint64_t preempted_at(const struct gs_throttle *t, const struct gs_segment *segment) {
    uint64_t end =
        max64(segment->start_ns, t->covered_ns) + (uint64_t)(segment->work_ns + segment->away_ns);
    bool even = segment->work_ns <= QUANTUM && gs_throttle_even(segment->function[0]);
    uint64_t latest = even ? min64(max64(end, t->sign_ns), t->look_ns) : t->look_ns;
    uint64_t slice = segment->start_event >= 0 ? segment->start_ns + whole(t) : 0;
    return (max64(t->sign_ns, min64(slice, latest)) + latest) / 2;
}

void gs_throttle_probed(struct gs_throttle *t, uint64_t now) {
    uint64_t at;
    if (t->look_event < 0 || t->capturing || !t->env->done(t->env->arg, t->look_event, &at))
        return;
    t->look_event = -1;
    struct gs_segment *segment = &t->segment[t->finished % GS_SEGMENTS];
    if (t->finished == t->marked || !gs_throttle_started(t, segment) || segment->start_ns > at)
        return;
    if (segment->start_event >= 0)
        note_own_activity(t, segment->start_ns);
    if (t->look_ns > t->sign_ns + max_gap(t, t->look_ns))
        t->sight_ns = at;
    if (at <= t->look_ns + PROMPT)
        t->prompt_ns = at;
    else if (t->look_ns > t->sign_ns)
        note_preemption(t, segment, preempted_at(t, segment), at, now);
    t->sign_ns = max64(t->sign_ns, at);
}

/* Late probe events that complete together with other work of this context were queued behind it:
 * the driver mapped both streams to one device queue (CUDA_DEVICE_MAX_CONNECTIONS). Such events
 * carry no information. */
void gs_throttle_sighted(struct gs_throttle *t, struct gs_segment *segment) {
    if (segment->start_event >= 0)
        note_own_activity(t, segment->start_ns);
    note_own_activity(t, segment->end_ns);
    if (t->late_ns && segment->end_ns < t->late_ns + EDGE && t->late_ns < segment->end_ns + EDGE)
        t->tied += (TIED_ALL - t->tied) / 4;
    segment->sighted = t->tied <= TIED_ALL / 2 && !t->tiny && t->sight_ns <= segment->start_ns;
}
