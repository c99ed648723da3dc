/* What a segment is charged: how much of its time was its own. */
#include "throttle_parts.h"

/* With the time that the device needs for the markers themselves. */
static int64_t expected(const struct gs_throttle *t, const struct gs_segment *segment) {
    return segment->work_ns + segment->n_marked * (int64_t)t->marker_ns;
}

/* A segment may have been idle inside, or its kernels spun: for some launches, look at each. When
 * they were as expected, such doubts are ignored for a while. */
static void doubt(struct gs_throttle *t, int64_t unknown_ns) {
    if (t->sparse)
        return;
    t->ignore_ns -= unknown_ns;
    if (t->ignore_ns > 0)
        return;
    t->sparse = SPARSE;
    t->looked_ns[0] = t->looked_ns[1] = 0;
}

static void looked(struct gs_throttle *t, const struct gs_segment *segment, int64_t own) {
    if (!t->sparse || !segment->single)
        return;
    t->looked_ns[0] += own;
    t->looked_ns[1] += expected(t, segment);
    if (--t->sparse)
        return;
    if (t->looked_ns[0] > t->looked_ns[1] * 3 / 2) {
        t->backoff_ns = 0;
        doubt(t, t->ignore_ns);
    } else {
        t->backoff_ns = t->backoff_ns ? 2 * t->backoff_ns : (int64_t)MS;
        t->backoff_ns = t->backoff_ns < DOUBTFUL ? t->backoff_ns : DOUBTFUL;
        t->ignore_ns = t->backoff_ns;
    }
}

/* Launches came faster than one of them takes alone, so that the device had always one: they take
 * less than that since several run at once. */
static bool gapless(const struct gs_segment *segment, int64_t took) {
    if (segment->blind) /* launches waited within it */
        return false;
    double alone = 0; /* of what it is expected to take with others beside it */
    for (uint32_t i = 0; i < segment->n_functions; i++)
        alone += (double)segment->function[i]->single_ns / (double)segment->expected_ns[i];
    alone *= (double)segment->work_ns / (segment->n_functions ? segment->n_functions : 1);
    return took < alone && (double)(segment->marked_ns - segment->opened_ns) < alone;
}

/* What of a segment's time was surely busy. Until its marker was recorded the device may have been
 * idle in between; if that is more than a little, only what was expected counts of that time. */
int64_t gs_throttle_busy(const struct gs_throttle *t, const struct gs_segment *segment,
                         bool *sure) {
    uint64_t known = min64(max64(segment->start_ns, segment->marked_ns), segment->end_ns);
    int64_t took = (int64_t)(segment->end_ns - segment->start_ns), work = expected(t, segment);
    int64_t least = (int64_t)(segment->end_ns - known);
    bool apart = segment->single && segment->start_event < 0; /* the gap in front of it is in it */
    *sure = segment->clean || segment->probe ||
            (took - least <= took / 16 && took > 2 * (int64_t)EDGE) ||
            (!apart && (took <= work + work / 64 || gapless(segment, took)));
    if (*sure)
        return took;
    return work > least ? work : least;
}

static void learn(const struct gs_throttle *t, struct gs_segment *segment, int64_t own,
                  float weight) {
    int64_t markers = segment->n_marked * (int64_t)t->marker_ns;
    own = own > markers ? own - markers : 0;
    if (segment->work_ns <= 0)
        return;
    if (atomic_load(&t->bucket->admitted_ns) > segment->start_ns) /* it may have waited for us */
        own = own < (int64_t)STUCK ? own : (int64_t)STUCK;
    double ratio = (double)own / (double)segment->work_ns;
    for (uint32_t i = 0; i < segment->n_functions; i++) {
        struct gs_predictor *f = segment->function[i];
        int64_t ns = atomic_load(&f->ns);
        double took = (double)segment->expected_ns[i] * ratio;
        float step = weight / 32, first = weight / (float)(f->samples + 1);
        step = step > first ? step : first;
        step = step < 0.5f ? step : 0.5f;
        f->samples++;
        gs_throttle_timed(f, (int64_t)took, weight > 1.5f || own > 4 * (int64_t)t->slice_ns,
                          segment->end_ns);
        if (segment->single && segment->start_event >= 0)
            f->single_ns += (own - f->single_ns) / (f->single_ns ? 8 : 1);
        if (segment->probe || ns == GS_UNKNOWN) {
            int64_t alone = segment->probe ? own : (int64_t)took;
            f->probing = false;
            atomic_store(&f->ns, alone > LEAST ? alone : LEAST);
            continue;
        }
        ns += (int64_t)((took - (double)ns) * (double)step);
        atomic_store(&f->ns, ns > LEAST ? ns : LEAST);
    }
}

/* Its launches ran one after the other, and most of such segments are in nobody's way. */
static bool is_brief(const struct gs_throttle *t, const struct gs_segment *segment) {
    return segment->n_marked == 1 && segment->work_ns < (int64_t)whole(t) / 2;
}

/* What somebody who says nothing had of `own`: he is known to be there by launches that waited
 * while nobody had work. He comes once in a slice of ours, and stays for one of his. */
static int64_t hidden(struct gs_throttle *t, const struct gs_segment *segment, int64_t own) {
    int64_t over = own - segment->work_ns - t->switch_ns, turn = 2 * (int64_t)t->slice_ns * 5 / 4;
    if (t->hidden < HIDDEN_ALL / 2 || !is_brief(t, segment) || over < t->switch_ns ||
        own < (int64_t)whole(t) || t->since_hidden_ns < (int64_t)whole(t) ||
        ++t->straddled >= STREAK)
        return 0;
    t->since_hidden_ns = 0;
    return over < turn ? over : turn;
}

/* Our own looks say what was our own, whatever others say of it; that somebody says nothing at all
 * is known by launches that had to wait. Visits may be too short for a look. */
static bool is_seen(const struct gs_throttle *t, const struct gs_segment *segment,
                    const struct company *c) {
    return segment->sighted && (c->claimed || t->hidden >= HIDDEN_ALL / 8) &&
           (segment->turns || !c->inside);
}

/* What of a segment's time was its own, by our looks or by what everybody says. */
static int64_t judge(struct gs_throttle *t, struct gs_segment *segment, const struct gs_peer *peer,
                     unsigned n, const struct company *c) {
    int64_t took = (int64_t)(segment->end_ns - segment->start_ns), own, most;
    /* What just began has a whole slice, whatever anybody says. */
    if (segment->start_event >= 0 && !segment->waited)
        t->slice_from_ns = segment->start_ns;
    bool sure, begun = !segment->turns && segment->n_marked == 1 &&
                       segment->end_ns - t->slice_from_ns <= whole(t);
    bool hit = c->contexts && (c->inside || took > (int64_t)whole(t));
    float weight = 1;
    most = gs_throttle_busy(t, segment, &sure);
    t->doubtful = !sure && took > 2 * most;
    gs_throttle_seen(segment);
    if (!sure)
        doubt(t, took - most);
    bool seen = is_seen(t, segment, c);
    if (seen)
        hit = segment->turns > 0;
    int64_t hid = begun || seen ? 0 : hidden(t, segment, most);
    if (hid && !hit)
        return most - hid;
    if (!hit || begun) {
        if (c->contexts) {
            double slice = (double)took / t->slice_ns;
            weight = (float)(1 / (1 - (slice < 0.75 ? slice : 0.75)));
        }
        t->straddled = 0;
        if (sure) {
            learn(t, segment, most, c->contexts ? weight : 2);
            gs_throttle_spread(segment, most, 1);
        }
        return most;
    }
    t->straddled++;
    if (seen)
        own = took - segment->away_ns;
    else
        own = gs_throttle_split(t, peer, n, segment->start_ns, segment->end_ns,
                                segment->probe ? took
                                               : gs_throttle_when_hit(segment, segment->work_ns),
                                segment->start_event >= 0);
    if (!sure) /* a late marker has waited for the others, and what was done long before has not */
        most = expected(t, segment) + t->switch_ns;
    own = own < most ? own : most;
    if (hid)
        return own < most - hid ? own : most - hid;
    if (sure)
        gs_throttle_spread(segment, own, 0.5f);
    /* What short ones take is known without what others say; no less for it. */
    bool brief = is_brief(t, segment);
    bool seldom = segment->work_ns >= (int64_t)whole(t); /* one is in nobody's way */
    bool streak = t->straddled >= STREAK && !(brief && own < segment->work_ns);
    if (sure && (streak || segment->probe ||
                 (!brief && (!gs_throttle_even(segment->function[0]) || seldom))))
        learn(t, segment, own, seldom || streak || segment->probe ? 0.99f : 0.3f);
    own += seen ? segment->turns * (int64_t)t->switch_ns : 0;
    return seen && own > took ? took : own;
}

/* Over some slices `own` is `least`, or more; a single segment may be less. */
static int64_t at_least(int64_t *surplus_ns, int64_t own, int64_t least, int64_t most_ns) {
    int64_t surplus = *surplus_ns + own - least, more = 0;
    if (surplus < -most_ns)
        more = -most_ns - surplus;
    surplus += more;
    *surplus_ns = surplus < most_ns ? surplus : most_ns;
    return own + more;
}

/* Whatever the others say: it is busy / contexts, what short launches were found to take where
 * nobody can have been between them, and what cannot have been granted to others. */
static int64_t bound(struct gs_throttle *t, const struct gs_segment *segment, int64_t own,
                     uint32_t contexts, uint64_t now) {
    bool sure;
    int64_t busy = gs_throttle_busy(t, segment, &sure), work = segment->work_ns;
    own = at_least(&t->surplus_ns, own > 0 ? own : 0, busy / contexts, SURPLUS);
    if (is_brief(t, segment))
        own = at_least(&t->known_ns, own, (work < busy ? work : busy) * 15 / 16, SURPLUS / 4);
    return gs_throttle_granted(t, own, busy, now);
}

/* For `list`, `inspect` and NVML: spread over the windows in which it ran. A window that is gone
 * belongs to a later one by now. */
static void record(struct gs_bucket *bucket, const struct gs_segment *segment, int64_t own) {
    uint64_t took = segment->end_ns - segment->start_ns, from = segment->start_ns, to;
    if (own <= 0 || !took)
        return;
    atomic_fetch_add(&bucket->busy_ns, (uint64_t)own);
    if (took > GS_RECENT * (uint64_t)GS_RECENT_NS)
        from = segment->end_ns - GS_RECENT * (uint64_t)GS_RECENT_NS;
    for (; from < segment->end_ns; from = to) {
        uint64_t window = from / GS_RECENT_NS;
        to = min64((window + 1) * GS_RECENT_NS, segment->end_ns);
        uint64_t part = (uint64_t)((double)own * (double)(to - from) / (double)took), next;
        _Atomic uint64_t *cell = &bucket->recent[window % GS_RECENT];
        uint64_t was = atomic_load(cell);
        do {
            if (was >> 40 > (window & (UINT64_MAX >> 40)))
                break;
            next = was >> 40 == (window & (UINT64_MAX >> 40)) ? was + part : window << 40 | part;
        } while (!atomic_compare_exchange_weak(cell, &was, next));
    }
}

/* What it took to switch to a segment that was waiting when the others had no more work: from then,
 * or its launch, until it began. That teaches what a switch takes. */
#define ODD_ALL 65536 /* of the looks, those that show less than a switch can take */
static int64_t switched(struct gs_throttle *t, const struct gs_segment *segment,
                        const struct company *c, bool said) {
    uint64_t from = max64(segment->opened_ns, c->before_ns);
    int64_t took = (int64_t)(segment->start_ns - from), found = t->found_ns;
    t->told_switch_ns = t->told_switch_ns ? t->told_switch_ns : t->switch_ns;
    if (said && c->over && !segment->waited && from < segment->start_ns &&
        took < (int64_t)MOST_SWITCH) {
        int64_t step = (found = found ? found : t->switch_ns) / (t->finds < FINDS ? 16 : t->finds);
        t->odd += took < (int64_t)EDGE / 2 ? (ODD_ALL - t->odd) / 64 : -(t->odd / 64);
        if (t->odd > ODD_ALL / 16)
            gs_throttle_find_again(t);
        t->found_ns = (uint32_t)(found + (took > found ? step : -step)); /* the median */
        t->finds += t->finds < SURE_FINDS;
    }
    /* The device began to switch when there was a launch, whatever others say that it takes. Four
     * times that, so that a quick switch is still charged the mean; but sooner there was none. */
    uint64_t since = max64(segment->opened_ns, segment->before_ns);
    uint64_t waited = segment->start_ns > since ? segment->start_ns - since : 0;
    if (!said && segment->idle)
        t->hidden += waited < t->switch_ns / 2 ? -(t->hidden / 16) : (HIDDEN_ALL - t->hidden) / 16;
    return waited < t->switch_ns / (said ? 5 : 2) ? 0 : (int64_t)min64(t->switch_ns, 4 * waited);
}

/* While many markers are recorded nothing is launched, and the device is soon done with launches
 * that are as short as that: idle, but for the markers themselves. Not where it was behind. */
static int64_t unfed(const struct gs_segment *segment) {
    if (!segment->recorded_ns || segment->expected_ns[0] >= TINY ||
        segment->end_ns > segment->recorded_ns + EDGE)
        return 0;
    return (int64_t)min64(segment->recorded_ns - segment->marked_ns, segment->n_marked * US) * 3 /
           4;
}

bool gs_throttle_charge(struct gs_throttle *t, struct gs_segment *segment,
                        const struct gs_peer *all, unsigned n_all, uint64_t now) {
    struct gs_peer peer[MAX_PEERS];
    unsigned n = gs_throttle_credible(t, all, n_all, peer);
    struct company c = gs_throttle_company(t, peer, n, segment->start_ns, segment->end_ns);
    c.claimed = c.contexts ||
                gs_throttle_company(t, all, n_all, segment->start_ns, segment->end_ns).contexts;
    uint64_t patience = min64(segment->end_ns - segment->start_ns, DEBT) + DEFER;
    if (c.wait && !(segment->sighted && segment->turns) &&
        now < segment->end_ns + patience) /* who never says it does not stop us */
        return false;
    gs_throttle_hear(t, all, n_all, segment->end_ns);
    int64_t own = judge(t, segment, peer, n, &c);
    own -= unfed(segment) < own / 32 ? unfed(segment) : own / 32;
    looked(t, segment, own);
    uint32_t contexts = c.contexts + 1 > t->contexts ? c.contexts + 1 : t->contexts;
    if (segment->turns && is_seen(t, segment, &c) && contexts < 2)
        contexts = 2;
    own = bound(t, segment, own, contexts, now);
    t->since_hidden_ns = segment->start_event >= 0 ? own : t->since_hidden_ns + own;
    bool said = c.before_ns > segment->before_ns || /* or somebody's next stamp is yet to come */
                gs_throttle_company(t, peer, n, segment->before_ns, segment->start_ns).ran;
    if (segment->start_event >= 0 && (said || (segment->idle && t->others_ppm)))
        own += switched(t, segment, &c, said);
    if (segment->start_event >= 0) /* that marker ended with its stamp */
        own += t->marker_ns;
    record(t->bucket, segment, own);
    if (segment->launches && own > 0)
        atomic_store(&t->bucket->launch_ns, (uint64_t)own / segment->launches);
    if (t->limit.mode == GS_THROTTLE_SOFT && !c.outranked)
        own = 0;
    if (t->limit.mode != GS_THROTTLE_UNLIMITED)
        gs_throttle_adjust(t, own - segment->work_ns, now);
    return true;
}

/* A first word to the others, before they have had theirs. Much longer than what it takes alone is
 * not all its own, even if it is too short for a slice of theirs: their work may have been over. */
uint64_t gs_throttle_first_guess(const struct gs_throttle *t, const struct gs_segment *segment) {
    uint64_t took = segment->end_ns - segment->start_ns;
    uint64_t hit = (uint64_t)gs_throttle_when_hit(segment, segment->work_ns);
    if (t->contexts == 1 || (took <= whole(t) && (segment->probe || took <= 2 * hit)))
        return took;
    return segment->probe ? took / t->contexts : min64(took, hit);
}
