/* Processes that allocate and free memory of all families at random, as fast as they can, at one
 * limit.
 *
 *   stress PROCESSES ATTEMPTS SEED FAMILIES [kill]
 *
 * ATTEMPTS is per process. FAMILIES: names joined by commas. All processes have a context before
 * the first allocation. With `kill`, every second process is killed at a random instant, and the
 * others continue until all were killed. The first survivor then allocates the rest, block by
 * block, until it is refused. Then it prints one line of JSON with the usage that the survivors
 * see for the container; they keep their memory until standard input ends. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "families.h"

#define MAX_PROCESSES 64
#define LIVE 48
#define MAX_BYTES (256 * MIB)

struct report {
    _Atomic unsigned long granted, refused;
    _Atomic int wrong; /* a result that is neither success nor out of memory */
    char where[64];
    _Atomic unsigned long used, total;
};
struct board {
    _Atomic int stop; /* tells the survivors to finish */
    struct report of[MAX_PROCESSES];
};
static struct board *board;

static uint64_t state;
static uint64_t chance(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

/* From 1 byte to 256 MiB, each power of two equally likely. */
static size_t some_bytes(void) {
    size_t top = 1ull << (chance() % 29);
    size_t bytes = top + chance() % top;
    return bytes > MAX_BYTES ? MAX_BYTES : bytes;
}

static void judge(struct report *r, CUresult result, const struct family *family,
                  const char *what) {
    if (result == CUDA_SUCCESS && what[0] == 't')
        r->granted++;
    else if (result == CUDA_ERROR_OUT_OF_MEMORY && what[0] == 't')
        r->refused++;
    else if (result != CUDA_SUCCESS && !r->wrong) {
        snprintf(r->where, sizeof(r->where), "%s %s", what, family->name);
        r->wrong = (int)result;
    }
}

static void drop(struct report *r, struct held *live, unsigned *n, unsigned at) {
    struct held held = live[at];
    live[at] = live[--*n];
    judge(r, held.family->give(&held), held.family, "give");
}

static void look(struct report *r) {
    size_t free = 0, total = 0;
    CUresult result = cuMemGetInfo(&free, &total);
    if (result && !r->wrong)
        r->wrong = (int)result;
    r->used = total - free;
    r->total = total;
}

/* Steps are reported through pipes: a process that dies closes its own, so the parent does not
 * wait. */
struct process {
    pid_t pid;
    int killed;
    int tell[2]; /* to the parent: one byte per step */
};
enum gate { GO, FILL, LOOK, LOOK_AGAIN, END, GATES };
static int gate[GATES][2]; /* from the parent to all: a gate is open when it is closed */

static void tell(const struct process *me) {
    while (write(me->tell[1], "", 1) < 0 && errno == EINTR)
        ;
}

static void wait_for_gate(enum gate which) {
    char byte;
    while (read(gate[which][0], &byte, 1) < 0 && errno == EINTR)
        ;
}

static void fill(struct report *r) {
    CUdeviceptr address;
    CUresult result;
    while (!(result = cuMemAlloc(&address, BLOCK)))
        r->granted++;
    if (result != CUDA_ERROR_OUT_OF_MEMORY && !r->wrong)
        r->wrong = (int)result;
}

static void work(const struct process *me, unsigned index, int fills, unsigned long attempts,
                 const struct family **some, unsigned n_some, int until_stopped) {
    struct report *r = &board->of[index];
    static struct held live[LIVE];
    unsigned n = 0;
    CUresult result = start(0);
    if (result) {
        r->wrong = (int)result;
        strcpy(r->where, "start");
    }
    tell(me);
    wait_for_gate(GO);
    for (unsigned long i = 0; !r->wrong && (until_stopped ? !board->stop : i < attempts); i++) {
        if (n == LIVE || (n && chance() % 5 < 2))
            drop(r, live, &n, (unsigned)(chance() % n));
        const struct family *family = some[chance() % n_some];
        result = take(family, some_bytes(), &live[n]);
        judge(r, result, family, "take");
        if (result == CUDA_SUCCESS)
            n++;
        else if (n && chance() % 2)
            drop(r, live, &n, (unsigned)(chance() % n));
    }
    cuCtxSynchronize();
    tell(me);
    wait_for_gate(FILL); /* all are done: no process frees memory any more */
    if (fills)
        fill(r);
    tell(me);
    wait_for_gate(LOOK);
    look(r); /* read the pools' own figures: after that every process reports the same */
    tell(me);
    wait_for_gate(LOOK_AGAIN);
    look(r);
    tell(me);
    wait_for_gate(END);
    while (!r->wrong && n)
        drop(r, live, &n, n - 1);
    _exit(0);
}

/* Waits until every process has reported its next step or died; a death without a kill is an
 * error. */
static void wait_for_all(struct process *all, unsigned processes) {
    char byte;
    for (unsigned i = 0; i < processes; i++) {
        ssize_t got = all[i].killed ? 1 : read(all[i].tell[0], &byte, 1);
        if (got < 0 && errno == EINTR)
            i--;
        else if (got < 1 && !board->of[i].wrong) {
            board->of[i].wrong = -1;
            strcpy(board->of[i].where, "died");
        }
    }
}

static void say(unsigned processes, const struct process *all) {
    unsigned long granted = 0, refused = 0;
    for (unsigned i = 0; i < processes; i++)
        granted += board->of[i].granted, refused += board->of[i].refused;
    printf("{\"granted\": %lu, \"refused\": %lu, \"wrong\": [", granted, refused);
    const char *comma = "";
    for (unsigned i = 0; i < processes; i++)
        if (board->of[i].wrong) {
            printf("%s\"%s: %d\"", comma, board->of[i].where, board->of[i].wrong);
            comma = ", ";
        }
    printf("], \"used\": [");
    comma = "";
    for (unsigned i = 0; i < processes; i++)
        if (!all[i].killed) {
            printf("%s%lu", comma, board->of[i].used);
            comma = ", ";
        }
    puts("]}");
    fflush(stdout);
}

static void become(struct process *all, unsigned index) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (unsigned g = 0; g < GATES; g++)
        close(gate[g][1]);
    for (unsigned i = 0; i <= index; i++)
        close(all[i].tell[0]);
}

static void kill_half(struct process *all, unsigned processes) {
    for (unsigned i = 0; i < processes; i += 2) {
        /* sleep for a random time; there is no event to wait for */
        usleep((useconds_t)(chance() % 300000));
        kill(all[i].pid, SIGKILL);
        waitpid(all[i].pid, NULL, 0);
        all[i].killed = 1;
    }
}

int main(int argc, char **argv) {
    static struct process all[MAX_PROCESSES];
    const struct family *some[FAMILIES];
    unsigned n_some = 0, processes = argc > 1 ? (unsigned)atoi(argv[1]) : 0;
    if (argc < 5 || processes < 1 || processes > MAX_PROCESSES)
        return 2;
    uint64_t seed = strtoull(argv[3], NULL, 10);
    int kills = argc > 5;
    for (char *name = strtok(argv[4], ","); name; name = strtok(NULL, ","))
        if (n_some == FAMILIES || !(some[n_some++] = family_of(name)))
            return 2;
    board = mmap(NULL, sizeof(*board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (unsigned g = 0; g < GATES; g++)
        if (pipe(gate[g]))
            return 2;
    for (unsigned i = 0; i < processes; i++) {
        if (pipe(all[i].tell))
            return 2;
        if ((all[i].pid = fork()) == 0) {
            become(all, i);
            state = (seed + i + 1) * 0x9e3779b97f4a7c15ull;
            work(&all[i], i, i == processes - 1, strtoul(argv[2], NULL, 10), some, n_some,
                 kills && i % 2 == 1);
        }
        close(all[i].tell[1]);
    }
    state = seed + 1;
    wait_for_all(all, processes);
    close(gate[GO][1]);
    if (kills)
        kill_half(all, processes);
    board->stop = 1;
    wait_for_all(all, processes);
    close(gate[FILL][1]);
    wait_for_all(all, processes);
    close(gate[LOOK][1]);
    wait_for_all(all, processes);
    close(gate[LOOK_AGAIN][1]);
    wait_for_all(all, processes);
    say(processes, all);
    while (getchar() != EOF)
        ;
    close(gate[END][1]);
    for (unsigned i = 0; i < processes; i++)
        if (!all[i].killed)
            waitpid(all[i].pid, NULL, 0);
    return 0;
}
