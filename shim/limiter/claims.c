/* No peer is believed to have had more of the device than the host granted to its container: that
 * is in the index of the pages, which containers only read. Who says more is not listened to; and
 * what is left to others of one's own time, by whatever they say, is bounded in the same way. */
#include "throttle_parts.h"

#define GIVEN (200 * (int64_t)MS) /* in excess, by what all others say: as long */
#define CLAIM (100 * (int64_t)MS) /* in excess: long kernels, bursts, what came late */

/* Of `ns` that have gone by, never more than there is; and more by one of `slack`, since all of
 * this is measured. */
static int64_t part(uint64_t ppm, uint64_t ns, uint64_t slack) {
    return (int64_t)((double)ns * (double)min64(ppm + ppm / slack, 1000000) / 1e6);
}

/* What it says to have had in that time. What is older than its oldest run was as what it has. */
static uint64_t said(const struct gs_activity *a, uint64_t longest, uint64_t from, uint64_t to) {
    uint32_t n = a->n < GS_RUNS ? a->n : GS_RUNS;
    uint64_t sum = 0, all = 0, since = UINT64_MAX, until = 0;
    for (uint32_t i = 0; i < n; i++) {
        const struct gs_run *run = &a->run[(a->last + GS_RUNS - i) % GS_RUNS];
        if (run->start_ns >= run->end_ns ||
            (run->end_ns - run->start_ns > longest && run->run_ns < run->end_ns - run->start_ns))
            continue;
        uint64_t first = max64(run->start_ns, from), last = min64(run->end_ns, to);
        if (first < last)
            sum += min64(run->run_ns, last - first);
        all += min64(run->run_ns, run->end_ns - run->start_ns);
        since = min64(since, run->start_ns);
        until = max64(until, run->end_ns);
    }
    if (n == GS_RUNS && since > from && since < until)
        sum +=
            (uint64_t)((double)all * (double)(min64(since, to) - from) / (double)(until - since));
    return min64(sum, to - from);
}

void gs_throttle_find_again(struct gs_throttle *t) {
    t->finds = t->found_ns = 0;
    t->switch_ns = t->told_switch_ns ? t->told_switch_ns : t->switch_ns;
}

void gs_throttle_hear(struct gs_throttle *t, const struct gs_peer *peer, unsigned n, uint64_t to) {
    uint64_t from = t->heard_ns;
    if (from >= to)
        return;
    t->heard_ns = to;
    if (!from)
        return;
    for (unsigned i = 0; i < n; i++) {
        struct gs_claim *claim = &t->claim[peer[i].container % GS_MAX_PEERS];
        uint64_t ppm = gs_throttle_may_have(&peer[i].granted);
        if (peer[i].container == t->container)
            continue;
        claim->excess_ns += (int64_t)said(peer[i].activity, whole(t), from, to);
        if (claim->at_ns < to) {
            claim->excess_ns -= part(ppm, to - max64(claim->at_ns, from - min64(from, CLAIM)), 3);
            claim->excess_ns = claim->excess_ns > 0 ? claim->excess_ns : 0;
            claim->at_ns = to;
        }
        bool lies = claim->excess_ns > (claim->lies ? 0 : CLAIM);
        if (lies && !claim->lies) { /* what was learned from it is to be learned anew */
            gs_throttle_find_again(t);
        }
        claim->lies = lies;
        claim->excess_ns = (int64_t)min64((uint64_t)claim->excess_ns, 10 * CLAIM);
    }
}

unsigned gs_throttle_credible(const struct gs_throttle *t, const struct gs_peer *peer, unsigned n,
                              struct gs_peer *out) {
    unsigned kept = 0;
    for (unsigned i = 0; i < n; i++)
        if (peer[i].container == t->container || !t->claim[peer[i].container % GS_MAX_PEERS].lies)
            out[kept++] = peer[i];
    return kept;
}

int64_t gs_throttle_granted(struct gs_throttle *t, int64_t own, int64_t busy, uint64_t now) {
    t->given_ns -= part(t->others_ppm, now - min64(now, t->given_at_ns), 8);
    t->given_ns = t->given_ns > 0 ? t->given_ns : 0;
    t->given_at_ns = now;
    t->given_ns += busy > own ? busy - own : 0;
    int64_t more = t->given_ns - GIVEN - 2 * busy;
    if (more <= 0)
        return own;
    t->given_ns -= more;
    return own + more;
}
