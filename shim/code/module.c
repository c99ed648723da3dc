/* Modules take device memory for their code and global data: at the load, or (lazy, the default)
 * piece by piece, when a function or variable is first asked for. The sizes are read from the image
 * before the driver sees it (image.c). */
#include "code.h"

#include <stdlib.h>
#include <string.h>

/* Modules are in gs_objects, with `extra` = their struct gs_image. A module that belongs to a
 * library is in gs_library_modules, with `extra` = the library. */

static uint64_t key_of(const void *handle) {
    return (uint64_t)(uintptr_t)handle;
}

struct load {
    struct gs_here here;
    struct gs_image *image;
    bool eager, passed;
};

/* Eager loading takes the memory within the call, so it is charged before. */
static CUresult load_begin(struct load *load, struct gs_image *image, bool passed) {
    load->image = image;
    load->passed = passed;
    load->eager = !passed && !gs_lazy_loading();
    if (!passed && !image)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result =
        load->eager ? gs_code_take(&load->here, image->all, image->known) : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS)
        free(image);
    return result;
}

/* The size of a cubin whose image the driver takes from memory is not known: SIZE_MAX. */
static CUresult begin_data(struct load *load, const void *image) {
    bool passed = !gs_slot() || !gs_here(&load->here);
    return load_begin(
        load, passed ? NULL : gs_image_read(image, SIZE_MAX, gs_arch(load->here.device)), passed);
}

static CUresult begin_file(struct load *load, const char *path) {
    bool passed = !gs_slot() || !gs_here(&load->here);
    return load_begin(load, passed ? NULL : gs_image_read_file(path, gs_arch(load->here.device)),
                      passed);
}

static CUresult load_end(struct load *load, CUresult result, const CUmodule *module) {
    if (load->passed) {
        if (result == CUDA_SUCCESS && module) /* the driver should have refused it */
            GS_REAL(cuModuleUnload)(*module);
        return result == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : result;
    }
    uint64_t context = gs_context_key(load->here.context);
    struct gs_entry entry = {.context = context,
                             .dev = load->here.dev,
                             .kind = GS_KIND_MODULE,
                             .extra = key_of(load->image)};
    if (result == CUDA_SUCCESS && module && gs_map_put(&gs_objects, key_of(*module), &entry)) {
        if (!load->eager)
            return result;
        return gs_code_record(key_of(*module), &load->here, GS_PART_ALL, load->image->all);
    }
    if (load->eager)
        gs_code_give(context, load->here.dev, load->image->all);
    free(load->image);
    if (result != CUDA_SUCCESS || !module)
        return result;
    GS_REAL(cuModuleUnload)(*module);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Charge one part of a module in the context that it belongs to. */
static CUresult use(CUmodule module, uint64_t part) {
    struct gs_entry entry;
    struct gs_here here;
    struct gs_part found;
    if (!gs_slot())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (gs_map_get(&gs_library_modules, key_of(module), &entry))
        return gs_library_use((CUlibrary)(uintptr_t)entry.extra, part);
    gs_lock(&gs_self()->lock_context);
    bool known = gs_map_get(&gs_objects, key_of(module), &entry) && entry.kind == GS_KIND_MODULE;
    if (known)
        found = gs_part_of((const struct gs_image *)(uintptr_t)entry.extra, part);
    gs_unlock(&gs_self()->lock_context);
    if (!known || !gs_here_of_context((CUcontext)(uintptr_t)entry.context, &here))
        return CUDA_SUCCESS;
    return gs_part_use(key_of(module), &here, &found);
}

static uint64_t kernel_part(const char *name) {
    return name ? gs_image_hash(name, strlen(name)) : GS_PART_SHARED;
}

#define GS_LOAD(begin, image, ...) \
    struct load load; \
    CUresult result = begin(&load, image); \
    return result == CUDA_SUCCESS ? load_end(&load, real(__VA_ARGS__), module) : result

#define GS_USE(module, part, ...) \
    CUresult result = use(module, part); \
    return result == CUDA_SUCCESS ? real(__VA_ARGS__) : result

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
    if (!known || result != CUDA_SUCCESS)
        return result;
    gs_code_forget(key_of(hmod));
    gs_lock(&gs_self()->lock_context); /* while a thread may still read the sizes */
    gs_uncharge(key_of(hmod), &entry);
    gs_unlock(&gs_self()->lock_context);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name) {
    GS_NEED(real, cuModuleGetFunction);
    GS_USE(hmod, kernel_part(name), hfunc, hmod, name);
}

GS_EXPORT CUresult CUDAAPI cuModuleGetGlobal_v2(CUdeviceptr *dptr, size_t *bytes, CUmodule hmod,
                                                const char *name) {
    GS_NEED(real, cuModuleGetGlobal_v2);
    GS_USE(hmod, GS_PART_SHARED, dptr, bytes, hmod, name);
}

GS_EXPORT CUresult CUDAAPI cuModuleGetGlobal(CUdeviceptr_v1 *dptr, unsigned int *bytes,
                                             CUmodule hmod, const char *name) {
    GS_NEED(real, cuModuleGetGlobal);
    GS_USE(hmod, GS_PART_SHARED, dptr, bytes, hmod, name);
}

GS_EXPORT CUresult CUDAAPI cuModuleGetTexRef(CUtexref *pTexRef, CUmodule hmod, const char *name) {
    GS_NEED(real, cuModuleGetTexRef);
    GS_USE(hmod, GS_PART_SHARED, pTexRef, hmod, name);
}

GS_EXPORT CUresult CUDAAPI cuModuleGetSurfRef(CUsurfref *pSurfRef, CUmodule hmod,
                                              const char *name) {
    GS_NEED(real, cuModuleGetSurfRef);
    GS_USE(hmod, GS_PART_SHARED, pSurfRef, hmod, name);
}

GS_EXPORT CUresult CUDAAPI cuModuleEnumerateFunctions(CUfunction *functions, unsigned int n,
                                                      CUmodule mod) {
    GS_NEED(real, cuModuleEnumerateFunctions);
    GS_USE(mod, GS_PART_ALL, functions, n, mod); /* the program may use any of them */
}

/* A function that the program got by name was charged at that call. */
GS_EXPORT CUresult CUDAAPI cuFuncLoad(CUfunction function) {
    GS_NEED(real, cuFuncLoad);
    return real(function);
}
