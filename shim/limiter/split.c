/* Whose was a stretch of device time: everybody publishes stamps, moments at which his context was
 * on the device. Between two stamps of one context the time was its own, unless that took longer
 * than a slice and somebody else waited with work that leaves no stamps for so long. Between stamps
 * of two contexts lies one switch: what is left without its cost is divided by how far apart their
 * own stamps lie. So what all are charged together is what the device was busy, however wrong one
 * expectation is. */
#include "throttle_parts.h"

#define MAX_STAMPS 192u

struct stamp {
    uint64_t at;
    unsigned owner;        /* peer, or ME */
    int64_t before, after; /* own time to its last and to its next stamp; 0: no work there */
    bool fresh;            /* it had been idle, so its slice began here */
    uint64_t until_ns;     /* it reports that it had the device until then; 0: it does not */
};
#define ME UINT32_MAX
#define CUT UINT64_MAX /* as until_ns: it was preempted here, or later within a kernel */

struct stamps {
    struct stamp stamp[MAX_STAMPS];
    unsigned n;
};

static void add(struct stamps *s, uint64_t at, unsigned owner, int64_t before, int64_t after,
                bool fresh, uint64_t until_ns) {
    unsigned i = s->n;
    if (i == MAX_STAMPS)
        return;
    for (; i && s->stamp[i - 1].at > at; i--)
        s->stamp[i] = s->stamp[i - 1];
    s->stamp[i] = (struct stamp){at, owner, before, after, fresh, until_ns};
    s->n++;
}

static const struct gs_run *newest(const struct gs_activity *a, uint32_t i) {
    return &a->run[(a->last + GS_RUNS - i) % GS_RUNS];
}

static int64_t own_of(const struct gs_run *run) {
    return (int64_t)min64(run->run_ns, run->end_ns - run->start_ns);
}

static bool solid(const struct gs_run *run) {
    return run->run_ns >= run->end_ns - run->start_ns;
}

static void add_peer(struct stamps *s, const struct gs_activity *a, unsigned peer, uint64_t start,
                     uint64_t end) {
    uint32_t n = a->n < GS_RUNS ? a->n : GS_RUNS;
    bool open = a->busy_from_ns && a->busy_until_ns > start;
    uint64_t next_start = open ? max64(a->horizon_ns, a->busy_from_ns) : 0;
    int64_t next = open ? (int64_t)(a->expects_ns < INT64_MAX ? a->expects_ns : 0) : 0;
    uint64_t until_ns = 0;
    if (open && a->busy_from_ns > start && a->busy_from_ns < end && a->busy_from_ns > a->horizon_ns)
        add(s, a->busy_from_ns, peer, 0, next, true, 0);
    for (uint32_t i = 0; i < n; i++) {
        const struct gs_run *run = newest(a, i);
        if (run->end_ns <= start || run->end_ns < run->start_ns)
            break;
        bool first = i + 1 == n || newest(a, i + 1)->end_ns != run->start_ns;
        if (run->end_ns < end)
            add(s, run->end_ns, peer, own_of(run), next_start == run->end_ns ? next : 0, false,
                run->run_ns >= GS_CUT_OFF_SOMEWHERE ? CUT : next_start == run->end_ns ? until_ns : 0);
        until_ns = run->run_ns >= GS_CUT_OFF_SOMEWHERE ? 0 : solid(run) ? run->end_ns : 0;
        if (first && run->start_ns > start && run->start_ns < end)
            add(s, run->start_ns, peer, 0, own_of(run), true, until_ns);
        next_start = run->start_ns;
        next = own_of(run);
    }
}

/* Irregular work may do so now and then, but is not taken for it: whoever thinks so learns longer
 * times from it. */
bool gs_throttle_lasts(const struct gs_throttle *t, int64_t length) {
    return length >= (int64_t)t->slice_ns * 5 / 4;
}

/* How a peer stands to the time between two stamps that lie next to each other. */
enum stance { AWAY, WAITING, LASTING, HOLDING };

static enum stance stance(const struct gs_throttle *t, const struct gs_activity *a, uint64_t from,
                          uint64_t to) {
    uint32_t n = a->n < GS_RUNS ? a->n : GS_RUNS;
    if (a->busy_from_ns && max64(a->horizon_ns, a->busy_from_ns) <= from && a->busy_until_ns > to)
        return gs_throttle_lasts(t, (int64_t)a->expects_ns) ? LASTING : WAITING;
    for (uint32_t i = 0; i < n; i++) {
        const struct gs_run *run = newest(a, i);
        if (run->start_ns <= from && run->end_ns >= to)
            return solid(run) ? HOLDING : gs_throttle_lasts(t, own_of(run)) ? LASTING : WAITING;
        if (run->end_ns <= from)
            break;
    }
    return AWAY;
}

/* How long a context that was interrupted between two of its stamps ran on one side: somewhere in
 * between, but who has just begun has a whole slice. */
struct side {
    double ns, variance;
};

static struct side side(const struct gs_throttle *t, int64_t length, bool fresh) {
    double slice = t->slice_ns, most = (double)length < slice ? (double)length : slice;
    if (fresh)
        return (struct side){slice, slice * slice / 75};
    return (struct side){most / 2, most * most / 12};
}

/* A turn of another context, as far as it is seen. It should be a slice. */
struct turn {
    unsigned owner;      /* ME: none */
    bool mine;           /* it began when mine ended */
    uint64_t from;       /* its first stamp */
    double ns, variance; /* before that */
};

/* What the switch from the context of stamp `a` cost. */
static double cost_of(const struct gs_throttle *t, const struct stamp *a) {
    return t->cost[a->after > 0 ? GS_PREEMPTION : GS_HANDOVER].ns;
}

/* When the context of stamp `a` gave the device to that of `b`: so long after `a`. */
static struct side change(const struct gs_throttle *t, const struct stamp *a,
                          const struct stamp *b) {
    double gap = (double)(b->at - a->at), most = gap - cost_of(t, a);
    struct side first = side(t, a->after, a->fresh), last = side(t, b->before, false);
    double both = first.variance + last.variance, rest = most - first.ns - last.ns;
    double left = first.ns + (both > 0 ? rest * first.variance / both : rest / 2);
    left = left < most ? left : most;
    return (struct side){left > 0 ? left : 0, both > 0 ? first.variance * last.variance / both : 0};
}

/* The turn that is over with `end` after stamp `a` seems to be so much longer than a slice, for
 * each of variance: what of it is an error of its ends is in proportion to theirs. */
static double excess(const struct gs_throttle *t, const struct turn *turn, const struct stamp *a,
                     const struct stamp *b, struct side end) {
    struct side slice = side(t, 0, true);
    double both = end.variance + turn->variance;
    double more = turn->ns + (double)(a->at - turn->from) + end.ns - slice.ns;
    if (turn->owner != a->owner || a->fresh || a->after <= 0 ||
        a->after + b->before >= 4 * (int64_t)t->slice_ns)
        return 0;
    double less = -more - slice.ns / 5; /* than by its noise and one deviation and a half: its work
                                         * was over */
    return less < 0 || less * less < 2.25 * both ? more / (both + slice.variance) : 0;
}

/* My part of the time from stamp `a` to the next stamp `b`. */
static double part(const struct gs_throttle *t, const struct gs_peer *peer, unsigned n,
                   const struct stamp *a, const struct stamp *b, bool lasting, struct turn *turn) {
    double gap = (double)(b->at - a->at), switch_ns = cost_of(t, a);
    bool mine = a->owner == ME || b->owner == ME, same = a->owner == b->owner;
    struct turn seen = *turn;
    unsigned present = 0;
    double turns = 0; /* of contexts that can hold a slice without a stamp */
    if (!same)
        turn->owner = ME;
    bool whole_kernels = t->lasting >= SURELY_WHOLE;
    bool worked = a->after > 0 || a->until_ns == CUT;
    if (same && a->owner != ME && a->until_ns != CUT && a->until_ns + EDGE >= b->at)
        return 0;
    if (!same && (whole_kernels ? worked && (b->fresh || b->before >= QUANTUM)
                                : a->until_ns != CUT && a->until_ns + EDGE >= b->at)) {
        double cost = gap < t->cost[GS_PREEMPTION].ns ? gap : t->cost[GS_PREEMPTION].ns;
        return a->owner == ME ? gap - cost : b->owner == ME ? cost : 0;
    }
    bool free = !mine && a->after == 0 && b->fresh; /* nobody else is known to have it */
    if (b->at - a->at > whole(t) || free) {
        for (unsigned i = 0; i < n; i++) {
            enum stance s =
                i == a->owner || i == b->owner ? AWAY : stance(t, peer[i].activity, a->at, b->at);
            if (s == HOLDING && !mine)
                return 0;
            turns += s == LASTING;
            present += s != AWAY;
        }
        turns += !mine && lasting;
    }
    double alone = (double)a->after + (double)whole(t);
    double most = (double)t->slice_ns * 5 / 4 + switch_ns;
    /* They need not last: the time is too long for one alone. */
    bool cut = same && turns == 0 && gap > (alone < most ? alone : most);
    if (cut)
        turns = present + !mine;
    if (free)
        *turn = (struct turn){b->owner, false, b->at, 0, 0};
    if (free && !present)
        return gap > switch_ns ? gap - switch_ns : 0;
    if (!mine && ((!lasting && !cut) || turns == 0)) {
        if (same || a->owner == ME)
            return 0;
        struct side end = change(t, a, b);
        *turn = (struct turn){b->owner, false, b->at, gap - switch_ns - end.ns, end.variance};
        return seen.mine ? seen.variance * excess(t, &seen, a, b, end) : 0;
    }
    if (same && turns == 0)
        return gap;
    struct side first = side(t, a->after, a->fresh), last = side(t, b->before, false);
    double rest = gap - switch_ns - first.ns - last.ns, own = 0;
    bool again = gs_throttle_lasts(t, a->after), before = gs_throttle_lasts(t, b->before);
    unsigned lasts = same ? again : again + before;
    if (rest < 0 || (turns == 0 && (!lasts || rest < t->slice_ns))) { /* one switch, somewhere */
        if (!mine)
            return 0;
        struct side end = change(t, a, b);
        if (a->owner == ME) {
            *turn = (struct turn){b->owner, true, b->at, gap - switch_ns - end.ns, end.variance};
            return end.ns;
        }
        return gap - end.ns +
               (end.variance + (seen.mine ? seen.variance : 0)) * excess(t, &seen, a, b, end);
    }
    /* Those at the ends have more turns in between, if their work is long and all others have had
     * theirs. */
    double others = turns * (t->slice_ns + t->cost[GS_PREEMPTION].ns), more = 0;
    turn->owner = ME;
    if (lasts)
        more = (rest - (same ? others : others / 2)) / (turns + lasts);
    more = more > 0 ? more : 0;
    if (!mine && cut)
        *turn = (struct turn){b->owner, false, b->at, last.ns, last.variance};
    if (!mine)
        return (rest - lasts * more) / turns;
    if (a->owner == ME)
        own += first.ns + (again ? more : 0);
    if (b->owner == ME)
        own += last.ns + switch_ns + (before && !same ? more : 0);
    return own;
}

int64_t gs_throttle_split(const struct gs_throttle *t, const struct gs_peer *peer, unsigned n,
                          uint64_t start, uint64_t end, int64_t length, bool fresh) {
    struct stamps s;
    double own = 0;
    struct turn turn = {.owner = ME};
    s.n = 0;
    for (unsigned i = 0; i < n; i++)
        add_peer(&s, peer[i].activity, i, start + EDGE, end - min64(EDGE, end));
    struct stamp last = {start, ME, 0, length, fresh, 0},
                 stop = {end, ME, length, 0, false, 0};
    for (unsigned i = 0; i <= s.n; i++) {
        const struct stamp *next = i < s.n ? &s.stamp[i] : &stop;
        own += part(t, peer, n, &last, next, gs_throttle_lasts(t, length), &turn);
        last = *next;
    }
    return (int64_t)own;
}
