/* Check what peers report against what the host granted. The grants are in the index of the
 * activity files, which containers can only read. Reports of a container that claims more than its
 * grant are ignored. */
#include <string.h>

#include "throttle_parts.h"

#define SCATTER (1 << 20)
#define CLAIM (100 * (int64_t)MS) /* tolerated excess of one: long kernels, bursts, delays */

/* Return the device time that a grant of `ppm` gives in `ns`, plus a third for measurement errors,
 * but never more than `ns`. */
static int64_t granted_ns(uint64_t ppm, uint64_t ns) {
    return (int64_t)((double)ns * (double)min64(ppm + ppm / 3, 1000000) / 1e6);
}

/* Return the device time that a peer reports between `from` and `to`. For the time before its
 * oldest run, extrapolate from the runs that it still lists. */
static uint64_t reported_ns(const struct gs_activity *a, uint64_t longest, uint64_t from,
                            uint64_t to) {
    uint32_t n = a->n < GS_RUNS ? a->n : GS_RUNS;
    uint64_t sum = 0, all = 0, since = UINT64_MAX, until = 0;
    for (uint32_t i = 0; i < n; i++) {
        const struct gs_run *run = nth_newest(a, i);
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

static void judge(struct gs_throttle *t, struct gs_claim *claim) {
    bool over_granted = claim->excess_ns > (claim->ignored ? 0 : CLAIM);
    if (over_granted && !claim->ignored) /* they were learned with the help of these reports */
        memset(t->cost, 0, sizeof(t->cost));
    claim->ignored = over_granted;
}

void gs_throttle_scatter(struct gs_throttle *t, uint32_t container, int64_t took_ns) {
    struct gs_claim *claim = &t->claim[container % GS_MAX_PEERS];
    claim->early += ((took_ns < 0 ? SCATTER : 0) - claim->early) / 64;
    claim->late += ((took_ns > 3 * (int64_t)EDGE ? SCATTER : 0) - claim->late) / 64;
    if (claim->early < SCATTER / 32 || claim->late < SCATTER / 32)
        return;
    claim->early = claim->late = 0;
    claim->excess_ns = 10 * CLAIM;
    judge(t, claim);
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
        claim->excess_ns += (int64_t)reported_ns(peer[i].activity, whole(t), from, to);
        if (claim->at_ns < to) {
            claim->excess_ns -=
                granted_ns(ppm, to - max64(claim->at_ns, from - min64(from, CLAIM)));
            claim->excess_ns = claim->excess_ns > 0 ? claim->excess_ns : 0;
            claim->at_ns = to;
        }
        judge(t, claim);
        claim->excess_ns = (int64_t)min64((uint64_t)claim->excess_ns, 10 * CLAIM);
    }
}

unsigned gs_throttle_credible(const struct gs_throttle *t, const struct gs_peer *peer, unsigned n,
                              struct gs_peer *out) {
    unsigned kept = 0;
    for (unsigned i = 0; i < n; i++)
        if (peer[i].container == t->container ||
            !t->claim[peer[i].container % GS_MAX_PEERS].ignored)
            out[kept++] = peer[i];
    return kept;
}
