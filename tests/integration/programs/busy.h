/* A tenant that keeps a GPU busy. busy.c documents its usage. */
#ifndef BUSY_H
#define BUSY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MAX_STREAMS = 64, MAX_TIMES = 8, MAX_WORKERS = 256, MAX_DEVICES = 8 };

enum mode { MODE_STREAM, MODE_GRAPH, MODE_SYNC, MODE_PAUSE, MODE_PAIR, MODES };
enum shape { SHAPE_FIXED, SHAPE_LOGNORMAL, SHAPE_BIMODAL };

struct options {
    uint64_t mode, shape, n_times, time_us[MAX_TIMES], jitter;
    uint64_t streams, threads, processes, nodes, blocks;
    uint64_t ahead_us, mark_us, burst_us, pause_us, iterations_per_ms;
    uint64_t milliseconds, device, devices, wait, drain, seed;
};

/* The work of one thread, in memory shared by all processes: nothing is lost when the thread hangs
 * in a launch or is killed. */
struct tally {
    uint64_t launches, asked_ns;
    uint64_t done, done_ns; /* known to be complete */
    uint64_t longest_call_ns;
    uint64_t calling_since_ns; /* start of the current launch; 0: in none */
    uint64_t finished;
    int code;
    char failed[44];
};

struct shared {
    uint64_t stop;
    uint64_t ipc_ready;
    unsigned char ipc[64]; /* of the flags, in mode pair with several processes */
    struct tally tally[MAX_WORKERS];
};

/* busy_cuda.c: the driver, by name. A failed call is recorded in the tally and returns false. */
#define CU(tally, name, ...) \
    cuda_result(tally, name, cuda_function(name) ? cuda_function(name)(__VA_ARGS__) : -1)
int (*cuda_function(const char *name))();
bool cuda_result(struct tally *tally, const char *name, int code);

struct kernels {
    void *context;
    void *fixed[MAX_TIMES], *argument, *wait_flag, *set_flag;
    uint64_t iterations_per_ms; /* of the loop, on real hardware */
    unsigned blocks;
};
/* Of one device, counted from the first one in use. Its primary context is current afterwards. */
bool cuda_open(struct kernels *kernels, const struct options *options, unsigned device,
               struct tally *tally);

/* busy_work.c: run a process's part and return its exit code. `ready` is called once when all its
 * threads can begin, and returns when they should. */
int work(const struct options *options, struct shared *shared, unsigned process,
         void (*ready)(void));
uint64_t now_ns(void);

/* busy_random.c: uniform in [0, 1), normal with deviation 1; the state may begin with any value */
double uniform(uint64_t *state);
double normal(uint64_t *state);
double exponential(double x); /* e^x for |x| < 7 */

#endif
