/* Charge an accounting interval: decide how much of its device time this context used. */
#include "throttle_parts.h"

/* The expected work, plus the device time of the markers themselves. */
static int64_t work_with_markers(const struct gs_throttle *t, const struct gs_segment *segment) {
    return segment->work_ns + segment->n_marked * (int64_t)t->marker_ns;
}

/* The device may have been idle within an interval, or its kernels may have spun. Once enough such
 * doubtful time has added up, mark the next launches one by one. If these launches took about as
 * long as expected, doubtful time is ignored for a while. */
static void add_doubtful_time(struct gs_throttle *t, int64_t unknown_ns) {
    if (t->sparse)
        return;
    t->ignore_ns -= unknown_ns;
    if (t->ignore_ns > 0)
        return;
    t->sparse = SPARSE;
    t->looked_ns[0] = t->looked_ns[1] = 0;
}

static void add_single_launch(struct gs_throttle *t, const struct gs_segment *segment,
                              int64_t own) {
    if (!t->sparse || !segment->single)
        return;
    t->looked_ns[0] += own;
    t->looked_ns[1] += work_with_markers(t, segment);
    if (--t->sparse)
        return;
    if (t->looked_ns[0] > t->looked_ns[1] * 3 / 2) {
        t->backoff_ns = 0;
        add_doubtful_time(t, t->ignore_ns);
    } else {
        uint64_t twice = 2 * (uint64_t)t->backoff_ns;
        t->ignore_ns = t->backoff_ns = (int64_t)min64(max64(twice, MS), DOUBTFUL);
    }
}

/* The host launched faster than one launch takes alone, so the device always had work. The launches
 * took less than that because several of them ran at once. */
static bool launched_without_gaps(const struct gs_segment *segment, int64_t took) {
    if (segment->blind) /* launches waited in the limiter during it */
        return false;
    double alone = 0; /* first a ratio, then the time of all launches one after another */
    for (uint32_t i = 0; i < segment->n_functions; i++)
        alone += (double)segment->function[i]->single_ns / (double)segment->expected_ns[i];
    alone *= (double)segment->work_ns / (segment->n_functions ? segment->n_functions : 1);
    return took < alone && (double)(segment->marked_ns - segment->opened_ns) < alone;
}

/* Return how much of an interval the device was busy for certain. The device may have been idle
 * until the interval's marker was recorded. If that part is more than a small fraction, only the
 * expected work counts for it. */
static int64_t busy_for_certain(const struct gs_throttle *t, const struct gs_segment *segment,
                                bool *sure) {
    uint64_t known = min64(max64(segment->start_ns, segment->marked_ns), segment->end_ns);
    int64_t took = (int64_t)(segment->end_ns - segment->start_ns),
            work = work_with_markers(t, segment);
    int64_t least = (int64_t)(segment->end_ns - known);
    /* The idle time before the launch is part of this interval. */
    bool gap_included = segment->single && segment->start_event < 0;
    *sure = segment->clean || segment->probe ||
            (took - least <= took / 16 && took > 2 * (int64_t)EDGE) ||
            (!gap_included && (took <= work + work / 64 || launched_without_gaps(segment, took)));
    if (*sure)
        return took;
    return work > least ? work : least;
}

static void update_predictors(const struct gs_throttle *t, struct gs_segment *segment, int64_t own,
                              float weight) {
    int64_t markers = segment->n_marked * (int64_t)t->marker_ns;
    own = own > markers ? own - markers : 0;
    if (segment->work_ns <= 0)
        return;
    /* The device may have waited for a launch that the limiter delayed. */
    if (atomic_load(&t->bucket->admitted_ns) > segment->start_ns)
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
        gs_throttle_timed(f, (int64_t)(took < (double)own ? took : (double)own),
                          weight > 1.5f || own > 4 * (int64_t)t->slice_ns, segment->end_ns);
        if (segment->single && segment->start_event >= 0)
            f->single_ns += (own - f->single_ns) / (f->single_ns ? 8 : 1);
        if (segment->probe || ns == GS_UNKNOWN) {
            f->probing = false;
            ns = segment->probe ? own : (int64_t)took;
        } else {
            ns += (int64_t)((took - (double)ns) * (double)step);
        }
        atomic_store(&f->ns, ns > LEAST ? ns : LEAST);
    }
}

static enum gs_switch switch_kind(const struct company *c) {
    return c->over ? GS_HANDOVER : GS_PREEMPTION;
}

/* A switch to this context, which waited since `since`, was over at `at`. Learn from it, unless
 * nothing tells when the other context lost the device. */
static void learn_switch(struct gs_throttle *t, const struct company *c, uint64_t since,
                         uint64_t at) {
    struct gs_switch_cost *cost = &t->cost[switch_kind(c)];
    bool before = c->before_ns <= since + (c->cut ? CUT_EDGE : 0);
    int64_t took = (int64_t)(at - (before ? since : c->before_ns)) - t->marker_ns;
    if (!c->before_ns || c->wait || !(c->over || c->cut) ||
        took > (int64_t)max64(MOST_SWITCH, 2 * cost->found_ns))
        return;
    if (c->over)
        gs_throttle_scatter(t, c->container, took);
    uint32_t found = cost->finds ? cost->found_ns : t->switch_ns;
    uint32_t step = found / (cost->finds < 2 * FINDS ? 16 : cost->finds / 2) + 1;
    cost->found_ns = took > (int64_t)found ? found + step : found - min64(step, found); /* median */
    cost->finds += cost->finds < SURE_FINDS;
}

/* Return the cost of switching to an interval that began after the device was idle or used by
 * another context. */
static int64_t switch_charge(struct gs_throttle *t, const struct gs_segment *segment,
                             const struct company *c, bool reported) {
    if (reported && !segment->waited)
        learn_switch(t, c, segment->opened_ns, segment->start_ns);
    uint64_t cost_ns = t->cost[reported ? switch_kind(c) : GS_PREEMPTION].ns;
    /* The switch cannot have begun before the launch, whatever other contexts report. Allow four
     * times the wait, so that a quick switch is still charged the mean cost. The device's clock is
     * as early as it has ever been before a launch. */
    uint64_t start = segment->start_ns + t->early_ns;
    if (segment->opened_ns > start)
        t->early_ns += (uint32_t)min64(segment->opened_ns - start, EDGE - t->early_ns);
    uint64_t since = max64(segment->opened_ns, segment->before_ns + t->early_ns);
    uint64_t waited = start > since ? start - since : 0;
    return waited < cost_ns / (reported ? 5 : 2) ? 0 : (int64_t)min64(cost_ns, 4 * waited);
}

/* Return the cost of the switches back to this context after preemptions within the interval. */
static int64_t switches_back(struct gs_throttle *t, const struct gs_segment *segment,
                             const struct gs_peer *peer, unsigned n) {
    const struct gs_activity *a = &t->page->buffer[atomic_load(&t->page->index) & 1];
    uint32_t count = a->n < GS_RUNS ? a->n : GS_RUNS, left = segment->preemptions;
    int64_t sum = 0;
    for (uint32_t i = 0; i + 1 < count && left; i++) {
        const struct gs_run *run = nth_newest(a, i), *last = nth_newest(a, i + 1);
        if (last->run_ns != GS_CUT_OFF || run->start_ns < segment->start_ns ||
            run->start_ns > segment->end_ns)
            continue;
        struct company c = gs_throttle_company(t, peer, n, run->start_ns, run->start_ns);
        c.wait = c.before_ns <= last->end_ns; /* not reported yet */
        learn_switch(t, &c, last->end_ns, run->start_ns);
        sum += t->cost[switch_kind(&c)].ns;
        left--;
    }
    return sum + left * (int64_t)t->cost[GS_PREEMPTION].ns;
}

/* Return how much of an interval's time this context used, by probe events or by the activity of
 * all contexts. */
static int64_t own_time(struct gs_throttle *t, struct gs_segment *segment,
                        const struct gs_peer *peer, unsigned n, const struct company *c) {
    int64_t took = (int64_t)(segment->end_ns - segment->start_ns), own, most, switches = 0;
    /* A context that was idle starts with a whole slice, whatever other contexts report. */
    if (segment->start_event >= 0 && !segment->waited)
        t->slice_from_ns = segment->start_ns;
    bool sure, begun = !segment->preemptions && segment->n_marked == 1 &&
                       segment->end_ns - t->slice_from_ns <= whole(t);
    bool hit = segment->sighted ? segment->preemptions > 0 /* whatever other contexts report */
                                : c->contexts && (c->inside || took > (int64_t)whole(t));
    most = busy_for_certain(t, segment, &sure);
    segment->sure = sure;
    t->doubtful = !sure && took > 2 * most;
    gs_throttle_seen(segment);
    if (!sure)
        add_doubtful_time(t, took - most);
    if (!hit || begun) {
        double slice = (double)took / t->slice_ns;
        float weight = c->contexts ? (float)(1 / (1 - (slice < 0.75 ? slice : 0.75))) : 2;
        if (sure) {
            update_predictors(t, segment, most, weight);
            gs_throttle_spread(segment, most, 1);
        }
        return most;
    }
    /* Few such intervals run without preemption. */
    bool is_long = segment->work_ns >= (int64_t)whole(t);
    own = took - segment->away_ns;
    if (segment->sighted)
        switches = switches_back(t, segment, peer, n);
    else
        own = gs_throttle_split(t, peer, n, segment->start_ns, segment->end_ns,
                                segment->probe ? took
                                               : gs_throttle_when_hit(segment, segment->work_ns),
                                segment->start_event >= 0);
    /* A late marker has waited for other contexts; work that was done long before it has not. */
    if (!sure)
        most = work_with_markers(t, segment) + t->cost[GS_PREEMPTION].ns;
    own = own < most ? own : most;
    if (sure)
        gs_throttle_spread(segment, own, 0.5f);
    /* Most brief intervals overlap no other context, so their duration is known without the reports
     * of other contexts. Such a report must not lower it. */
    bool brief = segment->n_marked == 1 && segment->work_ns < (int64_t)whole(t) / 2;
    if (sure && (is_long || segment->probe || (!brief && !gs_throttle_even(segment->function[0]))))
        update_predictors(t, segment, own, is_long || segment->probe ? 0.99f : 0.3f);
    own += switches;
    return segment->sighted && own > took ? took : own;
}

/* Add the charge to the windows in which the interval ran, for `list`, `inspect` and NVML. Skip a
 * window whose cell already belongs to a later window. */
static void record_use(struct gs_bucket *bucket, const struct gs_segment *segment, int64_t own) {
    uint64_t took = segment->end_ns - segment->start_ns, to;
    uint64_t from = segment->end_ns - min64(took, GS_RECENT * (uint64_t)GS_RECENT_NS);
    if (own <= 0 || !took)
        return;
    atomic_fetch_add(&bucket->busy_ns, (uint64_t)own);
    for (; from < segment->end_ns; from = to) {
        uint64_t window = from / GS_RECENT_NS, number = window & (UINT64_MAX >> 40);
        to = min64((window + 1) * GS_RECENT_NS, segment->end_ns);
        uint64_t part = (uint64_t)((double)own * (double)(to - from) / (double)took), next;
        _Atomic uint64_t *cell = &bucket->recent[window % GS_RECENT];
        uint64_t was = atomic_load(cell);
        do {
            if (was >> 40 > number)
                break;
            next = was >> 40 == number ? was + part : window << 40 | part;
        } while (!atomic_compare_exchange_weak(cell, &was, next));
    }
}

/* While the host records many markers, it launches nothing, and the device soon completes launches
 * that are shorter than that. It is then idle except for the markers themselves, unless it still
 * had a backlog. */
static int64_t idle_while_marking(const struct gs_segment *segment) {
    if (!segment->recorded_ns || segment->expected_ns[0] >= TINY ||
        segment->end_ns > segment->recorded_ns + EDGE)
        return 0;
    return (int64_t)min64(segment->recorded_ns - segment->marked_ns, segment->n_marked * US) * 3 /
           4;
}

static void trace(struct gs_throttle *t, const struct gs_segment *segment, struct gs_trace *record,
                  uint64_t now) {
    uint64_t due = atomic_load(&t->bucket->tat_ns);
    if (!t->env->trace)
        return;
    record->start_ns = segment->start_ns;
    record->end_ns = segment->end_ns;
    record->away_ns = (uint64_t)segment->away_ns;
    record->expected_ns = segment->work_ns;
    record->launches = segment->launches;
    record->preemptions = segment->preemptions;
    record->single = segment->single;
    record->in_turn = t->in_turn;
    record->until_due_ns = due > now ? due - now : 0;
    record->waited_ns = t->traced_wait_ns;
    record->why = t->traced_wait_ns ? t->why : GS_WHY_NOT;
    t->traced_wait_ns = 0;
    record->sure = segment->sure;
    t->env->trace(t->env->arg, record);
}

bool gs_throttle_charge(struct gs_throttle *t, struct gs_segment *segment,
                        const struct gs_peer *all, unsigned n_all, uint64_t now) {
    struct gs_peer peer[MAX_PEERS];
    unsigned n = gs_throttle_credible(t, all, n_all, peer);
    struct company c = gs_throttle_company(t, peer, n, segment->start_ns, segment->end_ns);
    uint64_t patience = min64(segment->end_ns - segment->start_ns, DEBT) + DEFER;
    if (c.wait && !(segment->sighted && segment->preemptions) &&
        now < segment->end_ns + patience) /* a peer that never reports must not block the charge */
        return false;
    gs_throttle_hear(t, all, n_all, segment->end_ns);
    int64_t own = own_time(t, segment, peer, n, &c);
    own -= idle_while_marking(segment) < own / 32 ? idle_while_marking(segment) : own / 32;
    add_single_launch(t, segment, own);
    own = own > 0 ? own : 0;
    struct gs_trace record = {.own_ns = own, .others = c.contexts};
    /* Or a peer's next timestamp is still missing. */
    bool reported = c.before_ns > segment->before_ns ||
                    gs_throttle_company(t, peer, n, segment->before_ns, segment->start_ns).ran;
    if (segment->start_event >= 0 && (reported || (segment->idle && t->others_ppm)))
        own += switch_charge(t, segment, &c, reported);
    if (segment->start_event >= 0) /* the marker's own time comes after its timestamp */
        own += t->marker_ns;
    record.switch_ns = own - record.own_ns;
    gs_turn_charged(t, segment, own);
    record_use(t->bucket, segment, own);
    if (segment->launches && own > 0)
        atomic_store(&t->bucket->launch_ns, (uint64_t)own / segment->launches);
    if (t->limit.mode == GS_THROTTLE_SOFT && !c.outranked)
        own = 0;
    if (t->limit.mode != GS_THROTTLE_UNLIMITED)
        gs_bucket_adjust(t, own - segment->work_ns, now);
    record.charged_ns = own;
    trace(t, segment, &record, now);
    return true;
}

/* An estimate to publish before the peers have reported theirs. A duration far beyond the expected
 * one includes time of other contexts, even if it is too short for one of their slices: they may
 * have run out of work. */
uint64_t gs_throttle_first_guess(const struct gs_throttle *t, const struct gs_segment *segment) {
    uint64_t took = segment->end_ns - segment->start_ns;
    uint64_t hit = (uint64_t)gs_throttle_when_hit(segment, segment->work_ns);
    if (t->contexts == 1 || (took <= whole(t) && (segment->probe || took <= 2 * hit)))
        return took;
    return segment->probe ? took / t->contexts : min64(took, hit);
}
