/* A tenant that keeps a GPU busy, and reports its work in one line of JSON. It uses only the
 * driver's interface, found by soname, so it runs on real and simulated GPUs, in containers
 * without Python, and under any limit.
 *
 *     busy [--KEY VALUE]...
 *
 *     mode      stream   launches without end (default)
 *               pause    bursts, with pauses of the host
 *               sync     waits for each launch
 *               graph    launches graphs
 *               pair     kernels that spin until another one has run: in a second stream, with
 *                        --devices 2 on the other device, with --processes 2 in the other process
 *     kernel    microseconds, or several in rotation (50,1000); lognormal (median 100 us),
 *               bimodal (50 us, a tenth of them 1 ms); default 1000
 *     jitter    percent of a kernel's time, default 0
 *     streams, threads (of each process, with streams each), processes: default 1
 *     nodes     kernels of a graph, default 10
 *     seconds   how long, default 10; ends earlier at SIGTERM or SIGINT, with the same line
 *     ahead     microseconds of work in a stream that may be pending; 0 (default): until the
 *               driver's queue is full
 *     mark      microseconds of work between the events that report completion, or 0;
 *               default 1000
 *     burst, pause   microseconds, of mode pause, default 2000 and 1000
 *     wait 1    prints "ready" and starts at the end of a line of input
 *     drain 1   waits for all launches at the end
 *     blocks    of a kernel's grid; default one for each multiprocessor, which on the simulated
 *               device means that kernels of several streams run one after the other
 *     iterations-per-ms   of the kernels' loop; measured when it is not given
 *     device, devices   the first device, and the number that share the streams, default 1
 *     seed
 *
 * {"started_ns", "ended_ns": CLOCK_MONOTONIC, "pidns", "launches", "asked_ns": device time of
 * all launches, "done", "done_ns": the same of completed ones, "longest_call_ns": of a launch,
 * "stuck": threads that did not return, "failed": name of the first failed call,
 * "code"}. A graph is one launch. Exit code 1 when a call failed or a thread is stuck. */
#define _GNU_SOURCE
#include "busy.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { GRACE_MS = 2000 };

static const char *const mode_names[MODES] = {"stream", "graph", "sync", "pause", "pair"};
static int ready_pipe[2], go_pipe[2];
static pid_t pids[MAX_WORKERS]; /* 0: has ended */

static int misused(const char *key, const char *value) {
    fprintf(stderr, "busy: --%s %s is not understood; the head of busy.c lists the options\n", key,
            value ? value : "(nothing)");
    return 2;
}

static bool read_kernel(struct options *o, const char *text) {
    o->shape = strcmp(text, "lognormal") == 0 ? SHAPE_LOGNORMAL
               : strcmp(text, "bimodal") == 0 ? SHAPE_BIMODAL
                                              : SHAPE_FIXED;
    o->n_times = 1;
    o->time_us[0] = o->shape == SHAPE_LOGNORMAL ? 100 : 50;
    if (o->shape != SHAPE_FIXED)
        return true;
    char *end = (char *)text;
    for (o->n_times = 0; o->n_times < MAX_TIMES; text = end + 1) {
        o->time_us[o->n_times] = strtoull(text, &end, 10);
        if (end == text || !o->time_us[o->n_times++])
            return false;
        if (*end != ',')
            return *end == '\0';
    }
    return false;
}

static bool read_option(struct options *o, const char *key, const char *value) {
    const struct {
        const char *name;
        uint64_t *number, most;
    } numbers[] = {
        {"jitter", &o->jitter, 50},
        {"streams", &o->streams, MAX_STREAMS},
        {"threads", &o->threads, 64},
        {"processes", &o->processes, 64},
        {"nodes", &o->nodes, 1000},
        {"ahead", &o->ahead_us, 1000000000},
        {"mark", &o->mark_us, 1000000000},
        {"burst", &o->burst_us, 1000000000},
        {"pause", &o->pause_us, 1000000000},
        {"wait", &o->wait, 1},
        {"drain", &o->drain, 1},
        {"blocks", &o->blocks, 65535},
        {"device", &o->device, 64},
        {"devices", &o->devices, MAX_DEVICES},
        {"seed", &o->seed, UINT64_MAX / 2},
        {"iterations-per-ms", &o->iterations_per_ms, UINT64_MAX / 2},
    };
    char *end;
    if (strcmp(key, "kernel") == 0)
        return read_kernel(o, value);
    if (strcmp(key, "seconds") == 0) {
        o->milliseconds = (uint64_t)(strtod(value, &end) * 1000);
        return end != value && !*end;
    }
    if (strcmp(key, "mode") == 0) {
        for (o->mode = 0; o->mode < MODES; o->mode++)
            if (strcmp(value, mode_names[o->mode]) == 0)
                return true;
        return false;
    }
    for (unsigned i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        if (strcmp(key, numbers[i].name) != 0)
            continue;
        *numbers[i].number = strtoull(value, &end, 10);
        return end != value && !*end && *numbers[i].number <= numbers[i].most;
    }
    return false;
}

/* In a worker process: report that it is ready, and return when all should begin. */
static void wait_for_go(void) {
    char byte = 0;
    if (write(ready_pipe[1], &byte, 1) != 1)
        _exit(1);
    close(ready_pipe[1]);
    while (read(go_pipe[0], &byte, 1) < 0 && errno == EINTR) {
    }
}

static pid_t start(const struct options *o, struct shared *shared, unsigned process) {
    pid_t pid = fork();
    if (pid)
        return pid;
    sigset_t none;
    sigemptyset(&none);
    signal(SIGTERM, SIG_IGN); /* sent to a whole group, too: the first process decides */
    signal(SIGINT, SIG_IGN);
    sigprocmask(SIG_SETMASK, &none, NULL);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(go_pipe[1]);
    close(ready_pipe[0]);
    _exit(work(o, shared, process, wait_for_go));
}

/* Wait for a signal, at most until `until_ns`. Return true for one that ends the run; count a child
 * that ended in *left. */
static bool wait_for_signal(const sigset_t *signals, uint64_t until_ns, unsigned *left) {
    uint64_t now = now_ns();
    uint64_t ns = until_ns > now ? until_ns - now : 0;
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    int number = sigtimedwait(signals, NULL, &t);
    for (unsigned i = 0; number == SIGCHLD && i < MAX_WORKERS; i++) {
        int status;
        if (!pids[i] || waitpid(pids[i], &status, WNOHANG) != pids[i])
            continue;
        if (WIFSIGNALED(status))
            fprintf(stderr, "busy: a worker was killed by signal %d\n", WTERMSIG(status));
        pids[i] = 0;
        --*left;
    }
    return number == SIGTERM || number == SIGINT;
}

static int report(const struct options *o, const struct shared *shared, uint64_t started_ns,
                  uint64_t ended_ns) {
    struct stat pidns = {0};
    struct tally sum = {0};
    unsigned stuck = 0;
    for (uint64_t i = 0; i < o->processes * o->threads; i++) {
        const struct tally *t = &shared->tally[i];
        uint64_t since = t->finished ? 0 : t->calling_since_ns;
        uint64_t longest =
            since && now_ns() - since > t->longest_call_ns ? now_ns() - since : t->longest_call_ns;
        sum.launches += t->launches;
        sum.asked_ns += t->asked_ns;
        sum.done += t->done;
        sum.done_ns += t->done_ns;
        sum.longest_call_ns = longest > sum.longest_call_ns ? longest : sum.longest_call_ns;
        stuck += !t->finished;
        if (t->code && !sum.code) {
            sum.code = t->code;
            memcpy(sum.failed, t->failed, sizeof sum.failed);
        }
    }
    stat("/proc/self/ns/pid", &pidns);
    printf("{\"started_ns\": %llu, \"ended_ns\": %llu, \"pidns\": %llu, \"launches\": %llu, "
           "\"asked_ns\": %llu, \"done\": %llu, \"done_ns\": %llu, \"longest_call_ns\": %llu, "
           "\"stuck\": %u, \"failed\": \"%s\", \"code\": %d}\n",
           (unsigned long long)started_ns, (unsigned long long)ended_ns,
           (unsigned long long)pidns.st_ino, (unsigned long long)sum.launches,
           (unsigned long long)sum.asked_ns, (unsigned long long)sum.done,
           (unsigned long long)sum.done_ns, (unsigned long long)sum.longest_call_ns, stuck,
           sum.failed, sum.code);
    fflush(stdout);
    return stuck || sum.code;
}

int main(int argc, char **argv) {
    struct options o = {.n_times = 1,
                        .time_us = {1000},
                        .streams = 1,
                        .threads = 1,
                        .processes = 1,
                        .devices = 1,
                        .nodes = 10,
                        .mark_us = 1000,
                        .burst_us = 2000,
                        .pause_us = 1000,
                        .milliseconds = 10000};
    for (int i = 1; i < argc; i += 2)
        if (strncmp(argv[i], "--", 2) != 0 || i + 1 == argc ||
            !read_option(&o, argv[i] + 2, argv[i + 1]))
            return misused(argv[i] + (strncmp(argv[i], "--", 2) == 0 ? 2 : 0), argv[i + 1]);
    if (!o.streams || !o.threads || !o.processes || !o.devices ||
        o.processes * o.threads > MAX_WORKERS)
        return misused("threads", "of these processes");
    if (o.streams < o.devices || (o.mode == MODE_PAIR && o.streams < 2))
        o.streams = o.devices > 2 ? o.devices : 2;
    struct shared *shared =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGCHLD);
    sigprocmask(SIG_BLOCK, &signals, NULL);
    if (shared == MAP_FAILED || pipe(ready_pipe) || pipe(go_pipe))
        return perror("busy"), 1;
    unsigned left = (unsigned)o.processes, ready = 0;
    for (unsigned i = 0; i < o.processes; i++)
        if ((pids[i] = start(&o, shared, i)) < 0)
            return perror("busy: fork"), 1;
    close(ready_pipe[1]);
    for (char byte; ready < o.processes && read(ready_pipe[0], &byte, 1) == 1;)
        ready++;
    if (o.wait) {
        puts("ready");
        fflush(stdout);
        while (getchar() > '\n') {
        }
    }
    uint64_t started_ns = now_ns(), end_ns = started_ns + o.milliseconds * 1000000;
    close(go_pipe[1]);
    while (left && now_ns() < end_ns && !wait_for_signal(&signals, end_ns, &left)) {
    }
    __atomic_store_n(&shared->stop, 1, __ATOMIC_RELAXED);
    uint64_t ended_ns = now_ns(), last_ns = ended_ns + GRACE_MS * 1000000ull;
    while (left && (o.drain || now_ns() < last_ns))
        if (wait_for_signal(&signals, last_ns, &left) && o.drain)
            o.drain = 0;
    int code = report(&o, shared, started_ns, ended_ns);
    for (unsigned i = 0; i < o.processes; i++) {
        if (!pids[i])
            continue;
        kill(pids[i], SIGKILL);
        waitpid(pids[i], NULL, 0);
    }
    return code;
}
