/* Libraries: belong to no context; in each one in which they are used they become a module. */
#include "module.h"

#include <stdlib.h>
#include <string.h>

static struct library *libraries;

static struct library *library_of(CUlibrary handle) {
    for (struct library *l = libraries; l; l = l->next)
        if ((CUlibrary)l == handle)
            return l;
    return NULL;
}

static struct kernel *kernel_of(const void *handle) {
    for (struct library *l = libraries; l; l = l->next)
        for (struct kernel *k = l->kernels; k; k = k->next)
            if (k == handle)
                return k;
    return NULL;
}

static CUresult open_library(CUlibrary *out, bool understood, struct image *image) {
    struct library *l = understood ? calloc(1, sizeof *l) : NULL;
    if (!l)
        return image_free(image), understood ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_IMAGE;
    *l = (struct library){.magic = OBJ_LIBRARY, .image = *image, .next = libraries};
    libraries = l;
    *out = (CUlibrary)l;
    return CUDA_SUCCESS;
}

/* The library's module in this context, made on first use. */
static CUresult module_in(struct library *l, struct context *ctx, struct module **out) {
    for (struct module *m = ctx->modules; m; m = m->next)
        if (m->library == l)
            return *out = m, CUDA_SUCCESS;
    struct image shared = l->image;
    return module_open(ctx, &shared, l, out);
}

EXPORT CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *options,
                                  void **values, unsigned int n, CUlibraryOption *library_options,
                                  void **library_values, unsigned int n_library) {
    ENTER();
    struct image image;
    (void)library_values;
    CHECK_VALUE(library && code && (!n || (options && values)) && (!n_library || library_options));
    bool understood = image_read_memory(code, &image);
    CUresult result = open_library(library, understood, &image);
    struct context *ctx = current_context();
    struct module *m;
    if (result == CUDA_SUCCESS && ctx && !loading_is_lazy())
        result = module_in((struct library *)*library, ctx, &m);
    return result;
}

EXPORT CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *name, CUjit_option *options,
                                      void **values, unsigned int n,
                                      CUlibraryOption *library_options, void **library_values,
                                      unsigned int n_library) {
    ENTER();
    struct image image = {0};
    (void)library_values;
    CHECK_VALUE(library && name && (!n || (options && values)) && (!n_library || library_options));
    bool understood = image_read_file(name, &image);
    return open_library(library, understood, &image);
}

EXPORT CUresult cuLibraryUnload(CUlibrary handle) {
    ENTER();
    struct library *l = library_of(handle);
    CHECK_HANDLE(l);
    for (struct context *ctx = sim.contexts; ctx; ctx = ctx->next) {
        for (struct module *m = ctx->modules, *next; m; m = next) {
            next = m->next;
            if (m->library == l)
                module_close(m);
        }
    }
    for (struct library **at = &libraries; *at; at = &(*at)->next) {
        if (*at != l)
            continue;
        *at = l->next;
        break;
    }
    while (l->kernels) {
        struct kernel *k = l->kernels;
        l->kernels = k->next;
        free(k->name);
        free(k);
    }
    image_free(&l->image);
    free(l);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLibraryGetKernel(CUkernel *out, CUlibrary handle, const char *name) {
    ENTER();
    struct library *l = library_of(handle);
    CHECK_HANDLE(l);
    CHECK_VALUE(out && name);
    for (struct kernel *k = l->kernels; k; k = k->next)
        if (strcmp(k->name, name) == 0)
            return *out = (CUkernel)k, CUDA_SUCCESS;
    bool known = !l->image.named;
    for (unsigned i = 0; i < l->image.n_functions; i++)
        known |= strcmp(l->image.function[i].name, name) == 0;
    CHECK(known, CUDA_ERROR_NOT_FOUND);
    struct kernel *k = calloc(1, sizeof *k);
    CHECK(k, CUDA_ERROR_OUT_OF_MEMORY);
    *k = (struct kernel){
        .magic = OBJ_KERNEL, .name = strdup(name), .library = l, .next = l->kernels};
    l->kernels = k;
    *out = (CUkernel)k;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLibraryGetModule(CUmodule *out, CUlibrary handle) {
    ENTER_CONTEXT(ctx);
    struct library *l = library_of(handle);
    struct module *m;
    CHECK_HANDLE(l);
    CHECK_VALUE(out);
    CUresult result = module_in(l, ctx, &m);
    if (result == CUDA_SUCCESS)
        *out = (CUmodule)m;
    return result;
}

EXPORT CUresult cuLibraryGetGlobal(CUdeviceptr *dptr, size_t *bytes, CUlibrary handle,
                                   const char *name) {
    ENTER_CONTEXT(ctx);
    struct library *l = library_of(handle);
    struct module *m;
    CHECK_HANDLE(l);
    CHECK_VALUE(name);
    CUresult result = module_in(l, ctx, &m);
    return result == CUDA_SUCCESS ? module_global(m, name, dptr, bytes) : result;
}

static CUresult kernel_function(struct kernel *k, struct context *ctx, struct function **out) {
    struct module *m;
    CUresult result = module_in(k->library, ctx, &m);
    return result == CUDA_SUCCESS ? module_function(m, k->name, out) : result;
}

EXPORT CUresult cuKernelGetFunction(CUfunction *out, CUkernel handle) {
    ENTER_CONTEXT(ctx);
    struct kernel *k = kernel_of(handle);
    struct function *f;
    CHECK_HANDLE(k);
    CHECK_VALUE(out);
    CUresult result = kernel_function(k, ctx, &f);
    if (result == CUDA_SUCCESS)
        *out = (CUfunction)f;
    return result;
}

struct function *function_of(struct context *ctx, CUfunction handle, CUresult *error) {
    struct function *f = (struct function *)handle;
    *error = CUDA_ERROR_INVALID_HANDLE;
    if (sim_is(f, OBJ_FUNCTION))
        return f;
    struct kernel *k = kernel_of(handle);
    if (!k)
        return NULL;
    *error = kernel_function(k, ctx, &f);
    return *error == CUDA_SUCCESS ? f : NULL;
}

EXPORT CUresult cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel handle,
                                     CUdevice dev) {
    ENTER_CONTEXT(ctx);
    CUresult error;
    struct function *f = function_of(ctx, (CUfunction)handle, &error);
    CHECK_DEVICE(dev);
    CHECK(f, error);
    CHECK_VALUE(value && attribute < CU_FUNC_ATTRIBUTE_MAX);
    *value = f->attributes[attribute];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel handle,
                                     CUdevice dev) {
    ENTER_CONTEXT(ctx);
    CUresult error;
    struct function *f = function_of(ctx, (CUfunction)handle, &error);
    CHECK_DEVICE(dev);
    CHECK(f, error);
    CHECK_VALUE(attribute < CU_FUNC_ATTRIBUTE_MAX);
    f->attributes[attribute] = value;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelSetCacheConfig(CUkernel handle, CUfunc_cache config, CUdevice dev) {
    ENTER();
    (void)config;
    CHECK_DEVICE(dev);
    CHECK_HANDLE(kernel_of(handle));
    return CUDA_SUCCESS;
}
