/* Threads that are changing what is charged: between the reservation and the driver's allocation,
 * or between the driver's free and the release. The driver's count compares with the charge only
 * while there are none (overhead.c), so a comparison holds them up for the moment of a query.
 *
 * An allocation pays for this with stores to a cache line of its thread's own. The barrier between
 * its store and its load of the gate is made by the thread that compares: membarrier (Linux 4.14).
 */
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "busy.h"
#include "gs.h"

#ifndef SYS_membarrier
#if defined(__x86_64__)
#define SYS_membarrier 324
#else
#define SYS_membarrier 283
#endif
#endif
#define PRIVATE_EXPEDITED (1 << 3)
#define REGISTER_PRIVATE_EXPEDITED (1 << 4)
#define SEATS 256u
#define LONGEST_NS 2000000u /* of waiting for a thread that stays in the driver */
#define HELD_UP_NS 20000000
#define PATIENCE 100u /* times HELD_UP_NS at most */

/* The last one is for all threads that find no other. */
static struct gs_seat seat[SEATS] = {[SEATS - 1] = {.shared = true}};
_Thread_local struct gs_seat *gs_own_seat;
_Atomic uint32_t gs_gate;       /* a futex: 1 while a thread compares */
_Atomic bool gs_busy_fences;    /* the kernel or a sandbox has no membarrier */
static _Atomic uint32_t passed; /* times that a thread went on although the gate was closed */
static uint32_t passed_before;  /* of the thread that compares */
static pthread_key_t at_exit_of_thread;
static _Atomic bool ready; /* threads have seats */

static void leave_seat(void *own) {
    struct gs_seat *s = own;
    gs_own_seat = NULL;
    atomic_store(&s->depth, 0);
    atomic_store(&s->taken, false);
}

void gs_busy_ready(void) {
    int saved = errno;
    if (!atomic_load(&ready) && pthread_key_create(&at_exit_of_thread, leave_seat) == 0) {
        atomic_store(&gs_busy_fences, syscall(SYS_membarrier, REGISTER_PRIVATE_EXPEDITED, 0) != 0);
        atomic_store(&ready, true);
    }
    errno = saved;
}

/* A seat of this thread's own, or the last one. */
struct gs_seat *gs_take_seat(void) {
    for (unsigned i = 0; atomic_load(&ready) && i < SEATS - 1; i++) {
        bool taken = false;
        if (!atomic_compare_exchange_strong(&seat[i].taken, &taken, true))
            continue;
        if (pthread_setspecific(at_exit_of_thread, &seat[i]) != 0) {
            atomic_store(&seat[i].taken, false);
            break;
        }
        return gs_own_seat = &seat[i];
    }
    return &seat[SEATS - 1];
}

/* The gate may be closed again before this thread goes on, and a signal ends the wait. A thread
 * that has waited for long goes on. */
void gs_wait_at_gate(struct gs_seat *s) {
    const struct timespec most = {.tv_nsec = HELD_UP_NS};
    int saved = errno;
    for (unsigned round = 0; atomic_load(&gs_gate) && gs_slot(); round++) {
        if (round == PATIENCE) {
            atomic_fetch_add(&passed, 1);
            break;
        }
        gs_busy_add(s, UINT32_MAX);
        syscall(SYS_futex, &gs_gate, FUTEX_WAIT | FUTEX_PRIVATE_FLAG, 1, &most, NULL, 0);
        gs_busy_add(s, 1);
        atomic_signal_fence(memory_order_seq_cst);
    }
    errno = saved;
}

uint32_t gs_busy_leave(void) {
    struct gs_seat *s = gs_own_seat;
    uint32_t depth = s ? atomic_load(&s->depth) : 0;
    if (depth)
        atomic_store(&s->depth, 0);
    return depth;
}

void gs_busy_return(uint32_t depth) {
    if (!depth)
        return;
    gs_busy_begin();
    gs_busy_add(gs_own_seat, depth - 1);
}

static bool others_are_idle(void) {
    for (unsigned i = 0; i < SEATS; i++)
        if (&seat[i] != gs_own_seat && atomic_load(&seat[i].depth))
            return false;
    return true;
}

bool gs_hold_others(void) {
    int saved = errno;
    uint64_t since_ns = gs_now_ns();
    passed_before = atomic_load(&passed);
    atomic_store(&gs_gate, 1);
    bool seen = atomic_load(&ready) && (atomic_load(&gs_busy_fences) ||
                                        syscall(SYS_membarrier, PRIVATE_EXPEDITED, 0) == 0);
    bool idle = seen && others_are_idle();
    while (seen && !idle && gs_now_ns() - since_ns < LONGEST_NS) {
        sched_yield();
        idle = others_are_idle();
    }
    errno = saved;
    return idle;
}

bool gs_others_are_held(void) {
    return atomic_load(&passed) == passed_before;
}

void gs_let_others_go(void) {
    int saved = errno;
    atomic_store(&gs_gate, 0);
    syscall(SYS_futex, &gs_gate, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, 1 << 30, NULL, NULL, 0);
    errno = saved;
}
