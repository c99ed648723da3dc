/* Reserve, then check. There is no shared total: a reservation adds to this process's own counter
 * and then reads all counters (both seq_cst). Of any set of grants that are out at one time, the
 * one that added last has read all the others, so their sum is within the limit. A crash loses
 * nothing, since a dead process's counter counts as zero. */
#include <errno.h>
#include <time.h>

#include "gs.h"

#define ATTEMPTS 6
#define REFUSALS 2        /* checks without room before the reservation fails */
#define PATIENCE 200u     /* times 50 us and more */
#define LARGE (16u << 20) /* bytes of a change that are counted at once */
#define LASTING 20u       /* times 50 us and more */

#define LOAD(member) __atomic_load_n(member, __ATOMIC_RELAXED)

static bool is_oversubscribed(const struct gs_limits *limits, const struct gs_limit_now *now) {
    return limits->n_devices <= GS_MAX_DEVICES / 2 && now->flags & GS_DEVICE_OVERSUBSCRIBE &&
           (now->virtual_bytes > now->memory_bytes || now->flags & GS_DEVICE_LENT);
}

/* The limit of the host part with that number; 0 if its device has none. */
static uint64_t host_limit(const struct gs_limits *limits, unsigned part) {
    unsigned dev = GS_HOST_PART(part);
    if (part >= GS_MAX_DEVICES || dev >= limits->n_devices)
        return 0;
    struct gs_limit_now now = gs_limit_now(limits, dev);
    return is_oversubscribed(limits, &now) ? now.virtual_bytes - now.memory_bytes : 0;
}

/* On the device. */
static uint64_t limit_in_force(const struct gs_limit_now *now) {
    return now->flags & GS_DEVICE_LENDING ? now->virtual_bytes : now->memory_bytes;
}

uint64_t gs_limit(int dev) {
    const struct gs_view *view = gs_region();
    if (!view || dev < 0)
        return 0;
    if ((uint32_t)dev >= view->limits->n_devices)
        return host_limit(view->limits, (unsigned)dev);
    const struct gs_device_limit *l = &view->limits->device[dev];
    bool first = __atomic_load_n(&view->limits->generation, __ATOMIC_SEQ_CST) & 1;
    if (LOAD(first ? &l->flags : &l->next_flags) & GS_DEVICE_LENDING)
        return __atomic_load_n(first ? &l->memory_virtual_bytes : &l->next_memory_virtual_bytes,
                               __ATOMIC_SEQ_CST);
    return __atomic_load_n(first ? &l->memory_limit_bytes : &l->next_memory_limit_bytes,
                           __ATOMIC_SEQ_CST);
}

/* Read again after a change in between: the host writes only the copy that is not in force. */
struct gs_limit_now gs_limit_stated(const struct gs_limits *limits, unsigned dev) {
    const struct gs_device_limit *l = &limits->device[dev];
    struct gs_limit_now now;
    do {
        now.generation = __atomic_load_n(&limits->generation, __ATOMIC_ACQUIRE);
        bool first = now.generation & 1;
        now.memory_bytes = LOAD(first ? &l->memory_limit_bytes : &l->next_memory_limit_bytes);
        now.virtual_bytes = LOAD(first ? &l->memory_virtual_bytes : &l->next_memory_virtual_bytes);
        now.percent = LOAD(first ? &l->compute_percent : &l->next_compute_percent);
        now.priority = LOAD(first ? &l->priority : &l->next_priority);
        now.weight = LOAD(first ? &l->weight : &l->next_weight);
        now.flags = LOAD(first ? &l->flags : &l->next_flags);
        atomic_thread_fence(memory_order_acquire);
    } while (LOAD(&limits->generation) != now.generation);
    return now;
}

/* Under MPS the driver enforces the percentage: contexts run at the same time, which the rate
 * limiter does not account for. */
struct gs_limit_now gs_limit_now(const struct gs_limits *limits, unsigned dev) {
    struct gs_limit_now now = gs_limit_stated(limits, dev);
    if (limits->mps_device == dev + 1) {
        now.percent = GS_NO_PERCENT;
        now.flags &= ~(uint32_t)GS_DEVICE_COMPUTE_SOFT;
    }
    return now;
}

bool gs_limits_changed(void) {
    const struct gs_view *view = gs_region();
    return view && LOAD(&view->limits->generation) > 1;
}

/* Whether the parked thread lives and has finished claiming the slot (see gpushare_abi.h). */
bool gs_alive(const struct gs_slot *slot) {
    uint32_t tid = __atomic_load_n(&slot->owner, __ATOMIC_SEQ_CST) & GS_TID_MASK;
    return tid != 0 && __atomic_load_n(&slot->live, __ATOMIC_SEQ_CST) == tid;
}

/* Forked children inherit the driver's descriptors, and the driver frees nothing of a process
 * before the last of them is closed. A child that closes them, but neither ends nor executes a
 * program, counts too. Once no child is left, there is none for good: one system call for each dead
 * process.
 */
bool gs_is_kept(const struct gs_usage *usage, const struct gs_slot *slot) {
    static _Atomic uint32_t ended[GS_MAX_SLOTS]; /* the generation of a slot without children */
    _Atomic uint32_t *known = &ended[slot - usage->slot];
    uint32_t generation = __atomic_load_n(&slot->generation, __ATOMIC_SEQ_CST);
    bool holds = false;
    for (unsigned d = 0; d < GS_MAX_DEVICES; d++)
        holds |= __atomic_load_n(&slot->bytes[d], __ATOMIC_SEQ_CST) != 0;
    if (!holds || generation == atomic_load_explicit(known, memory_order_relaxed))
        return false;
    if (gs_has_children(__atomic_load_n(&slot->started_ns, __ATOMIC_SEQ_CST)))
        return true;
    atomic_store_explicit(known, generation, memory_order_relaxed);
    return false;
}

static uint32_t slots_high(const struct gs_usage *usage) {
    uint32_t high = __atomic_load_n(&usage->slots_high, __ATOMIC_SEQ_CST);
    return high < GS_MAX_SLOTS ? high : GS_MAX_SLOTS; /* any process of the tenant can write it */
}

/* `bytes` and the memory that only importers still hold; UINT64_MAX if the sum has no 64 bits. */
static uint64_t with_orphans(const struct gs_usage *usage, int dev, uint64_t bytes) {
    if (__builtin_expect(__atomic_load_n(&usage->shares_used, __ATOMIC_SEQ_CST) == 0, 1))
        return bytes;
    uint64_t orphans = gs_export_orphans(usage, dev);
    return bytes + orphans < bytes ? UINT64_MAX : bytes + orphans;
}

/* The bytes of all processes, exited ones included. The loop has no branch: whether another process
 * holds memory changes at random, and a branch on it takes 60 ns of an allocation beside seven
 * processes. */
static uint64_t sum_all(const struct gs_usage *usage, int dev) {
    uint64_t total = 0;
    uint32_t high = slots_high(usage);
    bool overflow = false;
    for (uint32_t i = 0; i < high; i++) {
        uint64_t bytes = __atomic_load_n(&usage->slot[i].bytes[dev], __ATOMIC_SEQ_CST);
        overflow |= __builtin_add_overflow(total, bytes, &total);
    }
    return with_orphans(usage, dev, overflow ? UINT64_MAX : total);
}

static uint64_t sum_living(const struct gs_usage *usage, int dev) {
    uint64_t total = 0;
    uint32_t high = slots_high(usage);
    for (uint32_t i = 0; i < high; i++) {
        const struct gs_slot *slot = &usage->slot[i];
        uint64_t bytes = __atomic_load_n(&slot->bytes[dev], __ATOMIC_SEQ_CST);
        if (bytes == 0 || !(gs_alive(slot) || gs_is_kept(usage, slot)))
            continue;
        if (__builtin_add_overflow(total, bytes, &total))
            return UINT64_MAX;
    }
    return with_orphans(usage, dev, total);
}

uint64_t gs_used(int dev) {
    const struct gs_view *view = gs_region();
    return view && dev >= 0 && (unsigned)dev < GS_MAX_DEVICES ? sum_living(view->usage, dev) : 0;
}

/* Both limits, read consistently: the residency boundary may be moving. */
struct gs_whole gs_whole(int dev) {
    const struct gs_view *view = gs_region();
    struct gs_whole whole = {.used = gs_used(dev)};
    if (!view || dev < 0 || (uint32_t)dev >= view->limits->n_devices)
        return whole;
    struct gs_limit_now now = gs_limit_now(view->limits, (unsigned)dev);
    uint64_t most = limit_in_force(&now);
    whole.request = now.memory_bytes == GS_UNLIMITED ? 0 : now.memory_bytes;
    whole.limit = now.flags & GS_DEVICE_LENT ? now.virtual_bytes : now.memory_bytes;
    whole.oversubscribed = is_oversubscribed(view->limits, &now);
    if (whole.oversubscribed) {
        whole.limit = most = now.virtual_bytes;
        whole.used += gs_used(gs_host_part(dev));
    }
    whole.left = whole.used < most ? most - whole.used : 0;
    return whole;
}

/* Check for exited processes only if needed: the first sum counts every slot. */
static bool within(const struct gs_usage *usage, int dev, uint64_t limit, uint64_t *all) {
    *all = sum_all(usage, dev);
    return *all <= limit || sum_living(usage, dev) <= limit;
}

static bool both_within(const struct gs_usage *usage, int dev, uint64_t limit) {
    uint64_t (*const sums[])(const struct gs_usage *, int) = {sum_all, sum_living};
    for (int i = 0; i < 2; i++) {
        uint64_t one = sums[i](usage, dev);
        if (one <= limit && sums[i](usage, gs_host_part(dev)) <= limit - one)
            return true;
    }
    return false;
}

/* The limit of an oversubscribed share on both parts together. `dev`: one of them. */
static uint64_t whole_limit(const struct gs_limits *limits, int dev) {
    unsigned device = (unsigned)dev < limits->n_devices ? (unsigned)dev : GS_HOST_PART(dev);
    if (device >= limits->n_devices || limits->n_devices > GS_MAX_DEVICES / 2)
        return GS_UNLIMITED;
    const struct gs_device_limit *l = &limits->device[device];
    if (!((LOAD(&l->flags) | LOAD(&l->next_flags)) & GS_DEVICE_OVERSUBSCRIBE))
        return GS_UNLIMITED;
    struct gs_limit_now now = gs_limit_now(limits, device);
    return now.flags & GS_DEVICE_OVERSUBSCRIBE ? now.virtual_bytes : GS_UNLIMITED;
}

/* Whether `bytes` more fit. Also check both parts together: after the residency boundary moved, one
 * part may still hold its earlier bytes, so each has room although the sum does not. `all`: what
 * all processes hold, exited ones included. */
static bool has_room(const struct gs_view *view, int dev, uint64_t limit, uint64_t bytes,
                     bool moves, uint64_t *all) {
    if (bytes > limit || !within(view->usage, dev, limit - bytes, all))
        return false;
    uint64_t whole = moves ? GS_UNLIMITED : whole_limit(view->limits, dev);
    return whole == GS_UNLIMITED ||
           (bytes <= whole && both_within(view->usage, dev, whole - bytes));
}

bool gs_over(int dev) {
    const struct gs_view *view = gs_region();
    uint64_t all;
    return view && !(dev >= 0 && within(view->usage, dev, gs_limit(dev), &all));
}

bool gs_over_lastingly(int dev) {
    const struct timespec nap = {.tv_nsec = 50000};
    int saved = errno;
    bool over = gs_over(dev);
    for (unsigned round = 0; over && round < LASTING; round++) {
        nanosleep(&nap, NULL);
        over = gs_over(dev);
    }
    errno = saved;
    return over;
}

/* Two threads that reserve at once can refuse each other. The delay depends on the slot, so they
 * separate after a few rounds. */
static void back_off(const struct gs_usage *usage, const struct gs_slot *slot, unsigned attempt) {
    unsigned spins = (32u << attempt) + (unsigned)(slot - usage->slot) % 8u * (16u << attempt);
    for (volatile unsigned i = 0; i < spins; i++)
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    ;
}

/* Count the memory held so far before a large change. The parked thread counts small ones, each
 * wrong by a second at most: reading the clock here would make each of them some 20 % slower. */
static void account(int dev, uint64_t bytes) {
    if (bytes >= LARGE)
        gs_account(dev);
}

static bool reserve(int dev, uint64_t bytes, bool moves) {
    struct gs_slot *slot = gs_slot();
    const struct gs_view *view = gs_region();
    if (!slot || dev < 0)
        return false;
    if (bytes == 0) /* allowed even if a limit was lowered below the use */
        return true;
    /* A seccomp filter of the program can end the parked thread alone. From then on nothing that
     * this process holds is counted. */
    if (bytes >= GS_NO_BYTES ||
        __builtin_expect(__atomic_load_n(&slot->owner, __ATOMIC_SEQ_CST) != gs_parked_tid, 0))
        return false;
    uint64_t all = 0;
    for (unsigned attempt = 0, refusals = 0; attempt < ATTEMPTS; attempt++) {
        if (attempt)
            back_off(view->usage, slot, attempt);
        /* Check first: a reservation that is bound to fail would make concurrent ones fail too. */
        uint64_t limit = gs_limit(dev);
        bool fits = has_room(view, dev, limit, bytes, moves, &all);
        bool near = all + bytes + GS_OVERHEAD_NEAR > limit;
        if (__builtin_expect(near && !moves && !attempt &&
                                 atomic_load_explicit(&gs_overhead_dirty, memory_order_relaxed),
                             0)) {
            gs_overhead_settle(dev);
            fits = has_room(view, dev, limit, bytes, moves, &all);
        }
        if (!fits) {
            if (++refusals == REFUSALS)
                return false;
            continue;
        }
        account(dev, bytes);
        __atomic_fetch_add(&slot->bytes[dev], bytes, __ATOMIC_SEQ_CST);
        /* Read the limit after the addition: a host that lowers the limit and then reads the use
         * sees everything that the earlier limit allowed. */
        if (has_room(view, dev, gs_limit(dev), 0, moves, &all)) {
            if (all >
                atomic_load_explicit(&view->usage->account[dev].peak_bytes, memory_order_relaxed))
                gs_account_peak(dev);
            return true;
        }
        __atomic_fetch_sub(&slot->bytes[dev], bytes, __ATOMIC_SEQ_CST);
    }
    return false;
}

bool gs_reserve(int dev, uint64_t bytes) {
    return reserve(dev, bytes, false);
}

bool gs_reserve_moved(int dev, uint64_t bytes) {
    return reserve(dev, bytes, true);
}

bool gs_bound(int dev, uint64_t bytes) {
    struct gs_slot *slot = gs_slot();
    if (!slot)
        return false;
    __atomic_fetch_add(&slot->bounds, bytes, __ATOMIC_SEQ_CST);
    if (gs_reserve(dev, bytes))
        return true;
    __atomic_fetch_sub(&slot->bounds, bytes, __ATOMIC_SEQ_CST);
    return false;
}

void gs_bound_end(int dev, uint64_t bytes) {
    struct gs_slot *slot = gs_slot();
    gs_release(dev, bytes);
    if (slot)
        __atomic_fetch_sub(&slot->bounds, bytes, __ATOMIC_SEQ_CST);
}

/* Whether it would fit without the bounds of running calls. They are read first: a bound that is
 * released in between makes this true, which costs the caller one more round. */
static bool only_bounds(const struct gs_usage *usage, int dev, uint64_t bytes) {
    uint64_t limit = gs_limit(dev), bounds = 0;
    uint32_t high = slots_high(usage);
    for (uint32_t i = 0; i < high; i++) {
        uint64_t of_slot = __atomic_load_n(&usage->slot[i].bounds, __ATOMIC_SEQ_CST);
        if (of_slot && gs_alive(&usage->slot[i]))
            bounds += of_slot;
    }
    uint64_t used = sum_living(usage, dev);
    return bytes <= limit && (bounds >= used || used - bounds <= limit - bytes);
}

/* A thread that holds a bound is inside the driver and never waits for this thread. */
bool gs_reserve_patiently(int dev, uint64_t bytes) {
    const struct timespec nap = {.tv_nsec = 50000};
    const struct gs_view *view = gs_region();
    int saved = errno;
    bool fits = false, hope = view && dev >= 0;
    for (unsigned round = 0; hope && !fits && round < PATIENCE; round++) {
        if (round)
            nanosleep(&nap, NULL);
        hope = only_bounds(view->usage, dev, bytes);
        fits = gs_reserve(dev, bytes);
    }
    errno = saved;
    return fits;
}

void gs_charge_anyway(int dev, uint64_t bytes) {
    struct gs_slot *slot = gs_slot();
    if (!slot || dev < 0)
        return;
    account(dev, bytes);
    __atomic_fetch_add(&slot->bytes[dev], bytes, __ATOMIC_SEQ_CST);
    gs_account_peak(dev);
}

void gs_release(int dev, uint64_t bytes) {
    struct gs_slot *slot = gs_slot();
    if (!slot || dev < 0 || !bytes)
        return;
    account(dev, bytes);
    __atomic_fetch_sub(&slot->bytes[dev], bytes, __ATOMIC_SEQ_CST);
}

void gs_count_refusal(int dev) {
    const struct gs_view *view = gs_region();
    if (!view || dev < 0)
        return;
    __atomic_fetch_add(&view->usage->refused[dev], 1, __ATOMIC_RELAXED);
    gs_overhead_explain(dev);
}

void gs_warn(uint32_t warning) {
    const struct gs_view *view = gs_region();
    if (view)
        __atomic_fetch_or(&view->usage->warnings, warning, __ATOMIC_RELAXED);
}

unsigned gs_processes(int dev, void (*each)(uint32_t pid, uint64_t bytes, void *arg), void *arg) {
    const struct gs_view *view = gs_region();
    unsigned found = 0;
    if (!view || dev < 0 || (unsigned)dev >= GS_MAX_DEVICES)
        return 0;
    uint32_t high = slots_high(view->usage);
    for (uint32_t i = 0; i < high; i++) {
        const struct gs_slot *slot = &view->usage->slot[i];
        uint64_t bytes = __atomic_load_n(&slot->bytes[dev], __ATOMIC_SEQ_CST);
        if (gs_limit(gs_host_part(dev)))
            bytes += __atomic_load_n(&slot->bytes[GS_HOST_PART((unsigned)dev)], __ATOMIC_SEQ_CST);
        if (bytes == 0 || !gs_alive(slot))
            continue;
        found++;
        if (each)
            each(slot->pid, bytes, arg);
    }
    return found;
}
