/* Modules, libraries and functions. */
#ifndef SIM_MODULE_H
#define SIM_MODULE_H

#include "image.h"
#include "sim.h"

struct function {
    uint32_t magic; /* OBJ_FUNCTION */
    char *name;
    struct module *module;
    uint64_t duration_ns;
    bool time_in_argument, waits, sets, reads;
    int attributes[CU_FUNC_ATTRIBUTE_MAX];
    struct function *next;
};

struct module {
    uint32_t magic;
    struct context *ctx;
    struct library *library; /* NULL: loaded without a library */
    struct image image;
    bool loaded; /* code and globals; functions are loaded one by one */
    bool function_loaded[IMAGE_NAMES];
    uint64_t code_bytes;   /* this module's part of ctx->code_bytes */
    uint64_t kernel_bytes; /* taken with its first kernel, beyond the image */
    struct mem *mem;
    struct function *functions;
    struct module *next;
};

struct kernel {
    uint32_t magic;
    char *name;
    struct library *library;
    struct kernel *next;
};

struct library {
    uint32_t magic;
    struct image image;
    struct kernel *kernels;
    struct library *next;
};

#define MAX_BLOCK 1024u

#define ENTER_FUNCTION(f, handle) \
    ENTER_CONTEXT(ctx); \
    CUresult function_error; \
    struct function *f = function_of(ctx, handle, &function_error); \
    CHECK(f, function_error)

/* Finds the function of a CUfunction or CUkernel handle in a context; NULL when there is none. */
struct function *function_of(struct context *ctx, CUfunction handle, CUresult *error);
CUresult module_open(struct context *ctx, struct image *image, struct library *library,
                     struct module **out);
CUresult module_load(struct module *module);
void module_close(struct module *module);
CUresult module_function(struct module *module, const char *name, struct function **out);
CUresult module_global(struct module *module, const char *name, CUdeviceptr *va, size_t *bytes);
uint64_t blocks_per_processor(int block); /* for blocks of this many threads */
bool image_read_memory(const void *data, struct image *image);
bool image_read_file(const char *path, struct image *image);
bool loading_is_lazy(void);
#endif
