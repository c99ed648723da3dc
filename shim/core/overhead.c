/* Memory that the driver takes for this process beyond its allocations.
 *
 * A container is charged what the driver counts for its processes, not what a model of the driver
 * says. Allocations are charged exactly as they are made (quota.c). Everything else is charged here
 * as the difference to the driver's count: contexts, code, streams, graphs, handles of libraries.
 *
 *   charge = allocations + overhead + pending
 *
 *   overhead  what the driver counted at the last comparison, less the allocations
 *   pending   bounds and models of calls since then
 *
 * The thread that makes a call compares, never a thread of the shim's own: it would contend for the
 * driver's locks with the program, and be in NVML when the program forks or exits. A comparison
 * asks the driver twice, so it is made where the driver is slow itself. A program that
 * makes and destroys streams or graphs all the time makes few of them; until the next one, what
 * they may take is charged by a model. Near the limit each growth is compared, and each reservation
 * after one. Once a second a comparison is made before a call that blocks, while the device works.
 *
 * While a thread compares, others begin no allocation and no free (busy.c), so the charge and the
 * count are of one moment. If a thread stays in the driver for long, that is not sure, and a
 * comparison counts for less (settled). */
#include <time.h>

#include "busy.h"
#include "overhead.h"

#define LARGE (UINT64_C(16) << 20) /* pending bytes that are compared at once */
/* Comparisons take a twentieth of the time at most, after a start with a quarter of a second of
 * them. One that was delayed counts 20 ms. */
#define SHARE 20u
#define START_NS (SHARE * UINT64_C(250000000))
#define DELAYED_NS UINT64_C(20000000)
#define REST 3u
#define FAILURES 3u /* without an answer, one after the other */
#define LEAST_CONTEXT (UINT64_C(4) << 20)
#define LATE 4 /* seconds without a call that blocks */

#define LOW(dev) (UINT32_C(1) << (dev))
#define HIGH(dev) (UINT32_C(0x10000) << (dev))

_Atomic uint32_t gs_overhead_dirty;
_Atomic bool gs_overhead_is_late;

/* Changed under lock_overhead, but for what is atomic. */
static struct overhead {
    _Atomic uint32_t contexts;
    _Atomic bool begun;        /* the driver lists the device, and was initialised */
    _Atomic bool counted;      /* it has a count of this process */
    _Atomic uint64_t rests_ns; /* until then a refusal needs no comparison */
    unsigned failures;         /* since the driver answered last */
    bool over;                 /* was over the limit at the last comparison */
    bool doubtful; /* the last comparison gave `other`, while other threads were in the driver */
    uint64_t other;
    _Atomic uint64_t number; /* of comparisons */
    _Atomic uint64_t bytes;
    _Atomic uint64_t pending;
    _Atomic uint64_t bounds;   /* reserved for calls that have not ended */
    _Atomic uint64_t unlisted; /* managed memory, which the driver lists for no process */
    _Atomic uint64_t paid_ns;  /* when the time of all comparisons is a twentieth of all time */
} overhead[GS_MAX_DEVICES];

static bool is_device(int dev) {
    const struct gs_view *view = gs_region();
    return view && dev >= 0 && (uint32_t)dev < view->limits->n_devices;
}

/* Of a context, and listed for no process: measured by the host. */
static uint64_t unlisted_of_context(void) {
    return (uint64_t)gs_region()->limits->unlisted_kib << 10;
}

/* Of this process, since cuInit. */
static uint64_t of_init(int dev) {
    return atomic_load(&overhead[dev].begun) ? (uint64_t)gs_region()->limits->init_kib << 10 : 0;
}

static uint64_t charged(int dev) {
    struct gs_slot *slot = gs_slot();
    return slot ? __atomic_load_n(&slot->bytes[dev], __ATOMIC_SEQ_CST) : 0;
}

/* ---- comparing --------------------------------------------------------------------------- */

static void publish(int dev, const struct overhead *o) {
    struct gs_slot *slot = gs_slot();
    uint64_t mib = (o->bytes + atomic_load(&o->pending)) >> 20;
    if (slot && (size_t)dev < sizeof(slot->driver_mib) / sizeof(slot->driver_mib[0]))
        __atomic_store_n(&slot->driver_mib[dev], (uint16_t)(mib < UINT16_MAX ? mib : UINT16_MAX),
                         __ATOMIC_RELAXED);
}

/* The bytes that the driver counts for this process; false without an answer. */
static bool counted_bytes(int dev, const struct overhead *o, uint64_t *bytes) {
    uint32_t contexts = atomic_load(&o->contexts);
    enum gs_counted found = gs_driver_count(dev, bytes);
    if (found == GS_NOT_COUNTED || (found == GS_NOT_LISTED && contexts))
        return false;
    *bytes += contexts * unlisted_of_context() + atomic_load(&o->unlisted) + of_init(dev);
    return true;
}

static uint64_t distance(uint64_t a, uint64_t b) {
    return a < b ? b - a : a - b;
}

/* Memory of other processes that this one has open is charged where it was allocated. The driver
 * may list it for this process, too, some of it or none. The overhead changes by little between two
 * comparisons, which tells. */
static uint64_t without_imports(int dev, const struct overhead *o, uint64_t want) {
    uint64_t parts[] = {gs_export_imported(dev, false), gs_export_imported(dev, true)};
    uint64_t best = want;
    for (unsigned i = 0; i < 2; i++)
        if (parts[i] && parts[i] <= want &&
            distance(want - parts[i], o->bytes) < distance(best, o->bytes))
            best = want - parts[i];
    return best;
}

/* The new overhead after a comparison gave `want`; `now`: with what is pending. `exact`: nothing
 * changed meanwhile. Otherwise memory of other threads' calls may count for either: the charge then
 * never falls, and rises to the least that two comparisons in a row gave. */
static uint64_t settled(struct overhead *o, uint64_t now, uint64_t want, bool exact) {
    uint64_t least = o->doubtful && o->other < want ? o->other : want;
    bool rises = o->doubtful && least > now;
    o->doubtful = !exact && !rises && want != now;
    o->other = want;
    return exact ? want : rises ? least : now;
}

/* Other threads wait meanwhile, if `held`, until the new charge is in force. */
static void compare_held(int dev, bool held) {
    struct overhead *o = &overhead[dev];
    uint64_t since_ns = gs_now_ns(), counted;
    uint64_t before = charged(dev), pending = atomic_load(&o->pending);
    bool answered = counted_bytes(dev, o, &counted);
    uint64_t after = charged(dev);
    bool exact = held && gs_others_are_held();
    if (!answered) { /* the charge stays; from the third time on, a model is charged */
        atomic_store(&o->counted, ++o->failures < FAILURES);
        return;
    }
    o->failures = 0;
    uint64_t end_ns = gs_now_ns(), took_ns = end_ns - since_ns, paid_ns = atomic_load(&o->paid_ns);
    took_ns = took_ns < DELAYED_NS ? took_ns : DELAYED_NS;
    atomic_store(&o->rests_ns, end_ns + REST * took_ns);
    atomic_store(&o->paid_ns, (paid_ns > end_ns ? paid_ns : end_ns) + SHARE * took_ns);
    uint64_t all = before > after ? before : after;
    uint64_t ours = o->bytes + pending + atomic_load(&o->bounds);
    uint64_t known = all > ours ? all - ours : 0;
    uint64_t want = without_imports(dev, o, counted > known ? counted - known : 0);
    want = settled(o, o->bytes + pending, want, exact && before == after);
    if (o->doubtful) {
        atomic_fetch_or(&gs_overhead_dirty, LOW(dev));
        return; /* what is pending stays charged */
    }
    if (want > o->bytes + pending)
        gs_charge_anyway(dev, want - o->bytes - pending);
    else
        gs_release(dev, o->bytes + pending - want);
    o->bytes = want;
    atomic_fetch_sub(&o->pending, pending);
    atomic_fetch_add(&o->number, 1);
    publish(dev, o);
    bool over = gs_over(dev);
    if (over && !o->over)
        gs_log("the limit is exceeded without an allocation",
               "the driver itself takes more for this container than it did",
               "on the host, gpushare inspect shows how much; gpushare limit set --memory");
    o->over = over;
}

static void compare(int dev) {
    atomic_fetch_and(&gs_overhead_dirty, ~(LOW(dev) | HIGH(dev)));
    compare_held(dev, gs_hold_others());
    gs_let_others_go();
}

/* A thread that had to wait needs no comparison of its own if one began and ended meanwhile. */
static void compare_locked(int dev, bool must) {
    struct gs_self *self = gs_self();
    if (!gs_slot() || !is_device(dev))
        return;
    if (!atomic_load(&overhead[dev].counted)) {
        atomic_fetch_and(&gs_overhead_dirty, ~(LOW(dev) | HIGH(dev)));
        return;
    }
    if (!must && gs_now_ns() + START_NS < atomic_load(&overhead[dev].paid_ns))
        return;
    uint64_t number = atomic_load(&overhead[dev].number);
    uint32_t depth = gs_busy_leave();
    gs_lock(&self->lock_overhead);
    if (atomic_load(&overhead[dev].number) < number + 2)
        compare(dev);
    gs_unlock(&self->lock_overhead);
    gs_busy_return(depth);
}

static void mark(int dev) {
    if (is_device(dev) && atomic_load_explicit(&overhead[dev].counted, memory_order_relaxed) &&
        !(atomic_load_explicit(&gs_overhead_dirty, memory_order_relaxed) & LOW(dev)))
        atomic_fetch_or(&gs_overhead_dirty, LOW(dev));
}

/* Threads that are refused all the time leave time for threads that wait at the gate. */
void gs_overhead_refusing(int dev) {
    if (is_device(dev) && gs_now_ns() >= atomic_load(&overhead[dev].rests_ns))
        compare_locked(dev, true);
}

void gs_overhead_settle(int dev) {
    if (is_device(dev) &&
        atomic_load_explicit(&gs_overhead_dirty, memory_order_relaxed) & (LOW(dev) | HIGH(dev)))
        compare_locked(dev, true);
}

/* Whether little room is left: then every growth must be charged at once, since another process of
 * the container cannot compare for this one. */
static bool is_near(int dev) {
    uint64_t limit = gs_limit(dev), used = gs_used(dev);
    return used >= limit || limit - used < GS_OVERHEAD_NEAR;
}

void gs_overhead_explain(int dev) {
    static _Atomic bool explained;
    if (!is_device(dev))
        return;
    struct overhead *o = &overhead[dev];
    uint64_t context = gs_region()->limits->device[dev].context_bytes;
    uint64_t takes = o->bytes;
    if ((takes > context ? takes : context) > gs_limit(dev) / 2 &&
        !atomic_exchange(&explained, true))
        gs_log("memory was refused",
               "the driver takes more than half of the limit for contexts, code and streams",
               "request more: PyTorch needs about 0.7 GiB before its first tensor");
}

bool gs_overhead_is_counted(int dev) {
    return is_device(dev) && atomic_load(&overhead[dev].counted);
}

void gs_overhead_begin(int dev) {
    if (!is_device(dev) || atomic_exchange(&overhead[dev].begun, true))
        return;
    gs_charge_anyway(dev, of_init(dev));
}

/* ---- contexts ---------------------------------------------------------------------------- */

uint64_t gs_overhead_before_context(int dev) {
    uint64_t bytes = 0;
    return is_device(dev) && gs_driver_count(dev, &bytes) == GS_NOT_COUNTED ? GS_NO_BYTES : bytes;
}

bool gs_overhead_of_context(int dev, uint64_t counted, uint64_t charge) {
    uint64_t bytes;
    if (!is_device(dev))
        return false;
    struct overhead *o = &overhead[dev];
    if (!atomic_load(&o->counted) &&
        (counted == GS_NO_BYTES || gs_driver_count(dev, &bytes) != GS_LISTED ||
         bytes < counted + LEAST_CONTEXT))
        return false;
    atomic_store(&o->counted, true);
    atomic_fetch_add(&o->pending, charge);
    return true;
}

void gs_overhead_contexts(int dev, int change) {
    if (!is_device(dev))
        return;
    atomic_fetch_add(&overhead[dev].contexts, (uint32_t)change);
    mark(dev);
    compare_locked(dev, true);
}

/* ---- calls that make the driver take memory ----------------------------------------------- */

static void grew(int dev, uint64_t bytes) {
    uint64_t pending = atomic_fetch_add(&overhead[dev].pending, bytes) + bytes;
    mark(dev);
    compare_locked(dev, pending >= LARGE || is_near(dev));
}

void gs_overhead_bound(int dev, int64_t bytes) {
    if (is_device(dev))
        atomic_fetch_add(&overhead[dev].bounds, (uint64_t)bytes);
}

uint64_t gs_growth_end(const struct gs_growth *growth, bool done) {
    int dev = growth->dev;
    gs_overhead_bound(dev, -(int64_t)growth->bound);
    bool counted = is_device(dev) && atomic_load(&overhead[dev].counted);
    if (!done || !counted) {
        gs_release(dev, growth->bound - (done ? growth->bytes : 0));
        return done ? growth->bytes : 0;
    }
    grew(dev, growth->bound);
    return 0;
}

uint64_t gs_overhead_grew(int dev, uint64_t model) {
    if (!is_device(dev))
        return 0;
    gs_charge_anyway(dev, model);
    if (!atomic_load(&overhead[dev].counted))
        return model;
    grew(dev, model);
    return 0;
}

uint64_t gs_overhead_number(int dev) {
    return is_device(dev) ? atomic_load(&overhead[dev].number) : 0;
}

void gs_overhead_undone(int dev, uint64_t number, uint64_t model) {
    if (!gs_overhead_is_counted(dev))
        return;
    struct overhead *o = &overhead[dev];
    gs_lock(&gs_self()->lock_overhead);
    if (atomic_load(&o->number) == number && atomic_load(&o->pending) >= model) {
        atomic_fetch_sub(&o->pending, model);
        gs_release(dev, model);
    }
    gs_unlock(&gs_self()->lock_overhead);
    gs_overhead_shrank(dev);
}

void gs_overhead_keeps(int dev, uint64_t bytes) {
    gs_charge_anyway(dev, bytes);
    atomic_fetch_add(&overhead[dev].pending, bytes);
    mark(dev);
}

void gs_overhead_shrank(int dev) {
    if (!is_device(dev) || !atomic_load(&overhead[dev].counted))
        return;
    mark(dev);
    compare_locked(dev, false);
}

void gs_overhead_unlisted(int dev, int64_t bytes) {
    if (is_device(dev))
        atomic_fetch_add(&overhead[dev].unlisted, (uint64_t)bytes);
}

/* ---- once a second ------------------------------------------------------------------------- */

bool gs_overhead_tick(void) {
    static unsigned seconds;
    uint32_t late = atomic_load(&gs_overhead_dirty) & GS_OVERHEAD_SECOND, now = 0;
    for (int dev = 0; dev < (int)GS_MAX_DEVICES; dev++)
        if (atomic_load(&overhead[dev].counted) && atomic_load(&overhead[dev].contexts))
            now |= HIGH(dev);
    atomic_fetch_or(&gs_overhead_dirty, now);
    seconds = late ? seconds + 1 : 0;
    if (seconds == LATE)
        atomic_store(&gs_overhead_is_late, true);
    return seconds == LATE;
}

void gs_overhead_second(void) {
    uint32_t dirty = atomic_load(&gs_overhead_dirty);
    atomic_store(&gs_overhead_is_late, false);
    for (int dev = 0; dev < (int)GS_MAX_DEVICES; dev++)
        if (dirty & HIGH(dev))
            compare_locked(dev, true);
}
