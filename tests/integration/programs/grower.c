/* Processes that allocate as much device memory as possible and launch constantly, for limits that
 * change meanwhile. Simulated devices only.
 *
 *   grower PROCESSES churn|hold
 *
 * In each process one thread allocates, another launches kernels of 250 us. churn: free half of the
 * memory at each refusal. hold: keep all, and retry each millisecond; at SIGUSR1 free all and start
 * again. "ready" on standard output when all run; a call that fails for another reason than memory
 * ends everything with its name. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PIECE = 64 << 20, MOST = 512, AHEAD = 8, MULTIPROCESSORS = 48, NO_MEMORY = 2 };

static int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                     void *, void **, void **);
static int (*take)(uint64_t *, size_t), (*give)(uint64_t), (*set_current)(void *), (*finish)(void);
static int (*init)(unsigned), (*retain)(void **, int), (*load)(void **, const void *),
    (*find)(void **, void *, const char *);
static void *context, *kernel;
static volatile sig_atomic_t drop;

static void check(int result, const char *what) {
    if (result == 0)
        return;
    fprintf(stderr, "grower: %s: %d\n", what, result);
    kill(getppid(), SIGTERM);
    _exit(1);
}

static void *launches(void *arg) {
    (void)arg;
    check(set_current(context), "cuCtxSetCurrent");
    for (unsigned n = 1;; n++) {
        check(launch(kernel, MULTIPROCESSORS, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL),
              "cuLaunchKernel");
        if (n % AHEAD == 0)
            check(finish(), "cuCtxSynchronize");
    }
    return NULL;
}

static void asked(int number) {
    (void)number;
    drop = 1;
}

static void grow(bool churn) {
    static uint64_t piece[MOST];
    unsigned n = 0;
    for (;;) {
        int result = n < MOST ? take(&piece[n], PIECE) : NO_MEMORY;
        if (result == 0) {
            n++;
            continue;
        }
        check(result == NO_MEMORY ? 0 : result, "cuMemAlloc");
        unsigned keep = drop ? 0 : churn ? n / 2 : n;
        drop = 0;
        while (n > keep)
            check(give(piece[--n]), "cuMemFree");
        usleep(1000);
    }
}

static void *symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (!found)
        check(1, name);
    return found;
}

static void work(bool churn, int ready, int go) {
    char byte;
    pthread_t thread;
    void *module, *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cuda)
        check(1, "dlopen");
    *(void **)&init = symbol(cuda, "cuInit");
    *(void **)&retain = symbol(cuda, "cuDevicePrimaryCtxRetain");
    *(void **)&set_current = symbol(cuda, "cuCtxSetCurrent");
    *(void **)&load = symbol(cuda, "cuModuleLoadData");
    *(void **)&find = symbol(cuda, "cuModuleGetFunction");
    *(void **)&launch = symbol(cuda, "cuLaunchKernel");
    *(void **)&finish = symbol(cuda, "cuCtxSynchronize");
    *(void **)&take = symbol(cuda, "cuMemAlloc_v2");
    *(void **)&give = symbol(cuda, "cuMemFree_v2");
    signal(SIGUSR1, asked);
    check(init(0), "cuInit");
    check(retain(&context, 0), "cuDevicePrimaryCtxRetain");
    check(set_current(context), "cuCtxSetCurrent");
    check(load(&module, "SIMMOD globals=0 code=1\n"), "cuModuleLoadData");
    check(find(&kernel, module, "spin_us_250"), "cuModuleGetFunction");
    check(pthread_create(&thread, NULL, launches, NULL), "pthread_create");
    check(write(ready, "x", 1) != 1, "write");
    check(read(go, &byte, 1) != 1, "read"); /* or the first would leave no room for a context */
    grow(churn);
}

static void failed(int number) {
    (void)number;
    _exit(1);
}

int main(int argc, char **argv) {
    int ready[2], go[2], status;
    char byte;
    int processes = argc == 3 ? atoi(argv[1]) : 0;
    if (processes < 1 || pipe(ready) != 0 || pipe(go) != 0)
        return 2;
    signal(SIGTERM, failed);
    for (int i = 0; i < processes; i++)
        if (fork() == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            work(strcmp(argv[2], "churn") == 0, ready[1], go[0]);
        }
    for (int i = 0; i < processes; i++)
        if (read(ready[0], &byte, 1) != 1)
            return 1;
    for (int i = 0; i < processes; i++)
        if (write(go[1], &byte, 1) != 1)
            return 1;
    puts("ready");
    fflush(stdout);
    wait(&status);
    return 1;
}
