/* Modules take device memory for their code and global data: at the load, or (lazy, the default)
 * piece by piece, when a function or variable is first asked for. */
#include "code.h"

/* Modules are in gs_objects, with the sizes in their images. A module that belongs to a library is
 * in gs_library_modules, with `extra` = the library. */

static uint64_t key_of(const void *handle) {
    return (uint64_t)(uintptr_t)handle;
}

struct load {
    struct gs_use use;
    struct gs_image image;
    bool passed; /* without a context: the driver will refuse it */
};

static bool load_here(struct load *load) {
    *load = (struct load){.passed = true};
    load->passed = !gs_slot() || !gs_here(&load->use.here);
    return !load->passed;
}

/* Eager loading takes all memory within the call, lazy loading nothing. */
static CUresult load_begin(struct load *load) {
    if (load->passed || gs_lazy_loading())
        return CUDA_SUCCESS;
    load->use.code = load->image.data + load->image.code;
    if (load->use.code < load->image.data)
        load->use.code = UINT64_MAX;
    return gs_use_reserve(&load->use);
}

/* The size of a cubin whose image the driver takes from memory is not known: SIZE_MAX. */
static CUresult begin_data(struct load *load, const void *image) {
    if (load_here(load))
        load->image = gs_image_read(image, SIZE_MAX, gs_arch(load->use.here.device));
    return load_begin(load);
}

static CUresult begin_file(struct load *load, const char *path) {
    if (load_here(load))
        load->image = gs_image_read_file(path, gs_arch(load->use.here.device));
    return load_begin(load);
}

static CUresult load_end(struct load *load, CUresult result, const CUmodule *module) {
    bool done = result == CUDA_SUCCESS && module;
    if (load->passed) {
        if (done) /* the driver should have refused it */
            GS_REAL(cuModuleUnload)(*module);
        return result == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : result;
    }
    struct gs_entry entry = {.bytes = load->image.data,
                             .context = gs_context_key(load->use.here.context),
                             .dev = load->use.here.dev,
                             .kind = GS_KIND_MODULE,
                             .extra = load->image.code};
    if (done && load->use.may_load)
        load->use.owner = key_of(*module);
    gs_use_end(&load->use, done);
    if (!done || gs_map_put(&gs_objects, key_of(*module), &entry))
        return result;
    gs_use_forget(key_of(*module));
    GS_REAL(cuModuleUnload)(*module);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Begin the use of a module in the context that it belongs to. */
static CUresult use_module(struct gs_use *use, CUmodule module, bool whole) {
    struct gs_entry entry;
    *use = (struct gs_use){.may_load = false};
    if (!gs_slot())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (gs_map_get(&gs_library_modules, key_of(module), &entry))
        return gs_use_library(use, (CUlibrary)(uintptr_t)entry.extra, whole);
    struct gs_entry context;
    if (!gs_map_get(&gs_objects, key_of(module), &entry) || entry.kind != GS_KIND_MODULE ||
        !gs_map_get(&gs_contexts, entry.context, &context))
        return CUDA_SUCCESS;
    use->here = (struct gs_here){(CUcontext)(uintptr_t)entry.context,
                                 (CUdevice)(uint32_t)context.extra, context.dev};
    return gs_use_owner(use, key_of(module), &(struct gs_image){entry.bytes, entry.extra}, whole);
}

#define GS_LOAD(begin, image, ...) \
    struct load load; \
    CUresult result = begin(&load, image); \
    return result == CUDA_SUCCESS ? load_end(&load, real(__VA_ARGS__), module) : result

#define GS_USE(module, whole, ...) \
    struct gs_use use; \
    CUresult result = use_module(&use, module, whole); \
    if (result != CUDA_SUCCESS) \
        return result; \
    result = real(__VA_ARGS__); \
    gs_use_end(&use, result == CUDA_SUCCESS); \
    return result

GS_EXPORT CUresult CUDAAPI cuModuleLoad(CUmodule *module, const char *fname) {
    GS_NEED(real, cuModuleLoad);
    GS_LOAD(begin_file, fname, module, fname);
}

GS_EXPORT CUresult CUDAAPI cuModuleLoadData(CUmodule *module, const void *image) {
    GS_NEED(real, cuModuleLoadData);
    GS_LOAD(begin_data, image, module, image);
}

GS_EXPORT CUresult CUDAAPI cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int n,
                                              CUjit_option *options, void **values) {
    GS_NEED(real, cuModuleLoadDataEx);
    GS_LOAD(begin_data, image, module, image, n, options, values);
}

GS_EXPORT CUresult CUDAAPI cuModuleLoadFatBinary(CUmodule *module, const void *fatCubin) {
    GS_NEED(real, cuModuleLoadFatBinary);
    GS_LOAD(begin_data, fatCubin, module, fatCubin);
}

GS_EXPORT CUresult CUDAAPI cuModuleUnload(CUmodule hmod) {
    GS_NEED(real, cuModuleUnload);
    struct gs_entry entry;
    bool known = gs_map_take(&gs_objects, key_of(hmod), &entry);
    CUresult result = real(hmod);
    if (known && result != CUDA_SUCCESS)
        gs_map_put(&gs_objects, key_of(hmod), &entry);
    else if (known)
        gs_use_forget(key_of(hmod));
    return result;
}

GS_EXPORT CUresult CUDAAPI cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name) {
    GS_NEED(real, cuModuleGetFunction);
    GS_USE(hmod, false, hfunc, hmod, name);
}

GS_EXPORT CUresult CUDAAPI cuModuleGetGlobal_v2(CUdeviceptr *dptr, size_t *bytes, CUmodule hmod,
                                                const char *name) {
    GS_NEED(real, cuModuleGetGlobal_v2);
    GS_USE(hmod, false, dptr, bytes, hmod, name);
}

GS_EXPORT CUresult CUDAAPI cuModuleGetGlobal(CUdeviceptr_v1 *dptr, unsigned int *bytes,
                                             CUmodule hmod, const char *name) {
    GS_NEED(real, cuModuleGetGlobal);
    GS_USE(hmod, false, dptr, bytes, hmod, name);
}

GS_EXPORT CUresult CUDAAPI cuModuleGetTexRef(CUtexref *pTexRef, CUmodule hmod, const char *name) {
    GS_NEED(real, cuModuleGetTexRef);
    GS_USE(hmod, false, pTexRef, hmod, name);
}

GS_EXPORT CUresult CUDAAPI cuModuleGetSurfRef(CUsurfref *pSurfRef, CUmodule hmod,
                                              const char *name) {
    GS_NEED(real, cuModuleGetSurfRef);
    GS_USE(hmod, false, pSurfRef, hmod, name);
}

GS_EXPORT CUresult CUDAAPI cuModuleEnumerateFunctions(CUfunction *functions, unsigned int n,
                                                      CUmodule mod) {
    GS_NEED(real, cuModuleEnumerateFunctions);
    GS_USE(mod, true, functions, n, mod); /* the program may use any of them */
}

GS_EXPORT CUresult CUDAAPI cuFuncLoad(CUfunction function) {
    GS_NEED(real, cuFuncLoad);
    struct gs_use use = {.may_load = false};
    CUresult result = gs_slot() && gs_here(&use.here) ? gs_use_reserve(&use) : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS)
        result = real(function);
    gs_use_end(&use, result == CUDA_SUCCESS);
    return result;
}
