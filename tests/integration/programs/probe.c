/* A CUDA program for images without Python. It uses only the driver's interface, finds both
 * libraries by soname as every program does, and prints the result in one line of JSON.
 *
 *     probe            reads the device's memory and allocates until refused
 *     probe hold       the same, then waits for the end of its input before it frees anything
 *     probe hold 2048  the same with so many MiB at most
 *
 * {"pidns", "devices", "total_bytes", "nvml_total_bytes", "got_bytes", "refused": the error that
 * ended it} or {"failed": "what", "code": N} after an earlier failure. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct {
    unsigned long long total, free, used;
} nvml_memory; /* nvmlMemory_t */

enum { LAST_BYTES = 2 << 20 };

static int fail(const char *what, int code) {
    printf("{\"failed\": \"%s\", \"code\": %d}\n", what, code);
    return 1;
}

static void *symbol(const char *library, const char *name) {
    void *handle = dlopen(library, RTLD_NOW | RTLD_GLOBAL);
    return handle ? dlsym(handle, name) : NULL;
}

#define CUDA(name) ((int (*)())symbol("libcuda.so.1", name))
#define NVML(name) ((int (*)())symbol("libnvidia-ml.so.1", name))
#define CALL(library, name, ...) \
    do { \
        int (*function)() = library(name); \
        int code_ = function ? function(__VA_ARGS__) : -1; \
        if (code_) \
            return fail(name, code_); \
    } while (0)

int main(int argc, char **argv) {
    struct stat pidns;
    int devices = 0, device = 0, refused = 0;
    void *handle = NULL, *context = NULL;
    size_t free_bytes = 0, total_bytes = 0, got_bytes = 0;
    size_t most_bytes = argc > 2 ? strtoull(argv[2], NULL, 10) << 20 : (size_t)-1;
    nvml_memory memory = {0};

    CALL(NVML, "nvmlInit_v2");
    CALL(NVML, "nvmlDeviceGetHandleByIndex_v2", 0u, &handle);
    CALL(NVML, "nvmlDeviceGetMemoryInfo", handle, &memory);
    CALL(CUDA, "cuInit", 0u);
    CALL(CUDA, "cuDeviceGetCount", &devices);
    CALL(CUDA, "cuDeviceGet", &device, 0);
    CALL(CUDA, "cuDevicePrimaryCtxRetain", &context, device);
    CALL(CUDA, "cuCtxSetCurrent", context);
    CALL(CUDA, "cuMemGetInfo_v2", &free_bytes, &total_bytes);
    for (size_t size = 256u << 20; size >= LAST_BYTES && size <= most_bytes - got_bytes;) {
        unsigned long long pointer;
        int code = CUDA("cuMemAlloc_v2")(&pointer, size);
        if (code) {
            refused = code;
            size /= 2;
        } else {
            got_bytes += size;
        }
    }
    if (stat("/proc/self/ns/pid", &pidns) != 0)
        return fail("/proc/self/ns/pid", -1);
    printf("{\"pidns\": %llu, \"devices\": %d, \"total_bytes\": %zu, \"nvml_total_bytes\": %llu, "
           "\"got_bytes\": %zu, "
           "\"refused\": %d}\n",
           (unsigned long long)pidns.st_ino, devices, total_bytes, memory.total, got_bytes,
           refused);
    fflush(stdout);
    if (argc > 1 && strcmp(argv[1], "hold") == 0)
        while (getchar() != EOF) {
        }
    return 0;
}
