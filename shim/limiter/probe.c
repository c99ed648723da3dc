/* Looks: events in a stream of our own, in which nothing else is. One is done as soon as the device
 * is this context's, so a late one says when our turn began, whatever the others say of theirs.
 * What lies between the last sign of us and the next turn was somebody else's, but for the rest of
 * our own turn before it. */
#include "throttle_parts.h"

#define PROMPT (45 * US) /* a look on a device that is ours is done in less */
#define SOON (200 * US)
#define SELDOM (2 * MS)
#define TIED_ALL 1024u
#define ALERT 64u /* looks, each one soon after the other */

/* Without a sign of us for longer somebody may have come and gone. */
static uint64_t blind(const struct gs_throttle *t) {
    return t->contexts > 1 ? 700 * US : 3 * MS;
}

/* How long until the next look: seldom while nobody else seems to be there. */
static uint64_t pace(const struct gs_throttle *t) {
    return t->contexts > 1 || t->alert ? SOON : SELDOM;
}

uint64_t gs_throttle_next_probe(const struct gs_throttle *t, uint64_t now) {
    if (t->capturing || t->marked == t->finished || !t->others_ppm || t->tiny ||
        t->limit.mode == GS_THROTTLE_UNLIMITED) /* it has no time for that */
        return UINT64_MAX;
    return max64(now, t->look_ns) + pace(t);
}

void gs_throttle_probe(struct gs_throttle *t, uint64_t now) {
    if (t->look_event >= 0 || gs_throttle_next_probe(t, now) == UINT64_MAX ||
        now < t->look_ns + pace(t) * 3 / 4)
        return;
    t->alert -= t->alert > 0;
    t->look_event = t->env->mark(t->env->arg, GS_LOOKS);
    t->look_ns = now;
}

/* The device was ours at `at`. */
static void sign(struct gs_throttle *t, uint64_t at) {
    if (at > t->sign_ns + blind(t))
        t->sight_ns = at;
    t->sign_ns = max64(t->sign_ns, at);
}

/* Somebody else had it, from `from` on; our turn began at `at`. */
static void interrupted(struct gs_throttle *t, struct gs_segment *segment, uint64_t from,
                        uint64_t at, uint64_t now) {
    uint64_t start = max64(t->told_ns, segment->start_ns);
    struct gs_run run = {start, from, GS_CUT_OFF};
    t->alert = ALERT;
    t->late_ns = at;
    t->tied -= t->tied / 8;
    segment->turns++;
    segment->away_ns += (int64_t)(at - from);
    t->told_ns = at;
    gs_throttle_publish(t, &run, now);
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
        sign(t, segment->start_ns);
    if (t->look_ns > t->sign_ns + blind(t))
        t->sight_ns = at;
    if (at > t->look_ns + PROMPT && t->look_ns > t->sign_ns)
        interrupted(t, segment, (t->sign_ns + t->look_ns) / 2, at, now);
    t->sign_ns = max64(t->sign_ns, at);
}

/* Late looks that are done just as work of ours is were behind that work: the driver put both into
 * one queue of the device (CUDA_DEVICE_MAX_CONNECTIONS). They tell nothing. */
static bool are_tied(struct gs_throttle *t, const struct gs_segment *segment) {
    uint64_t apart =
        segment->end_ns > t->late_ns ? segment->end_ns - t->late_ns : t->late_ns - segment->end_ns;
    if (t->late_ns && apart < EDGE)
        t->tied += (TIED_ALL - t->tied) / 4;
    return t->tied > TIED_ALL / 2;
}

void gs_throttle_sighted(struct gs_throttle *t, struct gs_segment *segment) {
    if (segment->start_event >= 0)
        sign(t, segment->start_ns);
    sign(t, segment->end_ns);
    segment->sighted = !are_tied(t, segment) && !t->tiny && t->sight_ns <= segment->start_ns;
}
