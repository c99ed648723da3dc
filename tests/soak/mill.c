/* Processes of many threads that allocate and free memory, launch, fork and die, all at one limit.
 *
 *   mill PROCESSES THREADS SEED [KILL_MS [ENOUGH]]
 *
 * Each process has a context and THREADS threads at random work. Every 50 ms, or KILL_MS (0:
 * never), one process is killed and replaced. A byte on standard input, or ENOUGH allocations and
 * some launches, ends that phase: no process dies or changes anything, all read the container's
 * use, and one line of JSON reports the work. They keep their memory until standard input ends. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../shim/families.h"

#define MAX_PROCESSES 128
#define MAX_THREADS 64
#define LIVE 8
#define MAX_BYTES (64 * MIB)
#define LOOK_EVERY_MS 50
#define QUIET_MS 120000

struct board {
    _Atomic int stop;
    _Atomic unsigned long granted, refused, launched, forks, killed, starts, no_room;
    _Atomic int wrong; /* results with an unknown cause */
    char where[64];
    _Atomic unsigned long used[MAX_PROCESSES];
};
static struct board *board;
enum gate { LOOK, LOOK_AGAIN, END, GATES };
static int gate[GATES][2]; /* from the parent, to all: closed when it opens */
static int done[2];        /* to the parent: one byte for each step of each process */
static CUcontext context;
static CUfunction kernel;
static uint64_t seed;

static void wrong(CUresult result, const char *what, const char *which) {
    int none = 0;
    if (atomic_compare_exchange_strong(&board->wrong, &none, (int)result))
        snprintf(board->where, sizeof(board->where), "%s %s", what, which);
}

struct thread {
    pthread_t id;
    uint64_t state;
    struct held live[LIVE];
    unsigned n;
};

static uint64_t chance(struct thread *t) {
    t->state ^= t->state << 13, t->state ^= t->state >> 7, t->state ^= t->state << 17;
    return t->state;
}

static void give_one(struct thread *t) {
    unsigned at = (unsigned)(chance(t) % t->n);
    struct held held = t->live[at];
    t->live[at] = t->live[--t->n];
    CUresult result = held.family->give(&held);
    if (result)
        wrong(result, "give", held.family->name);
}

static void take_one(struct thread *t) {
    static const char *const names[] = {"plain", "pitch", "managed", "array", "mipmap", "vmm"};
    const struct family *family = family_of(names[chance(t) % (sizeof names / sizeof *names)]);
    size_t top = 1ull << (chance(t) % 27), bytes = top + chance(t) % top;
    CUresult result = take(family, bytes > MAX_BYTES ? MAX_BYTES : bytes, &t->live[t->n]);
    if (result == CUDA_SUCCESS)
        t->n++, board->granted++;
    else if (result == CUDA_ERROR_OUT_OF_MEMORY)
        board->refused++;
    else
        wrong(result, "take", family->name);
}

static void launch(struct thread *t) {
    CUresult result = cuLaunchKernel(kernel, 64, 1, 1, 64, 1, 1, 0, work_stream, NULL, NULL);
    board->launched++;
    if (!result && chance(t) % 4 == 0)
        result = cuStreamSynchronize(work_stream);
    if (result)
        wrong(result, "launch", "");
}

#ifndef PLACES /* of prefetches: also to the host, unless the device's contents are compared */
#define PLACES CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE
#endif

/* Give a hint, which may be invalid for memory that is not managed. */
static void prefetch_one(struct thread *t) {
    static const CUmemLocationType places[] = {PLACES};
    const struct held *held = &t->live[chance(t) % t->n];
    CUmemLocation place = {.type = places[chance(t) % 2]};
    CUresult result =
        held->address ? cuMemPrefetchAsync(held->address, held->bytes, place, 0, NULL) : 0;
    if (!result && chance(t) % 4 == 0)
        result = cuCtxSynchronize();
    if (result && result != CUDA_ERROR_INVALID_VALUE)
        wrong(result, "prefetch", held->family->name);
}

/* A forked child has no context and no share; it ends, and its parent's stay. */
static void fork_once(void) {
    int status = -1;
    pid_t child = fork();
    if (child == 0) {
        CUdeviceptr address;
        _exit(cuMemAlloc(&address, BLOCK) == CUDA_ERROR_NOT_INITIALIZED ? 0 : 1);
    }
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR)
        ;
    board->forks++;
    if (status != 0)
        wrong((CUresult)(status ? status : -1), "fork", "");
}

#ifdef PLANTED /* a race, to test the detectors */
static unsigned long turns;
#endif

static void *turn(void *argument) {
    struct thread *t = argument;
    CUresult result = cuCtxSetCurrent(context);
    if (result)
        wrong(result, "cuCtxSetCurrent", "");
    while (!board->stop && !board->wrong) {
        unsigned what = (unsigned)(chance(t) % 1000);
#ifdef PLANTED
        turns++;
#endif
        if (what < 3)
            fork_once();
        else if (what < 150)
            launch(t);
        else if (t->n && what < 220)
            prefetch_one(t);
        else if (t->n == LIVE || (t->n && what < 550))
            give_one(t);
        else
            take_one(t);
    }
    return NULL;
}

static void step(enum gate which) {
    char byte;
    while (write(done[1], "", 1) < 0 && errno == EINTR)
        ;
    while (read(gate[which][0], &byte, 1) < 0 && errno == EINTR)
        ;
}

static void look(unsigned index) {
    size_t free = 0, total = 0;
    CUresult result = cuMemGetInfo(&free, &total);
    if (result)
        wrong(result, "cuMemGetInfo", "");
    board->used[index] = total - free;
}

static void work(unsigned index, unsigned threads, uint64_t number) {
    static struct thread all[MAX_THREADS];
    CUmodule module;
    CUresult result = start(0);
    if (!result)
        result = cuModuleLoadData(&module, "SIMMOD globals=0 code=4096\n");
    if (!result)
        result = cuModuleGetFunction(&kernel, module, "spin_us_500");
    if (result == CUDA_ERROR_OUT_OF_MEMORY) { /* the limit is reached: the next one tries */
        board->no_room++;
        _exit(1);
    }
    if (!result)
        result = cuCtxGetCurrent(&context);
    if (result)
        wrong(result, "start", "");
    board->starts++;
    for (unsigned i = 0; i < threads; i++) {
        all[i].state = (seed + number * MAX_THREADS + i + 1) * 0x9e3779b97f4a7c15ull;
        if (pthread_create(&all[i].id, NULL, turn, &all[i]))
            wrong((CUresult)-1, "pthread_create", "");
    }
    for (unsigned i = 0; i < threads; i++)
        pthread_join(all[i].id, NULL);
    cuCtxSynchronize();
    step(LOOK);
    look(index);
    step(LOOK_AGAIN);
    look(index);
    step(END);
    _exit(0);
}

static pid_t pids[MAX_PROCESSES];

static void begin(unsigned index, unsigned threads) {
    static uint64_t number;
    number++;
    if ((pids[index] = fork()) != 0)
        return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (unsigned g = 0; g < GATES; g++)
        close(gate[g][1]);
    work(index, threads, number);
}

/* Replace ended processes. In a container orphans are included. */
static void replace(unsigned processes, unsigned threads, int again) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
        for (unsigned i = 0; i < processes; i++)
            if (pids[i] == pid) {
                if (WIFSIGNALED(status) && WTERMSIG(status) != SIGKILL)
                    wrong((CUresult)WTERMSIG(status), "signal", "");
                pids[i] = 0;
                if (again)
                    begin(i, threads);
            }
}

static int is_enough(unsigned long enough) {
    return enough && board->granted >= enough && board->launched >= enough / 20 && board->forks;
}

static void churn(unsigned processes, unsigned threads, int kill_ms, unsigned long enough,
                  struct thread *dice) {
    struct pollfd input = {.fd = 0, .events = POLLIN};
    while (poll(&input, 1, kill_ms ? kill_ms : LOOK_EVERY_MS) == 0 && !board->wrong &&
           !is_enough(enough)) {
        pid_t victim = kill_ms ? pids[chance(dice) % processes] : 0;
        if (victim > 0 && !kill(victim, SIGKILL))
            board->killed++;
        replace(processes, threads, 1);
    }
}

/* One step of each living process; a process without memory never gets this far. */
static void wait_for_all(unsigned processes, unsigned threads) {
    unsigned steps = 0;
    struct pollfd some = {.fd = done[0], .events = POLLIN};
    char byte;
    for (int waited = 0; waited < QUIET_MS;) {
        unsigned alive = 0;
        replace(processes, threads, 0);
        for (unsigned i = 0; i < processes; i++)
            alive += pids[i] > 0;
        if (steps >= alive)
            return;
        if (poll(&some, 1, 10) == 1)
            steps += read(done[0], &byte, 1) == 1;
        else
            waited += 10;
    }
    wrong((CUresult)-1, "stuck", "");
}

static void print_report(unsigned processes) {
    const char *comma = "";
    printf("{\"granted\": %lu, \"refused\": %lu, \"launched\": %lu, \"forks\": %lu, ",
           board->granted, board->refused, board->launched, board->forks);
    printf("\"killed\": %lu, \"starts\": %lu, \"no_room\": %lu, \"wrong\": ", board->killed,
           board->starts, board->no_room);
    printf(board->wrong ? "\"%s: %d\"" : "\"\"", board->where, board->wrong);
    printf(", \"used\": [");
    for (unsigned i = 0; i < processes; i++)
        if (pids[i] > 0)
            printf("%s%lu", comma, board->used[i]), comma = ", ";
    puts("]}");
    fflush(stdout);
}

int main(int argc, char **argv) {
    unsigned processes = argc >= 4 && argc <= 6 ? (unsigned)atoi(argv[1]) : 0;
    unsigned threads = processes ? (unsigned)atoi(argv[2]) : 0;
    char byte;
    if (threads < 1 || processes > MAX_PROCESSES || threads > MAX_THREADS)
        return 2;
    seed = strtoull(argv[3], NULL, 10);
    struct thread dice = {.state = (seed + 1) * 0x9e3779b97f4a7c15ull};
    board = mmap(NULL, sizeof(*board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (unsigned g = 0; g < GATES; g++)
        if (pipe(gate[g]))
            return 2;
    if (board == MAP_FAILED || pipe(done))
        return 2;
    for (unsigned i = 0; i < processes; i++)
        begin(i, threads);
    churn(processes, threads, argc > 4 ? atoi(argv[4]) : LOOK_EVERY_MS,
          argc > 5 ? strtoul(argv[5], NULL, 10) : 0, &dice);
    board->stop = 1;
    for (unsigned g = 0; g < GATES; g++) {
        wait_for_all(processes, threads);
        if (g < END)
            close(gate[g][1]);
    }
    print_report(processes);
    while (read(0, &byte, 1) > 0)
        ;
    close(gate[END][1]);
    while (wait(NULL) > 0 || errno == EINTR)
        ;
    return 0;
}
