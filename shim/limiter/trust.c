/* How far the expected duration of a function is relied on. It is the mean of measured launches,
 * and a program can send different launches next, for example ones that take a thousand times as
 * long. So the work that may run unmeasured is bounded by the longest recent launch of the function
 * and by the number of measured launches. */
#include "throttle_parts.h"

#define DARING 50            /* times the expected duration: above it the mean is not relied on */
#define FORGET (4000 * MS)   /* half-life of the longest launch */
#define SEEN_MOST (1u << 20) /* launches */
#define FIRST_LAUNCHES 16    /* without a marker, of a function without repeated measurements */

/* Return the longest duration of a recent launch. */
static int64_t longest_recent(const struct gs_predictor *f, uint64_t now) {
    uint64_t halvings = now > f->longest_at_ns ? (now - f->longest_at_ns) / FORGET : 0;
    return halvings < 63 ? f->longest_ns >> halvings : 0;
}

bool gs_throttle_is_daring(const struct gs_predictor *f, int64_t ns, uint64_t now) {
    return longest_recent(f, now) > DARING * ns;
}

uint32_t gs_throttle_unmarked(const struct gs_predictor *f) {
    return f->seen / 2 + FIRST_LAUNCHES;
}

int64_t gs_throttle_most(const struct gs_predictor *f, int64_t ns, int64_t quantum, uint64_t now) {
    int64_t most = longest_recent(f, now), seen = gs_throttle_unmarked(f);
    if (most > DARING * ns)
        quantum = (int64_t)((double)quantum * (double)(DARING * ns) / (double)most);
    if (seen < quantum / ns)
        quantum = seen * ns;
    return quantum > ns ? quantum : ns;
}

void gs_throttle_seen(const struct gs_segment *segment) {
    for (uint32_t i = 0; i < segment->n_functions; i++) {
        struct gs_predictor *f = segment->function[i];
        int64_t launches = segment->single ? 1 : segment->work_ns / segment->expected_ns[i];
        f->seen = (uint32_t)min64(f->seen + (uint64_t)launches + 1, SEEN_MOST);
    }
}

void gs_throttle_timed(struct gs_predictor *f, int64_t took_ns, bool sure, uint64_t at) {
    if (!sure || took_ns <= longest_recent(f, at))
        return;
    f->longest_ns = took_ns;
    f->longest_at_ns = at;
}

/* The advance payment for a launch of an unknown function: the mean launch of the container's last
 * charged interval, so that several processes do not all start with a debt. */
int64_t gs_throttle_unknown(const struct gs_throttle *t) {
    uint64_t lately = atomic_load(&t->bucket->launch_ns);
    return lately ? (int64_t)max64(QUANTUM, min64(lately, BURST)) : WINDOW;
}

static uint32_t next_random(struct gs_throttle *t, uint64_t now) { /* xorshift32 */
    uint32_t x = (t->random ^ (uint32_t)now) | 1;
    x ^= x << 13;
    x ^= x >> 17;
    return t->random = x ^ x << 5;
}

/* Return whether launches of a capture that has ended are still unmeasured. */
static bool is_blind(const struct gs_throttle *t) {
    bool blind = false;
    for (uint32_t i = t->charged; i != t->marked && !blind; i++)
        blind = t->segment[i % GS_SEGMENTS].blind;
    return blind;
}

int64_t gs_throttle_quantum(struct gs_throttle *t, const struct gs_predictor *f, int64_t ns,
                            uint64_t now) {
    /* Recording markers in many streams takes as long as many tiny launches, and without other work
     * the device is idle meanwhile. */
    int64_t quantum = t->quantum_ns = t->tiny && t->in_turn ? LONG_QUANTUM : QUANTUM;
    /* Its markers take a thousandth of its time. Where it fills the driver's queue, later ones are
     * further apart: no interval is so long that peers have dropped runs of that time. */
    if (t->limit.mode == GS_THROTTLE_UNLIMITED)
        return ((t->contexts > 1 ? 1000 : 4000) * (int64_t)t->marker_ns * (t->markers + 1))
               << (t->marked - t->finished) / (GS_SEGMENTS / 2);
    if (atomic_load(&f->ns) != GS_UNKNOWN) {
        if (!gs_throttle_even(f)) /* more timestamps, since each one carries less information */
            quantum = QUANTUM / 2;
        quantum = is_blind(t) ? ns : gs_throttle_most(f, ns, quantum, now);
        gs_bucket_give_back(t, quantum, now);
    }
    return t->doubtful ? ns + (int64_t)(next_random(t, now) % (uint64_t)quantum) : quantum;
}

int64_t gs_throttle_when_hit(const struct gs_segment *segment, int64_t work_ns) {
    const struct gs_predictor *f = segment->n_functions ? segment->function[0] : NULL;
    return f && f->moment[0] > 0 ? (int64_t)((float)work_ns * f->moment[1] / f->moment[0])
                                 : work_ns;
}

bool gs_throttle_even(const struct gs_predictor *f) {
    return f && f->moment[1] < 1.02f * f->moment[0] * f->moment[0];
}

void gs_throttle_spread(struct gs_segment *segment, int64_t own, float weight) {
    if (segment->probe || segment->work_ns <= 0 || own <= 0)
        return;
    float ratio = (float)own / (float)segment->work_ns;
    ratio = ratio < 8 ? ratio : 8;
    for (uint32_t i = 0; i < segment->n_functions; i++) {
        struct gs_predictor *f = segment->function[i];
        f->moment[0] += weight / 20 * (ratio - f->moment[0]);
        f->moment[1] += weight / 20 * (ratio * ratio - f->moment[1]);
    }
}
