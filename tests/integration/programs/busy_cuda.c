/* The driver by name, and one program image for real hardware and the simulated driver. Hardware
 * counts loops; the simulator reads the time from a kernel's name or its first argument. */
#define _GNU_SOURCE
#include "busy.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

enum { FIRST_ITERATIONS = 20000, ROUNDS = 5, SM_COUNT = 16 };

static const char head[] = ".version 6.0\n.target sm_50\n.address_size 64\n";

/* Reading the clock keeps the compiler from removing the loop; the store is never reached. A clock
 * alone would include the time of other contexts: loops measure work, clocks do not. */
static const char spin[] = ".visible .entry %s(.param .u64 ns, .param .u64 iterations)\n"
                           "{\n"
                           "    .reg .u64 %%r<5>;\n"
                           "    .reg .pred %%p;\n"
                           "    ld.param.u64 %%r1, [iterations];\n"
                           "    mov.u64 %%r3, 0;\n"
                           "again:\n"
                           "    mov.u64 %%r2, %%clock64;\n"
                           "    xor.b64 %%r3, %%r3, %%r2;\n"
                           "    sub.u64 %%r1, %%r1, 1;\n"
                           "    setp.ne.u64 %%p, %%r1, 0;\n"
                           "    @%%p bra again;\n"
                           "    setp.eq.u64 %%p, %%r3, 1311768467463790320;\n"
                           "    mov.u64 %%r4, 0;\n"
                           "    @%%p st.global.u64 [%%r4], %%r3;\n"
                           "    ret;\n"
                           "}\n";

static const char flags[] = ".visible .entry wait_flag(.param .u64 flag, .param .u64 value)\n"
                            "{\n"
                            "    .reg .u64 %r<3>;\n"
                            "    .reg .u32 %v<3>;\n"
                            "    .reg .pred %p;\n"
                            "    ld.param.u64 %r1, [flag];\n"
                            "    ld.param.u64 %r2, [value];\n"
                            "    cvta.to.global.u64 %r1, %r1;\n"
                            "    cvt.u32.u64 %v2, %r2;\n"
                            "again:\n"
                            "    ld.volatile.global.u32 %v1, [%r1];\n"
                            "    setp.lt.u32 %p, %v1, %v2;\n"
                            "    @%p bra again;\n"
                            "    ret;\n"
                            "}\n"
                            ".visible .entry set_flag(.param .u64 flag, .param .u64 value)\n"
                            "{\n"
                            "    .reg .u64 %r<3>;\n"
                            "    .reg .u32 %v;\n"
                            "    ld.param.u64 %r1, [flag];\n"
                            "    ld.param.u64 %r2, [value];\n"
                            "    cvta.to.global.u64 %r1, %r1;\n"
                            "    cvt.u32.u64 %v, %r2;\n"
                            "    st.volatile.global.u32 [%r1], %v;\n"
                            "    membar.sys;\n"
                            "    ret;\n"
                            "}\n";

int (*cuda_function(const char *name))() {
    static void *library;
    if (!library)
        library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    return library ? (int (*)())dlsym(library, name) : NULL;
}

bool cuda_result(struct tally *tally, const char *name, int code) {
    if (code && !tally->code) {
        snprintf(tally->failed, sizeof tally->failed, "%s", name);
        tally->code = code;
    }
    return !code;
}

static void add(char *text, size_t size, const char *format, const char *name) {
    size_t n = strlen(text);
    snprintf(text + n, size - n, format, name);
}

/* Measure this device's loops per millisecond. Other tenants can only slow it down, so the best of
 * several tries counts. */
static bool calibrate(struct kernels *k, struct tally *tally) {
    void *start = NULL, *end = NULL, *stream = NULL;
    uint64_t ns = 20000, iterations = FIRST_ITERATIONS;
    void *arguments[] = {&ns, &iterations};
    if (!CU(tally, "cuStreamCreate", &stream, 1u) || !CU(tally, "cuEventCreate", &start, 0u) ||
        !CU(tally, "cuEventCreate", &end, 0u))
        return false;
    for (int i = 0; i < ROUNDS; i++) {
        float ms = 0;
        if (!CU(tally, "cuEventRecord", start, stream) ||
            !CU(tally, "cuLaunchKernel", k->argument, k->blocks, 1u, 1u, 32u, 1u, 1u, 0u, stream,
                arguments, NULL) ||
            !CU(tally, "cuEventRecord", end, stream) || !CU(tally, "cuEventSynchronize", end) ||
            !CU(tally, "cuEventElapsedTime", &ms, start, end))
            return false;
        uint64_t found = ms > 0 ? (uint64_t)((float)iterations / ms) : 0;
        if (found > k->iterations_per_ms)
            k->iterations_per_ms = found;
    }
    return CU(tally, "cuEventDestroy_v2", start) && CU(tally, "cuEventDestroy_v2", end) &&
           CU(tally, "cuStreamDestroy_v2", stream);
}

bool cuda_open(struct kernels *k, const struct options *options, unsigned number,
               struct tally *tally) {
    static char image[32 << 10];
    char name[MAX_TIMES][32];
    void *module = NULL;
    int device = 0, processors = 0;
    strcpy(image, head);
    add(image, sizeof image, spin, "spin_ns_arg");
    add(image, sizeof image, "%s", flags);
    for (unsigned i = 0; i < options->n_times; i++) {
        snprintf(name[i], sizeof name[i], "spin_us_%llu", (unsigned long long)options->time_us[i]);
        bool known = false;
        for (unsigned j = 0; j < i; j++)
            known |= strcmp(name[i], name[j]) == 0;
        if (!known)
            add(image, sizeof image, spin, name[i]);
    }
    if (!CU(tally, "cuInit", 0u) ||
        !CU(tally, "cuDeviceGet", &device, (int)(options->device + number)) ||
        !CU(tally, "cuDevicePrimaryCtxRetain", &k->context, device) ||
        !CU(tally, "cuCtxSetCurrent", k->context) ||
        !CU(tally, "cuDeviceGetAttribute", &processors, SM_COUNT, device) ||
        !CU(tally, "cuModuleLoadData", &module, image) ||
        !CU(tally, "cuModuleGetFunction", &k->argument, module, "spin_ns_arg") ||
        !CU(tally, "cuModuleGetFunction", &k->wait_flag, module, "wait_flag") ||
        !CU(tally, "cuModuleGetFunction", &k->set_flag, module, "set_flag"))
        return false;
    for (unsigned i = 0; i < options->n_times; i++)
        if (!CU(tally, "cuModuleGetFunction", &k->fixed[i], module, name[i]))
            return false;
    k->blocks = options->blocks ? (unsigned)options->blocks : (unsigned)processors;
    k->iterations_per_ms = options->iterations_per_ms;
    return k->iterations_per_ms || calibrate(k, tally);
}
