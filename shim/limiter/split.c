/* Divide device time between contexts. Every context publishes timestamps, moments at which it was
 * on the device. The time between two timestamps of one context was its own, unless it is longer
 * than a slice and another context waited with work that can run for a slice without a timestamp.
 * Between timestamps of two contexts there is one switch. Its cost is deducted, and the rest is
 * divided in proportion to how far apart each context's own timestamps are. So the charges of all
 * contexts add up to the time that the device was busy, however wrong one expectation is. */
#include "throttle_parts.h"

#define MAX_TIMESTAMPS 192u

struct timestamp {
    uint64_t at;
    unsigned owner; /* index of the peer, or ME */
    /* Own device time to the context's previous and next timestamp; 0: it had no work there. */
    int64_t before, after;
    bool fresh; /* the context was switched in here: it was idle or preempted before */
    bool cut;   /* it was preempted here */
};
#define ME UINT32_MAX

struct timestamps {
    struct timestamp timestamp[MAX_TIMESTAMPS];
    unsigned n;
};

static void insert(struct timestamps *s, struct timestamp new) {
    unsigned i = s->n;
    if (i == MAX_TIMESTAMPS)
        return;
    for (; i && s->timestamp[i - 1].at > new.at; i--)
        s->timestamp[i] = s->timestamp[i - 1];
    s->timestamp[i] = new;
    s->n++;
}

static int64_t own_ns(const struct gs_run *run) {
    return (int64_t)min64(run->run_ns, run->end_ns - run->start_ns);
}

/* Insert the starts and ends of runs before `end`. */
static void insert_peer(struct timestamps *s, const struct gs_activity *a, unsigned peer,
                        uint64_t start, uint64_t end) {
    uint32_t n = a->n < GS_RUNS ? a->n : GS_RUNS;
    bool open = a->busy_from_ns && a->busy_until_ns > start;
    uint64_t next_start = open ? max64(a->horizon_ns, a->busy_from_ns) : 0;
    int64_t next = open ? (int64_t)(a->expects_ns < INT64_MAX ? a->expects_ns : 0) : 0;
    if (open && a->busy_from_ns > start && a->busy_from_ns < end && a->busy_from_ns > a->horizon_ns)
        insert(s, (struct timestamp){a->busy_from_ns, peer, 0, next, .fresh = true});
    for (uint32_t i = 0; i < n; i++) {
        const struct gs_run *run = nth_newest(a, i);
        if (run->end_ns <= start || run->end_ns < run->start_ns)
            break;
        bool first = i + 1 == n || nth_newest(a, i + 1)->end_ns != run->start_ns;
        bool cut = run->run_ns == GS_CUT_OFF, follows = next_start == run->end_ns;
        if (run->end_ns < end)
            insert(s, (struct timestamp){run->end_ns, peer, own_ns(run), follows ? next : 0,
                                         .cut = cut});
        if (first && run->start_ns > start && run->start_ns < end)
            insert(s, (struct timestamp){run->start_ns, peer, 0, own_ns(run), .fresh = true});
        next_start = run->start_ns;
        next = own_ns(run);
    }
}

/* The margin keeps irregular work, which is this long only now and then, out: a predictor would
 * learn longer times from an interval that was treated as lasting. */
bool gs_throttle_lasts(const struct gs_throttle *t, int64_t length) {
    return length >= (int64_t)t->slice_ns * 5 / 4;
}

/* The state of a peer between two adjacent timestamps: without work; with work that leaves
 * timestamps; waiting with work that can run for a slice without one. */
enum peer_state { AWAY, PRESENT, LASTING };

static enum peer_state peer_state(const struct gs_throttle *t, const struct gs_activity *a,
                                  uint64_t from, uint64_t to) {
    uint32_t n = a->n < GS_RUNS ? a->n : GS_RUNS;
    if (a->busy_from_ns && max64(a->horizon_ns, a->busy_from_ns) <= from && a->busy_until_ns > to)
        return gs_throttle_lasts(t, (int64_t)a->expects_ns) ? LASTING : PRESENT;
    for (uint32_t i = 0; i < n; i++) {
        const struct gs_run *run = nth_newest(a, i);
        bool partly = run->run_ns < run->end_ns - run->start_ns;
        if (run->start_ns <= from && run->end_ns >= to)
            return partly && gs_throttle_lasts(t, own_ns(run)) ? LASTING : PRESENT;
        if (run->end_ns <= from)
            break;
    }
    return AWAY;
}

/* An estimate of how long a context ran next to one of its timestamps if it was preempted between
 * two of them: any time in between is as likely, but a context that was idle starts with a whole
 * slice. */
struct estimate {
    double ns, variance;
};

static struct estimate run_estimate(const struct gs_throttle *t, int64_t length, bool fresh) {
    double slice = t->slice_ns, most = (double)length < slice ? (double)length : slice;
    if (fresh)
        return (struct estimate){slice, slice * slice / 75};
    return (struct estimate){most / 2, most * most / 12};
}

/* Return what the switch away from the context of timestamp `a` cost. */
static double switch_cost(const struct gs_throttle *t, const struct timestamp *a) {
    return t->cost[a->after > 0 || a->cut ? GS_PREEMPTION : GS_HANDOVER].ns;
}

/* Return this context's part of the time from timestamp `a` to the next timestamp `b`. */
static double own_between(const struct gs_throttle *t, const struct gs_peer *peer, unsigned n,
                          const struct timestamp *a, const struct timestamp *b, bool lasting) {
    double gap = (double)(b->at - a->at), switch_ns = switch_cost(t, a);
    bool mine = a->owner == ME || b->owner == ME, same = a->owner == b->owner;
    unsigned present = 0;
    double unseen = 0; /* number of contexts that can run for a slice without a timestamp */
    bool unclaimed = !mine && a->after == 0 && b->fresh; /* no known context was on the device */
    if (b->at - a->at > whole(t) || unclaimed) {
        for (unsigned i = 0; i < n; i++) {
            enum peer_state s = i == a->owner || i == b->owner
                                    ? AWAY
                                    : peer_state(t, peer[i].activity, a->at, b->at);
            unseen += s == LASTING;
            present += s != AWAY;
        }
        unseen += !mine && lasting;
    }
    if (unclaimed && !present)
        return gap > switch_ns ? gap - switch_ns : 0;
    if (!mine && (!lasting || unseen == 0))
        return 0;
    if (same && unseen == 0)
        return gap;
    struct estimate first = run_estimate(t, a->after, a->fresh),
                    last = run_estimate(t, b->before, false);
    double most = gap - switch_ns, rest = most - first.ns - last.ns, own = 0;
    bool again = gs_throttle_lasts(t, a->after), before = gs_throttle_lasts(t, b->before);
    unsigned lasts = same ? again : again + before;
    /* Exactly one switch, at an unknown time. */
    if (rest < 0 || (unseen == 0 && (!lasts || rest < t->slice_ns))) {
        double both = first.variance + last.variance;
        double left = first.ns + (both > 0 ? rest * first.variance / both : rest / 2);
        left = left < most ? left : most;
        left = left > 0 ? left : 0;
        return !mine ? 0 : a->owner == ME ? left : gap - left;
    }
    /* The contexts of both timestamps ran for more slices in between if their work is long and all
     * others have had their slices. */
    double others = unseen * (t->slice_ns + t->cost[GS_PREEMPTION].ns), more = 0;
    if (lasts)
        more = (rest - (same ? others : others / 2)) / (unseen + lasts);
    more = more > 0 ? more : 0;
    if (!mine)
        return (rest - lasts * more) / unseen;
    if (a->owner == ME)
        own += first.ns + (again ? more : 0);
    if (b->owner == ME)
        own += last.ns + switch_ns + (before && !same ? more : 0);
    return own;
}

int64_t gs_throttle_split(const struct gs_throttle *t, const struct gs_peer *peer, unsigned n,
                          uint64_t start, uint64_t end, int64_t length, bool fresh) {
    struct timestamps s;
    uint64_t edge = end - min64(EDGE, end);
    double own = 0;
    s.n = 0;
    for (unsigned i = 0; i < n; i++)
        insert_peer(&s, peer[i].activity, i, start + EDGE, edge);
    struct timestamp last = {start, ME, 0, length, .fresh = fresh},
                     stop = {end, ME, length, 0, .fresh = false};
    for (unsigned i = 0; i <= s.n; i++) {
        const struct timestamp *next = i < s.n ? &s.timestamp[i] : &stop;
        own += own_between(t, peer, n, &last, next, gs_throttle_lasts(t, length));
        last = *next;
    }
    return (int64_t)own;
}
