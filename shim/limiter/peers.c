/* Evaluate the activity that other contexts on the device report, as far as claims.c accepts it. */
#include "throttle_parts.h"

/* Record the last timestamp of a peer before the start; `over`: the peer had no more work then. */
static void update_last_timestamp(struct company *c, uint64_t at, uint64_t start, bool over,
                                  bool cut) {
    if (at > start + (cut ? CUT_EDGE : EDGE) || at <= c->before_ns)
        return;
    c->before_ns = at;
    c->over = over;
    c->cut = cut;
}

/* Set `wants` if the peer had work, whichever context was on the device. */
static bool evaluate_peer(const struct gs_throttle *t, const struct gs_activity *a, uint64_t start,
                          uint64_t end, struct company *c, bool *wants) {
    uint32_t n = a->n < GS_RUNS ? a->n : GS_RUNS;
    bool active = false, open = a->busy_from_ns && a->busy_until_ns > start;
    uint64_t next = open ? max64(a->horizon_ns, a->busy_from_ns) : UINT64_MAX;
    for (uint32_t i = 0; i < n; i++) {
        const struct gs_run *run = nth_newest(a, i);
        if (run->start_ns >= run->end_ns) /* invalid */
            continue;
        bool cut = run->run_ns == GS_CUT_OFF;
        if (run->start_ns + EDGE <= start) /* or it may have begun afterwards */
            update_last_timestamp(c, run->start_ns, start, false, false);
        if (run->start_ns + run->end_ns <=
            start + end) /* else it may end within EDGE of the start */
            update_last_timestamp(c, run->end_ns, start, next > run->end_ns && !cut, cut);
        *wants |= cut && run->end_ns < end && next > start;
        next = run->start_ns;
        if (run->end_ns <= start)
            break;
        if (run->start_ns >= end)
            continue;
        active = c->ran = true;
        c->inside |= (run->start_ns > start + EDGE && run->start_ns + EDGE < end) ||
                     (run->end_ns > start + EDGE && run->end_ns + EDGE < end);
    }
    uint64_t known = max64(max64(a->horizon_ns, a->busy_from_ns), start);
    if (a->busy_from_ns && known < end && a->busy_until_ns > known)
        active = c->wait = true;
    c->ran |= active && gs_throttle_lasts(t, (int64_t)a->expects_ns);
    *wants |= active;
    return active;
}

struct company gs_throttle_company(const struct gs_throttle *t, const struct gs_peer *peer,
                                   unsigned n, uint64_t start, uint64_t end) {
    struct company c = {.contexts = 0, .outranked = t->peers_hidden};
    for (unsigned i = 0; i < n; i++) {
        bool wants = false;
        uint64_t before_ns = c.before_ns;
        c.contexts += evaluate_peer(t, peer[i].activity, start, end, &c, &wants);
        c.container = c.before_ns != before_ns ? peer[i].container : c.container;
        c.outranked |= wants && peer[i].container != t->container &&
                       peer[i].granted.priority >= t->limit.priority;
    }
    return c;
}

/* Return the mean of what all contexts found that a switch costs. Their clocks differ, so that what
 * one finds too much another one finds too little. */
static uint32_t cost_of(const struct gs_throttle *t, const struct gs_peer *peer, unsigned n,
                        unsigned kind) {
    const struct gs_switch_cost *cost = &t->cost[kind];
    bool sure = cost->finds >= FINDS;
    uint64_t sum = sure ? cost->found_ns : 0, least = sum - min64(2 * EDGE, sum),
             measured_by = sure;
    uint64_t most = sure ? cost->found_ns + 2 * EDGE : MOST_SWITCH;
    for (unsigned i = 0; i < n; i++) {
        uint64_t found_ns = (uint32_t)(peer[i].activity->switch_ns >> 32 * kind);
        bool valid = found_ns && found_ns <= (sure ? UINT32_MAX : 2 * MOST_SWITCH);
        sum += valid ? max64(least, min64(found_ns, most)) : 0;
        measured_by += valid;
    }
    return measured_by ? (uint32_t)(sum / measured_by) : t->switch_ns;
}

static bool was_active(const struct gs_activity *a, uint64_t since) {
    return a->n && a->run[a->last % GS_RUNS].end_ns >= since;
}

void gs_throttle_survey(struct gs_throttle *t, const struct gs_peer *peer, unsigned n,
                        uint64_t now) {
    uint64_t others = t->env->others_ppm(t->env->arg);
    bool ours = false;
    t->contexts = 1;
    t->rivals = t->siblings = 0;
    for (unsigned i = 0; i < n; i++) {
        const struct gs_activity *a = peer[i].activity;
        bool seen = peer[i].container == t->container;
        bool works = a->busy_until_ns >= now || was_active(a, now - min64(now, LATELY));
        if (works && peer[i].granted.mode != GS_THROTTLE_HARD)
            t->free_until_ns = max64(t->free_until_ns, now + LATELY);
        t->rivals += !seen && works;
        if (a->busy_until_ns < now && (!a->n || a->run[a->last % GS_RUNS].end_ns + BURST < now))
            continue;
        t->contexts++;
        ours |= seen;
        t->siblings += seen;
    }
    t->others_ppm = (uint32_t)min64(others + (ours ? t->limit.ppm : 0), 1000000);
    for (unsigned i = 0; i < GS_SWITCHES; i++)
        t->cost[i].ns = cost_of(t, peer, n, i);
    t->rate_ppm = t->limit.ppm ? t->limit.ppm : 1;
}
