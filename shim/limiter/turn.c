/* Turns: containers that saturate a device together have it one after the other. While two contexts
 * have work, the device switches between them after each slice and loses a tenth of its time; with
 * turns, once in a turn.
 *
 * No process hands out turns. In its activity file each container advertises whether it has the
 * turn, until when, and whether it waits for one (struct gs_compute_turn), and it reads what the
 * others advertise. The waiting container whose bucket would have the earliest arrival time after a
 * turn takes the next one, so a container with short turns need not wait for several longer ones.
 * So turns only decide when a container launches; how much it may use is still decided by its
 * bucket, which is paid during the turn from what was saved before it.
 *
 *   alone, or beside a container without a hard limit
 *                     no turns: the bucket alone decides
 *   own turn          launch while all work before ends within it
 *   short bursts      a container that saved credit launches short bursts into another one's turn,
 *                     and the others launch nothing until its burst is over
 *   otherwise         sleep until the turn of the holder ends
 *
 * Nothing here waits for another container to act. A holder that was killed or stopped, or whose
 * kernel does not end, is waited for until its turn ends, and GRACE at most. The others together
 * hold a container up for no longer than its own limit leaves them, whatever they advertise. */
#include "throttle_parts.h"

#define SWITCHES 160u /* a round lasts at least so many of them, and a turn a tenth of that */
#define LEAST_TURN (2 * MS)
#define SAVED 4                     /* turns that a container saves credit for at most */
#define NO_WORK MS                  /* without work a turn is over */
#define GRACE (25 * MS)             /* the longest wait for work that outlasts its turn */
#define CUT_IN (2500 * (int64_t)US) /* a burst in another turn: on average, and at most twice */
#define BEHIND (2 * MS)             /* a burst waits for work in flight and switches */
#define NARROW (600 * US)           /* of expected work in flight where bursts wait for it */
#define LOOK (250 * US)             /* the holder looks so often whether a burst is over */
#define REST (500 * US)             /* without work: what follows is another burst */
#define STEP_BACK (300 * US) /* the container that waited longer has so long to take the turn */
#define STEPS_BACK 4u
#define RENEWED MS       /* how much later than needed an advertised wait ends */
#define FREE (3000 * MS) /* without turns, if they are of no use */

static int64_t turn_ns(const struct gs_throttle *t, uint32_t ppm) {
    uint64_t switches = SWITCHES * min64(t->cost[GS_HANDOVER].ns, MOST_SWITCH);
    double ns = (double)max64(t->round_ns, switches) * ppm / 1e6;
    return (int64_t)max64((uint64_t)ns, max64(LEAST_TURN, switches / 10));
}

/* The time in which the own limit pays for so many turns. */
static uint64_t pays_for(const struct gs_throttle *t, double turns) {
    return (uint64_t)(turns * (double)turn_ns(t, t->rate_ppm) * 1e6 / t->rate_ppm);
}

/* The device time that can be paid from `now` on, if nothing but this container uses it. */
static int64_t affordable(const struct gs_throttle *t, uint64_t now) {
    int64_t turn = turn_ns(t, t->rate_ppm), most = turn * 2;
    uint64_t tat = atomic_load(&t->bucket->tat_ns);
    double share = t->rate_ppm / 1e6, saved = (double)now - (double)tat;
    double ns = share < 0.99 ? saved * share / (1 - share) : (double)turn + saved;
    return ns < (double)most ? (int64_t)ns : most;
}

/* How much must be affordable for a turn to begin. */
static int64_t enough(const struct gs_throttle *t) {
    return turn_ns(t, t->rate_ppm) * 3 / 4;
}

static bool is_own(const struct gs_compute_turn *own, uint64_t now) {
    return atomic_load(&own->from_ns) <= now && atomic_load(&own->until_ns) > now;
}

uint64_t gs_turn_burst(const struct gs_throttle *t) {
    if (!t->turn || !t->round_ns || !t->rivals)
        return 0;
    return pays_for(t, SAVED);
}

/* ---- what others advertise ------------------------------------------------------------------- */

struct seen {
    uint64_t again_ns; /* when the turn of another container ends, or may have ended; 0: none */
    uint64_t wakes_ns; /* when the container that goes first looks again; 0: none goes first */
    uint64_t cut_ns;   /* when a burst of another container is over; 0: there is none */
    bool first;        /* the container that has the turn took it first */
};

/* When the other container's turn is over, as far as known; 0: it has none. */
static uint64_t turn_ends(const struct gs_throttle *t, const struct gs_turn_of *other,
                          uint64_t from, uint64_t until, uint64_t now) {
    uint64_t work = min64(atomic_load(&other->turn.work_until_ns), now + DEBT);
    uint64_t most = 3 * (uint64_t)turn_ns(t, gs_throttle_may_have(&other->granted));
    if (!until || from > now || until < from)
        return 0;
    until = min64(until, from + most);
    uint64_t last = max64(until, min64(work, until + GRACE));
    return last <= now || work <= now - min64(now, NO_WORK) ? 0 : min64(last, work + NO_WORK);
}

/* Return whether all others together have held this container up for no longer than its own limit
 * leaves them: by turns, or by anything else that made it wait. */
static bool are_credible(struct gs_throttle *t, const struct seen *seen, uint64_t now) {
    double share = t->rate_ppm / 1e6, leaves = 1 - (share < 0.3 ? 0.9 * share : share - 0.03);
    uint64_t since = now - min64(t->surveyed_ns, now), until = min64(now, t->held_until_ns);
    double left = (double)t->held_ns - (double)since * leaves;
    int64_t most = 3 * turn_ns(t, 1000000);
    t->held_ns = left > 0 ? (int64_t)left : 0;
    t->held_ns += until > t->surveyed_ns ? (int64_t)(until - t->surveyed_ns) : 0;
    t->held_ns = t->held_ns < 2 * most ? t->held_ns : 2 * most;
    t->surveyed_ns = now;
    t->held_until_ns = max64(seen->again_ns, seen->cut_ns);
    return t->held_ns < most;
}

static struct seen survey(struct gs_throttle *t, uint64_t arrival, uint64_t from, uint64_t now) {
    struct seen seen = {.again_ns = 0};
    struct gs_turn_of other[MAX_PEERS];
    unsigned n = t->env->turns(t->env->arg, other, MAX_PEERS);
    for (unsigned i = 0; i < n; i++) {
        const struct gs_compute_turn *turn = &other[i].turn;
        if (other[i].granted.mode != GS_THROTTLE_HARD) /* takes no turns */
            continue;
        uint64_t began = atomic_load(&turn->from_ns), until = atomic_load(&turn->until_ns);
        uint64_t wants = atomic_load(&turn->wants_until_ns), its = atomic_load(&turn->arrival_ns);
        uint64_t cut = atomic_load(&turn->cuts_in_until_ns);
        uint64_t ends = turn_ends(t, &other[i], began, until, now);
        cut = cut < now + 2 * CUT_IN + BEHIND ? cut : 0;
        t->cut_in_at_ns = max64(t->cut_in_at_ns, cut);
        seen.cut_ns = max64(seen.cut_ns, cut > now ? cut : 0);
        if (ends) {
            seen.again_ns = max64(seen.again_ns, ends);
            seen.first |= began < from || (began == from && other[i].container < t->container);
        } else if (wants > now && wants < now + 2 * GRACE + 2 * t->round_ns &&
                   (its < arrival || (its == arrival && other[i].container < t->container))) {
            uint64_t wakes = wants > RENEWED ? wants - RENEWED : 1;
            seen.wakes_ns = !seen.wakes_ns || wakes < seen.wakes_ns ? wakes : seen.wakes_ns;
        }
    }
    if (!are_credible(t, &seen, now))
        return (struct seen){.again_ns = 0};
    return seen;
}

/* ---- the own turn ---------------------------------------------------------------------------- */

/* Work is on the device until then, at least. */
static void advertise_work(struct gs_throttle *t, uint64_t until, uint64_t now) {
    uint64_t known = atomic_load(&t->turn->work_until_ns);
    while ((known < until || known > now + DEBT) &&
           !atomic_compare_exchange_weak(&t->turn->work_until_ns, &known, until))
        ;
}

/* The turn is over, perhaps before its advertised end. The work that other processes of the
 * container advertised stays. */
static void end_turn(struct gs_throttle *t, uint64_t ends, uint64_t now) {
    if (!t->siblings)
        atomic_store(&t->turn->work_until_ns, ends);
    else
        advertise_work(t, ends, now);
}

/* When all work that this context launched is expected to be over: the device does it from when it
 * completed the last interval, or from when it switched to this container. */
static uint64_t ends_at(const struct gs_throttle *t, uint64_t now) {
    uint64_t from = atomic_load(&t->turn->from_ns);
    if (t->in_flight_ns <= 0)
        return now;
    uint64_t begins = t->covered_ns < from ? from + t->cost[GS_HANDOVER].ns : t->covered_ns;
    return max64(now, begins + (uint64_t)t->in_flight_ns);
}

/* Work of `ns` will be launched. The next launch may come as long after this one as this one after
 * the last. */
static void launches(struct gs_throttle *t, int64_t ns, uint64_t now) {
    uint64_t gap = min64(now - min64(t->turn_launched_ns, now), 2 * MS);
    uint64_t more = min64(now + 2 * gap, atomic_load(&t->turn->until_ns));
    t->turn_launched_ns = now;
    t->turn_work_until_ns = ends_at(t, now) + (uint64_t)ns;
    advertise_work(t, max64(t->turn_work_until_ns, more), now);
}

/* Whether a launch may go within the own turn: if all work before it ends within the turn, or there
 * is none. The bucket bounds it too: processes of the container can write what it advertises. */
static bool fits(const struct gs_throttle *t, uint64_t now) {
    bool first = t->turn_launched_ns < atomic_load(&t->turn->from_ns);
    return (first || ends_at(t, now) < atomic_load(&t->turn->until_ns)) &&
           atomic_load(&t->bucket->tat_ns) <= now + pays_for(t, 0.5);
}

/* The container that goes first may sleep until another one's turn ends that ended early. Then this
 * one has the turn meanwhile, and for half a turn at least. If the other one does not want its
 * turn, a tenth of the rest is about what shorter turns cost: a switch and the time to wake. */
static void take(struct gs_throttle *t, const struct seen *seen, int64_t length, uint64_t now) {
    if (seen->wakes_ns > now) {
        uint64_t half = (uint64_t)turn_ns(t, t->rate_ppm) / 2, full = (uint64_t)length;
        length = (int64_t)min64(full, max64(seen->wakes_ns - now, half));
        t->held_ns += ((int64_t)full - length) / 10;
    }
    atomic_store(&t->turn->from_ns, now);
    atomic_store(&t->turn->until_ns, now + (uint64_t)length);
    atomic_thread_fence(memory_order_seq_cst);
}

/* A container that rests most of the time and has work for a moment does not wait for the end of a
 * turn. Both switches are charged to it. */
static bool may_cut_in(struct gs_throttle *t, int64_t ns, uint64_t now) {
    int64_t whole = t->burst_mean_ns > ns ? t->burst_mean_ns : ns;
    uint64_t credit = t->burst_ns ? 0 : (uint64_t)((double)whole * 1e6 / t->rate_ppm);
    if (t->burst_mean_ns > CUT_IN || t->burst_ns + ns > 2 * CUT_IN ||
        atomic_load(&t->bucket->tat_ns) + credit > now)
        return false;
    uint64_t known = atomic_load(&t->turn->cuts_in_until_ns);
    t->cuts_until_ns = min64(ends_at(t, now) + (uint64_t)ns, now + 2 * CUT_IN) + BEHIND;
    while ((known < t->cuts_until_ns || known > now + DEBT) &&
           !atomic_compare_exchange_weak(&t->turn->cuts_in_until_ns, &known, t->cuts_until_ns))
        ;
    return true;
}

/* Another process of the container may have a longer burst. */
void gs_turn_rests(struct gs_throttle *t, uint64_t now) {
    uint64_t own = t->cuts_until_ns;
    if (t->turn && own > now)
        atomic_compare_exchange_strong(&t->turn->cuts_in_until_ns, &own, now);
}

int64_t gs_turn_window(const struct gs_throttle *t, uint64_t now) {
    return t->cut_in_at_ns && now < t->cut_in_at_ns + 1000 * MS ? (int64_t)NARROW : WINDOW;
}

/* A launch asks for the first time: after a rest another burst begins. */
static void begin_burst(struct gs_throttle *t, uint64_t now) {
    bool busy = t->marked != t->finished && t->segment[t->finished % GS_SEGMENTS].marked_ns < now;
    uint64_t ended = max64(t->covered_ns, t->burst_until_ns);
    if (busy || t->open.launches || t->waiting_since_ns || now < ended + REST || !t->burst_ns)
        return;
    int64_t burst = t->burst_ns < 8 * CUT_IN ? t->burst_ns : 8 * CUT_IN;
    t->burst_mean_ns += (burst - t->burst_mean_ns) / 4;
    t->burst_ns = 0;
}

/* Wait for the container that goes first to take the turn, but not for long. */
static uint64_t step_back(struct gs_throttle *t, const struct seen *seen, uint64_t now) {
    if (seen->wakes_ns > now + STEP_BACK)
        return 0;
    if (now < t->stepped_back_ns + STEP_BACK)
        return t->stepped_back_ns + STEP_BACK;
    t->stepped_back_ns = now;
    t->steps_back = (t->steps_back + 1) % STEPS_BACK;
    return t->steps_back ? now + STEP_BACK : 0;
}

/* A container that gets less than three quarters of its turns takes none for a while, and all use
 * the device's time slices: it leaves the device idle, or other work runs in its turns. Its
 * processes count and decide that together: a process that took no turns alone would use up what
 * the processes that wait for a turn have to save. Return whether the last turn decides it. */
static bool takes_none(struct gs_throttle *t, uint64_t now) {
    uint64_t from = atomic_load(&t->turn->from_ns), until = atomic_load(&t->turn->until_ns);
    uint64_t charged = atomic_exchange(&t->turn->got_ns, 0);
    if (!charged || until <= from || t->charged != t->marked)
        return false;
    int64_t most = turn_ns(t, t->rate_ppm),
            length = (int64_t)min64(until - from, 2 * (uint64_t)most),
            got = (int64_t)min64(charged, (uint64_t)length);
    t->held_ns += length - got;
    t->lost_ns += length * 3 / 4 - got;
    t->lost_ns = t->lost_ns > 0 ? t->lost_ns : 0;
    if (t->lost_ns < most)
        return false;
    t->lost_ns = most * 3 / 4; /* the next time one or two turns decide */
    atomic_store(&t->turn->free_until_ns, now + FREE);
    return true;
}

static bool is_free(const struct gs_throttle *t, uint64_t now) {
    uint64_t until = atomic_load(&t->turn->free_until_ns);
    return now < t->free_until_ns || (now < until && until <= now + FREE);
}

uint64_t gs_turn_admit(struct gs_throttle *t, int64_t ns, int64_t pay, uint64_t now, bool *own) {
    struct gs_compute_turn *turn = t->turn;
    *own = t->in_turn = false;
    if (!turn || !t->round_ns || t->limit.mode != GS_THROTTLE_HARD)
        return 0;
    begin_burst(t, now);
    if (!t->rivals)
        return 0;
    if (is_free(t, now))
        return may_cut_in(t, ns, now), 0;
    if (is_own(turn, now)) {
        bool rested = now > atomic_load(&turn->work_until_ns) + NO_WORK / 2;
        struct seen seen = survey(t, 0, atomic_load(&turn->from_ns), now);
        if (seen.cut_ns) /* a burst of another container: launch nothing until it is over */
            return min64(seen.cut_ns, now + LOOK);
        if (fits(t, now) && (!rested || !seen.again_ns)) {
            launches(t, pay > ns ? pay : ns, now);
            return *own = t->in_turn = true, 0;
        }
        gs_bucket_give_back(t, 0, now);
        uint64_t ends = ends_at(t, now);
        end_turn(t, ends, now);
        if (!rested) {
            atomic_store(&turn->until_ns, min64(ends, atomic_load(&turn->until_ns)));
            return ends;
        }
    }
    if (may_cut_in(t, ns, now))
        return 0;
    end_turn(t, ends_at(t, now), now); /* of the last turn, which may be late */
    int64_t length = affordable(t, now), lacks = enough(t) - length;
    if (lacks > 0) {
        double share = t->rate_ppm / 1e6;
        double later = share < 0.99 ? (double)lacks * (1 - share) / share : (double)lacks;
        return now + 20 * US + (uint64_t)later;
    }
    uint64_t arrival = atomic_load(&t->bucket->tat_ns) + pays_for(t, 1);
    struct seen seen = survey(t, arrival, now, now);
    uint64_t again = max64(seen.again_ns, min64(seen.cut_ns, now + LOOK));
    if (again)
        t->steps_back = 0;
    else if (seen.wakes_ns)
        again = step_back(t, &seen, now);
    if (!again && takes_none(t, now))
        return 0;
    if (!again) {
        take(t, &seen, length, now);
        if (!survey(t, arrival, now, now).first) {
            atomic_store(&turn->wants_until_ns, 0);
            t->steps_back = 0;
            launches(t, pay > ns ? pay : ns, now);
            return *own = t->in_turn = true, 0;
        }
        atomic_store(&turn->until_ns, 0);
        again = now + STEP_BACK;
    }
    if (again > now + LOOK) /* that turn may end early: look again before */
        again = now + max64(LOOK, (again - now) * 3 / 4);
    again = max64(again, now + 50 * US);
    atomic_store(&turn->arrival_ns, arrival);
    atomic_store(&turn->wants_until_ns, again + RENEWED);
    t->held_until_ns = UINT64_MAX; /* until it asks again, however late it wakes */
    return again;
}

void gs_turn_charged(struct gs_throttle *t, const struct gs_segment *segment, int64_t own) {
    if (t->turn && segment->start_ns >= atomic_load(&t->turn->from_ns) &&
        segment->start_ns <= atomic_load(&t->turn->until_ns))
        atomic_fetch_add(&t->turn->got_ns, (uint64_t)own);
}
