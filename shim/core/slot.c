/* A process's slot is held by a thread that does nothing else: when it ends, for whatever reason,
 * the kernel itself marks the slot's robust futex word. Nothing else shows a death at once:
 * descriptors survive in forked children and are closed by programs, pids differ between
 * namespaces, and a robust mutex of an ordinary thread is given up when that thread ends. */
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "overhead.h"

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif
#define PAGE 4096
#define STACK_BYTES ((size_t)128 << 10)
#define STACK_BYTES_MAX ((size_t)2 << 30)

_Atomic(struct gs_self *) gs_self_page;

static void wipe_in_child(void) {
    struct gs_self *self = atomic_load(&gs_self_page);
    for (size_t i = 0; self && i < sizeof(*self); i++)
        ((volatile char *)self)[i] = 0;
}

struct gs_self *gs_self(void) {
    struct gs_self *self = atomic_load_explicit(&gs_self_page, memory_order_acquire);
    if (self)
        return self;
    void *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return NULL;
    bool kernel_wipes = madvise(page, PAGE, MADV_WIPEONFORK) == 0; /* Linux 4.14 */
    struct gs_self *none = NULL;
    if (!atomic_compare_exchange_strong(&gs_self_page, &none, page)) {
        munmap(page, PAGE);
        return none;
    }
    if (!kernel_wipes)
        pthread_atfork(NULL, NULL, wipe_in_child);
    return page;
}

static long futex(_Atomic uint32_t *word, int op, uint32_t value) {
    return syscall(SYS_futex, word, op | FUTEX_PRIVATE_FLAG, value, NULL, NULL, 0);
}

static _Thread_local int uncancelled, cancel_state;

void gs_no_cancel(void) {
    if (uncancelled++ == 0)
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state);
}

void gs_cancel_again(void) {
    int ours;
    if (--uncancelled == 0)
        pthread_setcancelstate(cancel_state, &ours);
}

/* 0 free, 1 held, 2 held while another thread waits. errno belongs to the program and is kept. */
void gs_lock(_Atomic uint32_t *word) {
    uint32_t seen = 0;
    gs_no_cancel();
    if (atomic_compare_exchange_strong(word, &seen, 1))
        return;
    int saved = errno;
    while (atomic_exchange(word, 2) != 0)
        futex(word, FUTEX_WAIT, 2);
    errno = saved;
}

void gs_unlock(_Atomic uint32_t *word) {
    int saved = errno;
    if (atomic_exchange(word, 0) == 2)
        futex(word, FUTEX_WAKE, 1);
    gs_cancel_again();
    errno = saved;
}

/* The parked thread's robust list: one node, whose futex word is in the usage file. */
struct parked {
    struct robust_list_head head;
    struct robust_list node;
    const struct gs_view *view;
    struct gs_slot *slot;
    uint64_t started_ns;
    void (*changed)(void);
    uint32_t seen;         /* of the generation of limits, before anything was launched */
    _Atomic uint32_t done; /* 0 while claiming, 1 claimed, 2 failed */
};
static struct parked parked;
uint32_t gs_parked_tid;

static void fill(struct gs_slot *slot, uint32_t tid, uint64_t started_ns) {
    for (unsigned d = 0; d < GS_MAX_DEVICES; d++)
        __atomic_store_n(&slot->bytes[d], 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&slot->bounds, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&slot->wants, 0, __ATOMIC_SEQ_CST);
    for (unsigned d = 0; d < sizeof(slot->driver_mib) / sizeof(slot->driver_mib[0]); d++)
        slot->driver_mib[d] = 0;
    __atomic_store_n(&slot->generation, slot->generation + 1, __ATOMIC_SEQ_CST);
    slot->pid = (uint32_t)getpid();
    slot->started_ns = started_ns;
    __atomic_store_n(&slot->live, tid, __ATOMIC_SEQ_CST);
}

static void raise_high(struct gs_usage *usage, uint32_t high) {
    uint32_t seen = __atomic_load_n(&usage->slots_high, __ATOMIC_SEQ_CST);
    while (seen < high && !__atomic_compare_exchange_n(&usage->slots_high, &seen, high, false,
                                                       __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        ;
}

/* Claim one slot. At every instant a kill is safe: while the word may have become ours,
 * list_op_pending names it, and the kernel frees it if (and only if) it holds our thread id. */
static bool try_claim(struct parked *p, uint32_t index, uint32_t tid) {
    struct gs_slot *slot = &p->view->usage->slot[index];
    uint32_t seen = __atomic_load_n(&slot->owner, __ATOMIC_SEQ_CST);
    if (seen & GS_TID_MASK || gs_is_kept(p->view->usage, slot))
        return false;
    p->head.futex_offset = (long)((intptr_t)&slot->owner - (intptr_t)&p->node);
    atomic_signal_fence(memory_order_seq_cst);
    *(struct robust_list *volatile *)&p->head.list_op_pending = &p->node;
    atomic_signal_fence(memory_order_seq_cst);
    bool ours = __atomic_compare_exchange_n(&slot->owner, &seen, tid, false, __ATOMIC_SEQ_CST,
                                            __ATOMIC_SEQ_CST);
    if (ours) {
        __atomic_store_n(&slot->live, 0, __ATOMIC_SEQ_CST);
        p->node.next = &p->head.list;
        atomic_signal_fence(memory_order_seq_cst);
        *(struct robust_list *volatile *)&p->head.list.next = &p->node;
        atomic_signal_fence(memory_order_seq_cst);
    }
    *(struct robust_list *volatile *)&p->head.list_op_pending = NULL;
    if (!ours)
        return false;
    raise_high(p->view->usage, index + 1);
    fill(slot, tid, p->started_ns);
    p->slot = slot;
    return true;
}

/* Sleep until limits change, so that launches with a reserve of time see the change too. Every
 * second, count the memory that is held. A futex wait works on a read-only mapping; in a sandbox
 * without it, the thread sleeps on. */
static void sleep_on_changes(struct parked *p) {
    const uint32_t *word = (const uint32_t *)&p->view->limits->generation;
    const struct timespec second = {.tv_sec = 1};
    uint32_t seen = p->seen;
    for (;;) {
        long result = syscall(SYS_futex, word, FUTEX_WAIT, seen, &second, NULL, 0);
        int why = result == 0 ? 0 : errno;
        gs_suspension_tick(p->view, p->slot);
        gs_account_all();
        bool late = gs_overhead_tick();
        uint32_t now = __atomic_load_n(word, __ATOMIC_ACQUIRE);
        if (now != seen || late)
            p->changed();
        else if (why && why != EINTR && why != EAGAIN && why != ETIMEDOUT)
            return;
        seen = now;
    }
}

static void *park(void *arg) {
    struct parked *p = arg;
    uint32_t tid = (uint32_t)syscall(SYS_gettid);
    p->head.list.next = &p->head.list;
    bool claimed = false;
    if (syscall(SYS_set_robust_list, &p->head, sizeof(p->head)) == 0)
        for (uint32_t i = 0; i < GS_MAX_SLOTS && !claimed; i++)
            claimed = try_claim(p, i, tid);
    if (claimed) {
        gs_parked_tid = tid;
        gs_suspension_begin(p->view, p->slot);
    }
    atomic_store(&p->done, claimed ? 1 : 2);
    futex(&p->done, FUTEX_WAKE, 1);
    if (claimed)
        sleep_on_changes(p);
    while (claimed)
        futex(&p->done, FUTEX_WAIT, 1);
    return NULL;
}

/* Started with every signal blocked, so none of the program's handlers ever runs on it; the C
 * library's own two (setuid, cancellation) stay open, as pthread_sigmask sees to. The C library
 * takes the program's thread-local variables out of the stack, so a program with many of them
 * needs a larger one; what is never touched costs no memory. */
static bool start(struct parked *p) {
    pthread_attr_t attr;
    sigset_t all, before;
    pthread_t thread;
    int rc = EINVAL;
    if (pthread_attr_init(&attr) != 0)
        return false;
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (size_t bytes = STACK_BYTES; rc == EINVAL && bytes <= STACK_BYTES_MAX; bytes *= 4) {
        pthread_attr_setstacksize(&attr, bytes);
        rc = pthread_create(&thread, &attr, park, p);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    return rc == 0;
}

bool gs_slot_claim(const struct gs_view *view, void (*changed)(void)) {
    struct gs_self *self = gs_self();
    if (!self)
        return false;
    uint32_t seen = (uint32_t)__atomic_load_n(&view->limits->generation, __ATOMIC_ACQUIRE);
    parked =
        (struct parked){.view = view, .started_ns = gs_started(), .changed = changed, .seen = seen};
    if (!parked.started_ns || !start(&parked))
        return false;
    int saved = errno;
    while (atomic_load(&parked.done) == 0)
        futex(&parked.done, FUTEX_WAIT, 0);
    errno = saved;
    if (atomic_load(&parked.done) != 1) {
        gs_warn(GS_WARN_NO_SLOT);
        return false;
    }
    gs_account_all(); /* so that no time before this process counts for its memory */
    self->index = (uint32_t)(parked.slot - view->usage->slot);
    atomic_store_explicit(&self->slot, parked.slot, memory_order_release);
    return true;
}
