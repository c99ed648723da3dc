/* Threads that are changing what is charged (busy.c). */
#ifndef GPUSHARE_BUSY_H
#define GPUSHARE_BUSY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct gs_seat {
    _Alignas(64) _Atomic uint32_t depth; /* calls that a thread is in; they nest */
    _Atomic bool taken;
    bool shared; /* by all threads that have no seat of their own */
};
extern _Thread_local struct gs_seat *gs_own_seat __attribute__((visibility("hidden")));
extern _Atomic bool gs_busy_fences __attribute__((visibility("hidden")));
extern _Atomic uint32_t gs_gate __attribute__((visibility("hidden")));

/* Called by cuInit. */
void gs_busy_ready(void);
struct gs_seat *gs_take_seat(void);
void gs_wait_at_gate(struct gs_seat *s);

static inline void gs_busy_add(struct gs_seat *s, uint32_t change) {
    if (__builtin_expect(s->shared, 0))
        atomic_fetch_add(&s->depth, change);
    else
        atomic_store_explicit(&s->depth,
                              atomic_load_explicit(&s->depth, memory_order_relaxed) + change,
                              memory_order_release);
}

static inline struct gs_seat *gs_busy_begin(void) {
    struct gs_seat *s = gs_own_seat;
    if (__builtin_expect(!s, 0))
        s = gs_take_seat();
    gs_busy_add(s, 1);
    atomic_signal_fence(memory_order_seq_cst);
    if (__builtin_expect(atomic_load_explicit(&gs_busy_fences, memory_order_relaxed), 0))
        atomic_thread_fence(memory_order_seq_cst);
    if (__builtin_expect(atomic_load_explicit(&gs_gate, memory_order_relaxed), 0) &&
        atomic_load_explicit(&s->depth, memory_order_relaxed) == 1)
        gs_wait_at_gate(s);
    return s;
}

static inline void gs_busy_end(struct gs_seat **s) {
    gs_busy_add(*s, UINT32_MAX);
}

/* First in a function that charges or releases, and calls the driver in between. */
#define GS_CHANGES \
    __attribute__((cleanup(gs_busy_end), unused)) struct gs_seat *changes_ = gs_busy_begin()

/* Wait until no other thread is in such a call, and make threads wait that begin one. Return false
 * if one stays in the driver. Afterwards call gs_let_others_go. */
bool gs_hold_others(void);
/* Return false if a thread has begun such a call since. */
bool gs_others_are_held(void);
void gs_let_others_go(void);
/* While a thread waits for its turn to compare, it is in no such call. The second waits at the gate
 * if need be. */
uint32_t gs_busy_leave(void);
void gs_busy_return(uint32_t depth);

#endif
