/* Room for what an allocation may add to a pool, reserved before the call to the driver.
 *
 * A pool grows in steps that are larger than most requests, so the bound of an allocation is its
 * size rounded up to the step. Near the limit there may be no room for a step although the pool has
 * enough unused memory. Then the allocation proceeds with nothing reserved if the pool cannot grow.
 * The pool has at most one gap per live allocation and one per growth, so the largest gap is at
 * least the unused bytes divided by their number (the pigeonhole principle), and a request that is
 * not larger fits. This holds only while no other thread allocates from the pool, so such a call
 * has the pool to itself. */
#include <sched.h>
#include <time.h>

#include "pool.h"

#define ALONE \
    UINT32_C(0x80000000) /* in busy: a call has, or is about to have, the pool to itself */
#define STEP_MIN (UINT64_C(32) << 20) /* the smallest growth step of known drivers */
#define STEP_MAX (UINT64_C(512) << 20)
#define SMALLEST 512u  /* sizes are rounded up to this within a pool */
#define PATIENCE 2000u /* times 50 us: a blocking driver must not make other calls wait forever */
#define SPINS 200u

/* The largest step seen on a device; 0 while no pool has grown there yet. */
static _Atomic uint64_t step_of[GS_MAX_DEVICES];

static void wait_a_little(unsigned round) {
    struct timespec nap = {.tv_nsec = 50000};
    if (round < SPINS)
        sched_yield();
    else
        nanosleep(&nap, NULL);
}

static bool enter(struct gs_pool *pool) {
    for (unsigned round = 0; round < PATIENCE; round++) {
        uint32_t seen = atomic_load(&pool->busy);
        while (!(seen & ALONE))
            if (atomic_compare_exchange_weak(&pool->busy, &seen, seen + 1))
                return true;
        wait_a_little(round);
    }
    return false;
}

static bool enter_alone(struct gs_pool *pool) {
    bool first = false;
    for (unsigned round = 0; round < PATIENCE; round++) {
        if (!first)
            first = !(atomic_fetch_or(&pool->busy, ALONE) & ALONE);
        if (first && atomic_load(&pool->busy) == ALONE)
            return true;
        wait_a_little(round);
    }
    if (first)
        atomic_fetch_and(&pool->busy, ~ALONE);
    return false;
}

static void leave(struct gs_room *room) {
    if (room->alone)
        atomic_fetch_and(&room->pool->busy, ~ALONE);
    else
        atomic_fetch_sub(&room->pool->busy, 1);
}

static bool reserve_bound(struct gs_room *room, uint64_t bytes) {
    room->bound = gs_bound(room->pool->dev, bytes);
    if (room->bound)
        room->bytes = bytes;
    return room->bound;
}

/* While the step is unknown, reserve as much as there is room for: whatever the driver then
 * reserves is seen, and stays within the limit. */
static bool reserve_step(struct gs_room *room) {
    int dev = room->pool->dev;
    if (dev < 0)
        return false;
    if (room->pool->graph)
        return reserve_bound(room, gs_round_up(room->asked, GS_BLOCK));
    uint64_t known = atomic_load_explicit(&step_of[dev], memory_order_relaxed);
    for (uint64_t step = known ? known : STEP_MAX; step >= STEP_MIN; step /= 2) {
        if (reserve_bound(room, gs_round_up(room->asked, step)))
            return true;
        if (known)
            break;
    }
    return false;
}

static bool fits_in_unused(const struct gs_room *room) {
    const struct gs_pool *pool = room->pool;
    struct gs_pool_state_now now;
    if (!gs_pool_ask(pool, &now) || now.used > now.reserved)
        return false;
    uint64_t unused = now.reserved - now.used;
    if (pool->graph) /* mapped wherever it is needed, so gaps do not matter */
        return (room->exec && atomic_load(&pool->last) == room->exec) || room->asked <= unused;
    uint64_t grown = atomic_load(&pool->growths), most = now.reserved / GS_BLOCK;
    uint64_t gaps = atomic_load(&pool->live) + (grown < most ? grown : most);
    return now.reuses && gaps && gs_round_up(room->asked, SMALLEST) <= unused / gaps;
}

/* Above a limit that was lowered, unused memory of a pool is returned to the driver, not reused. */
static bool make_room(struct gs_room *room) {
    if (!(gs_limits_changed() && gs_over_lastingly(room->pool->dev)) && fits_in_unused(room))
        return true;
    if (room->asked > gs_limit(room->pool->dev))
        return false;
    gs_overhead_refusing(room->pool->dev);
    gs_pools_settle(room->pool->dev);
    if (reserve_step(room))
        return true;
    gs_pools_trim(room->pool->dev);
    return reserve_step(room);
}

CUresult gs_room_begin(struct gs_room *room, struct gs_pool *pool, uint64_t bytes, uint64_t exec) {
    *room = (struct gs_room){.pool = pool, .asked = bytes, .exec = exec};
    if (enter(pool)) {
        if (reserve_step(room))
            return CUDA_SUCCESS;
        leave(room);
        room->alone = enter_alone(pool);
        if (room->alone && make_room(room))
            return CUDA_SUCCESS;
        if (room->alone)
            leave(room);
    }
    if (pool->graph || !gs_virtual_has(pool->dev))
        gs_count_refusal(pool->dev);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Learn the smallest power of two that explains a growth. */
static void learn_step(const struct gs_room *room, uint64_t grown) {
    _Atomic uint64_t *known = &step_of[room->pool->dev];
    uint64_t step = atomic_load(known), seen = step;
    if (step < STEP_MIN)
        step = STEP_MIN;
    while (step < STEP_MAX && gs_round_up(room->asked, step) < grown)
        step *= 2;
    if (step > seen)
        atomic_compare_exchange_strong(known, &seen, step);
}

/* Settle before the bound is released, so that the bytes are counted at any time. Each call in the
 * pool has grown it at most once, so it has at most as many new gaps. */
bool gs_room_end(struct gs_room *room) {
    struct gs_pool *pool = room->pool;
    uint64_t grown = gs_pool_settle(pool);
    if (grown) {
        uint32_t calls = atomic_load(&pool->busy) & ~ALONE;
        atomic_fetch_add(&pool->growths, room->alone ? 1 : calls);
        if (!pool->graph && pool->dev >= 0 && (room->alone || calls == 1))
            learn_step(room, grown);
    }
    if (room->bound)
        gs_bound_end(pool->dev, room->bytes);
    leave(room);
    return grown > room->bytes && gs_over(pool->dev);
}
