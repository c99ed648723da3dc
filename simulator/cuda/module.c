/* Modules: their code and global data share blocks of the context. Lazy loading, the default since
 * CUDA 12.2, loads a function when it is first asked for; CUDA_MODULE_LOADING=EAGER loads all. */
#include "module.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TIME_IN_NAME "_us_"
#define TIME_IN_ARGUMENT "_ns_arg"
#define WAITS "wait_flag" /* see launch.c */
#define SETS "set_flag"
#define READS "sweep"
#define LOCAL_IN_NAME "_local_" /* bytes of local memory of each thread */

bool loading_is_lazy(void) {
    const char *mode = getenv("CUDA_MODULE_LOADING");
    return !mode || strcmp(mode, "EAGER") != 0;
}

static unsigned device_arch(void) {
    const struct sim_config *c = &sim.device[0].sim.state->config;
    return 10 * c->cc_major + c->cc_minor;
}

bool image_read_memory(const void *data, struct image *image) {
    return image_read(data, SIZE_MAX, device_arch(), image);
}

bool image_read_file(const char *path, struct image *image) {
    FILE *file = fopen(path, "rbe");
    if (!file)
        return false;
    size_t size = 0, room = 1 << 16;
    char *data = malloc(room + 1);
    for (size_t n; data && (n = fread(data + size, 1, room - size, file)) > 0;) {
        size += n;
        if (size == room)
            data = realloc(data, (room *= 2) + 1);
    }
    fclose(file);
    if (!data)
        return false;
    data[size] = '\0';
    bool ok = image_read(data, size, device_arch(), image);
    free(data);
    return ok;
}

/* Takes the memory of a module's first kernel that its image does not have. */
static CUresult load_first_kernel(struct module *m) {
    const struct sim_costs *costs = costs_of(m->ctx->device);
    uint64_t bytes = m->library ? costs->library_bytes : costs->module_bytes;
    if (m->kernel_bytes || !bytes)
        return CUDA_SUCCESS;
    CUresult result = charge(m->ctx->device, bytes);
    if (result == CUDA_SUCCESS)
        m->kernel_bytes = bytes;
    return result;
}

/* Load the parts that any use of the module needs. */
CUresult module_load(struct module *m) {
    CUresult error = CUDA_SUCCESS;
    uint64_t bytes = m->image.code_bytes + m->image.global_bytes;
    if (m->loaded)
        return CUDA_SUCCESS;
    error = share_blocks(m->ctx, &m->ctx->code_bytes, bytes);
    if (error != CUDA_SUCCESS)
        return error;
    m->code_bytes = bytes;
    if (m->image.global_bytes) {
        m->mem = mem_take(m->ctx, m->ctx->device, m->image.global_bytes, MEM_CODE, &error);
        if (!m->mem)
            return error;
    }
    m->loaded = true;
    return CUDA_SUCCESS;
}

static CUresult function_load(struct module *m, unsigned i) {
    if (m->function_loaded[i])
        return CUDA_SUCCESS;
    CUresult result = share_blocks(m->ctx, &m->ctx->code_bytes, m->image.function[i].bytes);
    if (result == CUDA_SUCCESS) {
        m->code_bytes += m->image.function[i].bytes;
        m->function_loaded[i] = true;
    }
    return result;
}

static CUresult load_all(struct module *m) {
    CUresult result = module_load(m);
    if (result == CUDA_SUCCESS && m->image.n_functions)
        result = load_first_kernel(m);
    for (unsigned i = 0; result == CUDA_SUCCESS && i < m->image.n_functions; i++)
        result = function_load(m, i);
    return result;
}

/* Takes the image over. */
CUresult module_open(struct context *ctx, struct image *image, struct library *library,
                     struct module **out) {
    struct module *m = calloc(1, sizeof *m);
    if (!m)
        return image_free(image), CUDA_ERROR_OUT_OF_MEMORY;
    *m = (struct module){
        .magic = OBJ_MODULE, .ctx = ctx, .image = *image, .library = library, .next = ctx->modules};
    ctx->modules = m;
    CUresult result = loading_is_lazy() ? CUDA_SUCCESS : load_all(m);
    if (result == CUDA_SUCCESS)
        *out = m;
    else
        module_close(m);
    return result;
}

void module_close(struct module *m) {
    for (struct module **at = &m->ctx->modules; *at; at = &(*at)->next) {
        if (*at != m)
            continue;
        *at = m->next;
        break;
    }
    while (m->functions) {
        struct function *f = m->functions;
        m->functions = f->next;
        f->magic = 0;
        free(f->name);
        free(f);
    }
    if (m->mem)
        mem_give(m->mem);
    unshare_blocks(m->ctx, &m->ctx->code_bytes, m->code_bytes);
    if (m->kernel_bytes)
        uncharge(m->ctx->device, m->kernel_bytes);
    if (!m->library)
        image_free(&m->image);
    m->magic = 0;
    free(m);
}

void modules_drop_all(struct context *ctx) {
    while (ctx->modules)
        module_close(ctx->modules);
}

/* "anything_us_250" runs 250 us, "anything_ns_arg" as many ns as its first argument says; other
 * kernels as long as the device's default. */
static uint64_t duration_of(const struct context *ctx, const char *name) {
    const char *at = strstr(name, TIME_IN_NAME);
    unsigned long long us;
    if (at && sscanf(at + strlen(TIME_IN_NAME), "%llu", &us) == 1)
        return us * 1000;
    return sim.device[ctx->device].sim.state->config.kernel_ns;
}

CUresult module_function(struct module *m, const char *name, struct function **out) {
    unsigned i = 0;
    while (i < m->image.n_functions && strcmp(m->image.function[i].name, name) != 0)
        i++;
    CHECK(!m->image.named || i < m->image.n_functions, CUDA_ERROR_NOT_FOUND);
    CUresult result = module_load(m);
    if (result == CUDA_SUCCESS)
        result = load_first_kernel(m);
    if (result == CUDA_SUCCESS && i < m->image.n_functions)
        result = function_load(m, i);
    if (result != CUDA_SUCCESS)
        return result;
    for (struct function *f = m->functions; f; f = f->next)
        if (strcmp(f->name, name) == 0)
            return *out = f, CUDA_SUCCESS;
    struct function *f = calloc(1, sizeof *f);
    CHECK(f, CUDA_ERROR_OUT_OF_MEMORY);
    *f = (struct function){.magic = OBJ_FUNCTION,
                           .name = strdup(name),
                           .module = m,
                           .duration_ns = duration_of(m->ctx, name),
                           .waits = strncmp(name, WAITS, strlen(WAITS)) == 0,
                           .sets = strncmp(name, SETS, strlen(SETS)) == 0,
                           .reads = strncmp(name, READS, strlen(READS)) == 0,
                           .time_in_argument = strstr(name, TIME_IN_ARGUMENT) != NULL,
                           .next = m->functions};
    f->attributes[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK] = 1024;
    f->attributes[CU_FUNC_ATTRIBUTE_NUM_REGS] = 32;
    f->attributes[CU_FUNC_ATTRIBUTE_PTX_VERSION] = f->attributes[CU_FUNC_ATTRIBUTE_BINARY_VERSION] =
        86;
    f->attributes[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES] = 49152;
    const char *local = strstr(name, LOCAL_IN_NAME);
    if (local)
        f->attributes[CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES] = atoi(local + strlen(LOCAL_IN_NAME));
    m->functions = f;
    *out = f;
    return CUDA_SUCCESS;
}

/* Variables lie behind the code, each at a multiple of 256 bytes. */
CUresult module_global(struct module *m, const char *name, CUdeviceptr *va, size_t *bytes) {
    CUresult result = module_load(m);
    if (result != CUDA_SUCCESS)
        return result;
    uint64_t offset = 0;
    for (unsigned i = 0; i < m->image.n_globals; i++) {
        if (strcmp(m->image.global[i].name, name) == 0) {
            if (va)
                *va = m->mem->va + offset;
            if (bytes)
                *bytes = m->image.global[i].bytes;
            return CUDA_SUCCESS;
        }
        offset += m->image.global[i].bytes;
    }
    return CUDA_ERROR_NOT_FOUND;
}

static CUresult load_image(CUmodule *module, struct context *ctx, bool understood,
                           struct image *image) {
    struct module *m;
    if (!understood)
        return image_free(image), CUDA_ERROR_INVALID_IMAGE;
    CUresult result = module_open(ctx, image, NULL, &m);
    if (result == CUDA_SUCCESS)
        *module = (CUmodule)m;
    return result;
}

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    ENTER_CONTEXT(ctx);
    struct image read;
    CHECK_VALUE(module && image);
    bool understood = image_read_memory(image, &read);
    return load_image(module, ctx, understood, &read);
}

EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int n,
                                   CUjit_option *options, void **values) {
    CHECK_VALUE(!n || (options && values));
    return cuModuleLoadData(module, image);
}

EXPORT CUresult cuModuleLoadFatBinary(CUmodule *module, const void *fatCubin) {
    return cuModuleLoadData(module, fatCubin);
}

EXPORT CUresult cuModuleLoad(CUmodule *module, const char *fname) {
    ENTER_CONTEXT(ctx);
    struct image read = {0};
    CHECK_VALUE(module && fname);
    FILE *file = fopen(fname, "re");
    CHECK(file, CUDA_ERROR_FILE_NOT_FOUND);
    fclose(file);
    bool understood = image_read_file(fname, &read);
    return load_image(module, ctx, understood, &read);
}

#define ENTER_MODULE(m, handle) \
    ENTER_CONTEXT(ctx); \
    (void)ctx; \
    struct module *m = (struct module *)(handle); \
    CHECK_HANDLE(sim_is(m, OBJ_MODULE))

EXPORT CUresult cuModuleUnload(CUmodule hmod) {
    ENTER_MODULE(m, hmod);
    CHECK_HANDLE(!m->library);
    engine_wait_context(m->ctx);
    module_close(m);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name) {
    ENTER_MODULE(m, hmod);
    struct function *f;
    CHECK_VALUE(hfunc && name);
    CUresult result = module_function(m, name, &f);
    if (result == CUDA_SUCCESS)
        *hfunc = (CUfunction)f;
    return result;
}

EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr *dptr, size_t *bytes, CUmodule hmod,
                                     const char *name) {
    ENTER_MODULE(m, hmod);
    CHECK_VALUE(name);
    return module_global(m, name, dptr, bytes);
}

EXPORT CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode *mode) {
    ENTER();
    CHECK_VALUE(mode);
    *mode = loading_is_lazy() ? CU_MODULE_LAZY_LOADING : CU_MODULE_EAGER_LOADING;
    return CUDA_SUCCESS;
}
