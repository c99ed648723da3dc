/* Counts the instructions that launches or allocations execute in the shim, by single-stepping.
 *
 *   steps N [CALL]      after a warm-up, N launches: one line "INSTRUCTIONS EXITS" each. CALL is
 *                       cuLaunchKernel, cuLaunchKernelEx or cuGraphLaunch, or one of these with
 *                       _ptsz; or cuMemAlloc_v2
 *
 * After 1000 steps the rest of a launch is not counted, and EXITS is above 1000. Otherwise EXITS is
 * how often control left the shim: once for the driver's own function, and again for a
 * clock, a lock's system call or another call of the driver. x86-64. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#define MANY 1000 /* steps: the rest is not counted */

static void *cuda;

#define CALL(name, ...) \
    do { \
        int code_ = ((int (*)())dlsym(cuda, name))(__VA_ARGS__); \
        if (code_) { \
            fprintf(stderr, "steps: %s gives %d\n", name, code_); \
            _exit(1); \
        } \
    } while (0)

__attribute__((noinline)) static void before(void) {
    __asm__ volatile("int3");
}

__attribute__((noinline)) static void after(void) {
    __asm__ volatile("");
}

struct config { /* CUlaunchConfig */
    unsigned grid[3], block[3], shared;
    void *stream, *attributes;
    unsigned n;
};

static void launches(int n, const char *name) {
    void *context, *module, *function, *stream, *graph, *executable;
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    CALL("cuInit", 0);
    CALL("cuDevicePrimaryCtxRetain", &context, 0);
    CALL("cuCtxSetCurrent", context);
    CALL("cuModuleLoadData", &module, "SIMMOD globals=0 code=1\n");
    CALL("cuModuleGetFunction", &function, module, "spin_us_10");
    CALL("cuStreamCreate", &stream, 1);
    struct config config = {{1, 1, 1}, {1, 1, 1}, 0, stream, NULL, 0};
    bool configured = strstr(name, "KernelEx"), is_graph = strstr(name, "Graph");
    bool allocates = strstr(name, "Alloc");
    unsigned long long address = 0;
    if (is_graph) {
        CALL("cuStreamBeginCapture_v2", stream, 2);
        CALL("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
        CALL("cuStreamEndCapture", stream, &graph);
        CALL("cuGraphInstantiateWithFlags", &executable, graph, 0ull);
    }
    int (*launch)() = (int (*)())dlsym(cuda, name);
    for (int i = -200; i < n; i++) {
        if (i == 0 && allocates)
            sleep(3); /* the shim's own thread marks a comparison as due each second */
        if (i >= 0)
            before();
        int code = allocates    ? launch(&address, (size_t)4 << 20)
                   : configured ? launch(&config, function, NULL, NULL)
                   : is_graph   ? launch(executable, stream)
                                : launch(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
        after();
        if (code)
            _exit(1);
        if (allocates)
            CALL("cuMemFree_v2", address);
    }
    _exit(0);
}

/* Finds the executable part of the shim in another process. */
static void find_shim(pid_t pid, uint64_t *start, uint64_t *end) {
    char path[64], line[512];
    snprintf(path, sizeof path, "/proc/%d/maps", (int)pid);
    FILE *maps = fopen(path, "r");
    while (maps && fgets(line, sizeof line, maps)) {
        unsigned long from, to;
        char rights[8];
        if (strstr(line, "/libcuda.so.") && sscanf(line, "%lx-%lx %7s", &from, &to, rights) == 3 &&
            rights[2] == 'x')
            *start = from, *end = to;
    }
    if (maps)
        fclose(maps);
}

static struct user_regs_struct registers_of(pid_t pid) {
    struct user_regs_struct registers;
    if (ptrace(PTRACE_GETREGS, pid, NULL, &registers))
        exit(1);
    return registers;
}

static bool in_program(uint64_t at) {
    extern char __executable_start, etext;
    return at >= (uint64_t)(uintptr_t)&__executable_start && at < (uint64_t)(uintptr_t)&etext;
}

/* Runs to that address at full speed. Single steps through thousands of instructions would take so
 * long that the limiter probes the device. */
static void run_to(pid_t pid, void *to) {
    struct user_regs_struct now;
    long was = ptrace(PTRACE_PEEKTEXT, pid, to, NULL);
    int status;
    if (ptrace(PTRACE_POKETEXT, pid, to, (was & ~0xffl) | 0xcc) ||
        ptrace(PTRACE_CONT, pid, NULL, NULL) || waitpid(pid, &status, 0) < 0 ||
        !WIFSTOPPED(status) || WSTOPSIG(status) != SIGTRAP || ptrace(PTRACE_POKETEXT, pid, to, was))
        exit(1);
    now = registers_of(pid);
    now.rip = (uint64_t)(uintptr_t)to;
    if (ptrace(PTRACE_SETREGS, pid, NULL, &now))
        exit(1);
}

/* At the first instruction of a library function. */
static void let_return(pid_t pid) {
    struct user_regs_struct now = registers_of(pid);
    run_to(pid, (void *)(uintptr_t)ptrace(PTRACE_PEEKDATA, pid, (void *)(uintptr_t)now.rsp, NULL));
}

int main(int argc, char **argv) {
    int n = argc > 1 ? atoi(argv[1]) : 20, status;
    pid_t pid = fork();
    if (pid == 0) {
        ptrace(PTRACE_TRACEME, 0, NULL, NULL);
        launches(n, argc > 2 ? argv[2] : "cuLaunchKernel");
    }
    uint64_t start = 0, end = 0;
    for (int signal = 0;;) { /* until the next launch */
        if (waitpid(pid, &status, 0) < 0 || WIFEXITED(status) || WIFSIGNALED(status))
            break;
        signal = WSTOPSIG(status) == SIGTRAP ? 0 : WSTOPSIG(status);
        if (!signal) {
            unsigned steps = 0, exits = 0;
            bool inside = false;
            if (!start)
                find_shim(pid, &start, &end);
            for (uint64_t at; (at = registers_of(pid).rip) != (uint64_t)(uintptr_t)after;) {
                bool was = inside;
                inside = at >= start && at < end;
                steps += inside;
                exits += was && !inside;
                if (steps > MANY)
                    run_to(pid, (void *)(uintptr_t)after), exits += MANY;
                else if (was && !inside && !in_program(at))
                    let_return(pid);
                else if (ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL) || waitpid(pid, &status, 0) < 0)
                    return 1;
            }
            printf("%u %u\n", steps, exits);
        }
        if (ptrace(PTRACE_CONT, pid, NULL, (void *)(intptr_t)signal))
            return 1;
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
