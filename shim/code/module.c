/* Program images take device memory for their code and global data. When depends on the loading
 * mode: at the load, or (lazy, the default) when a function or variable of them is first asked for
 * in a context. The size is read from the image before the driver sees it (image.c). */
#include "code.h"

static uint64_t key_of(const void *handle) {
    return (uint64_t)(uintptr_t)handle;
}

bool gs_lazy_loading(void) {
    __typeof__(&cuModuleGetLoadingMode) get = GS_REAL(cuModuleGetLoadingMode);
    CUmoduleLoadingMode mode = CU_MODULE_EAGER_LOADING;
    return get && get(&mode) == CUDA_SUCCESS && mode == CU_MODULE_LAZY_LOADING;
}

/* ---- what cannot be read is measured ---------------------------------------------------------
 *
 * By how much less memory the device has after the load. Others may allocate in the meantime, and
 * then this is charged too much; it is done only for images that cannot be read. */

uint64_t gs_free_now(void) {
    size_t free_bytes = 0, total;
    __typeof__(&cuMemGetInfo_v2) get = GS_REAL(cuMemGetInfo_v2);
    return get && get(&free_bytes, &total) == CUDA_SUCCESS ? free_bytes : 0;
}

CUresult gs_charge_measured(uint64_t before, uint64_t charged, uint64_t *more) {
    struct gs_charge charge;
    uint64_t now = gs_free_now(), took = before > now ? before - now : 0;
    *more = 0;
    if (took <= charged)
        return CUDA_SUCCESS;
    CUresult result = gs_charge_begin(&charge, took - charged);
    if (result == CUDA_SUCCESS && !charge.passed)
        *more = charge.bytes;
    return result;
}

/* ---- modules: entry of gs_objects, extra = bytes not charged yet | flags -----------------------
 */

struct load {
    struct gs_charge charge;
    struct gs_image image;
    bool later;
    uint64_t before;
};

static CUresult load_begin(struct load *load, struct gs_image image) {
    load->image = image;
    load->later = gs_lazy_loading();
    load->before = image.known ? 0 : gs_free_now();
    return gs_charge_begin(&load->charge, load->later ? 0 : image.bytes);
}

static CUresult load_end(struct load *load, CUresult result, const CUmodule *module) {
    uint64_t more = 0;
    struct gs_entry entry;
    if (result != CUDA_SUCCESS || !module) {
        gs_charge_abort(&load->charge);
        return result;
    }
    gs_map_take(&gs_objects, key_of(*module), &entry); /* a dead one of the same handle */
    if (!load->image.known)
        result = gs_charge_measured(load->before, load->charge.bytes, &more);
    uint64_t later = load->later ? gs_round_up(load->image.bytes, GS_BLOCK) : 0;
    entry = (struct gs_entry){.bytes = load->charge.bytes + more,
                              .context = key_of(load->charge.context),
                              .dev = load->charge.dev,
                              .kind = GS_KIND_WHOLE,
                              .extra = later < GS_DEAD ? later : GS_DEAD - GS_BLOCK};
    if (load->later && !load->image.known)
        entry.extra |= GS_UNREAD;
    if (result == CUDA_SUCCESS && !load->charge.passed &&
        gs_map_put(&gs_objects, key_of(*module), &entry))
        return result;
    GS_REAL(cuModuleUnload)(*module);
    gs_release(load->charge.dev, more);
    gs_charge_abort(&load->charge);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

struct use {
    bool measure;
    uint64_t before;
    struct gs_entry entry;
};

/* First use: charge what was put off. Whoever takes the entry out charges; others find it charged.
 */
static CUresult use_begin(struct use *use, CUmodule module) {
    struct gs_entry *entry = &use->entry;
    struct gs_charge charge;
    use->measure = false;
    if (!gs_slot())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!gs_map_get(&gs_objects, key_of(module), entry) || entry->extra == 0)
        return CUDA_SUCCESS;
    if (entry->extra & GS_DEAD)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!gs_map_take(&gs_objects, key_of(module), entry))
        return CUDA_SUCCESS;
    bool unread = entry->extra & GS_UNREAD;
    uint64_t before = unread ? gs_free_now() : 0;
    CUresult result = gs_charge_begin(&charge, entry->extra & ~GS_UNREAD);
    if (result == CUDA_SUCCESS && !charge.passed) {
        entry->bytes += charge.bytes;
        entry->extra = 0;
        use->measure = unread;
        use->before = before;
    }
    if (!use->measure)
        gs_map_put(&gs_objects, key_of(module), entry);
    return result;
}

/* Too large: it goes, and its handle is remembered, so that the program may still unload it. */
static CUresult use_end(struct use *use, CUresult result, CUmodule module) {
    uint64_t more;
    if (!use->measure)
        return result;
    if (gs_charge_measured(use->before, use->entry.bytes, &more) == CUDA_SUCCESS) {
        use->entry.bytes += more;
        if (result != CUDA_SUCCESS && !more) /* perhaps it was not loaded */
            use->entry.extra = GS_UNREAD;
        gs_map_put(&gs_objects, key_of(module), &use->entry);
        return result;
    }
    GS_REAL(cuModuleUnload)(module);
    gs_release(use->entry.dev, use->entry.bytes);
    use->entry.bytes = 0;
    use->entry.extra = GS_DEAD;
    gs_map_put(&gs_objects, key_of(module), &use->entry);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

#define GS_LOAD(image, ...) \
    struct load load; \
    CUresult result = load_begin(&load, image); \
    return result == CUDA_SUCCESS ? load_end(&load, real(__VA_ARGS__), module) : result

#define GS_USE(module, ...) \
    struct use use; \
    CUresult result = use_begin(&use, module); \
    return result == CUDA_SUCCESS ? use_end(&use, real(__VA_ARGS__), module) : result

GS_EXPORT CUresult CUDAAPI cuModuleLoad(CUmodule *module, const char *fname) {
    GS_NEED(real, cuModuleLoad);
    GS_LOAD(gs_image_read_file(fname), module, fname);
}

GS_EXPORT CUresult CUDAAPI cuModuleLoadData(CUmodule *module, const void *image) {
    GS_NEED(real, cuModuleLoadData);
    GS_LOAD(gs_image_read(image, SIZE_MAX), module, image);
}

GS_EXPORT CUresult CUDAAPI cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int n,
                                              CUjit_option *options, void **values) {
    GS_NEED(real, cuModuleLoadDataEx);
    GS_LOAD(gs_image_read(image, SIZE_MAX), module, image, n, options, values);
}

GS_EXPORT CUresult CUDAAPI cuModuleLoadFatBinary(CUmodule *module, const void *fatCubin) {
    GS_NEED(real, cuModuleLoadFatBinary);
    GS_LOAD(gs_image_read(fatCubin, SIZE_MAX), module, fatCubin);
}

GS_EXPORT CUresult CUDAAPI cuModuleUnload(CUmodule hmod) {
    GS_NEED(real, cuModuleUnload);
    struct gs_entry entry;
    if (gs_map_get(&gs_objects, key_of(hmod), &entry) && entry.extra & GS_DEAD)
        return gs_map_take(&gs_objects, key_of(hmod), &entry) ? CUDA_SUCCESS
                                                              : CUDA_ERROR_INVALID_HANDLE;
    return GS_FREE(gs_objects, key_of(hmod), real(hmod));
}

GS_EXPORT CUresult CUDAAPI cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name) {
    GS_NEED(real, cuModuleGetFunction);
    GS_USE(hmod, hfunc, hmod, name);
}

GS_EXPORT CUresult CUDAAPI cuModuleGetGlobal_v2(CUdeviceptr *dptr, size_t *bytes, CUmodule hmod,
                                                const char *name) {
    GS_NEED(real, cuModuleGetGlobal_v2);
    GS_USE(hmod, dptr, bytes, hmod, name);
}

GS_EXPORT CUresult CUDAAPI cuModuleGetGlobal(CUdeviceptr_v1 *dptr, unsigned int *bytes,
                                             CUmodule hmod, const char *name) {
    GS_NEED(real, cuModuleGetGlobal);
    GS_USE(hmod, dptr, bytes, hmod, name);
}

GS_EXPORT CUresult CUDAAPI cuModuleGetTexRef(CUtexref *pTexRef, CUmodule hmod, const char *name) {
    GS_NEED(real, cuModuleGetTexRef);
    GS_USE(hmod, pTexRef, hmod, name);
}

GS_EXPORT CUresult CUDAAPI cuModuleGetSurfRef(CUsurfref *pSurfRef, CUmodule hmod,
                                              const char *name) {
    GS_NEED(real, cuModuleGetSurfRef);
    GS_USE(hmod, pSurfRef, hmod, name);
}

GS_EXPORT CUresult CUDAAPI cuModuleEnumerateFunctions(CUfunction *functions, unsigned int n,
                                                      CUmodule mod) {
    GS_NEED(real, cuModuleEnumerateFunctions);
    GS_USE(mod, functions, n, mod);
}

/* A function of a module that was asked for is charged by then. */
GS_EXPORT CUresult CUDAAPI cuFuncLoad(CUfunction function) {
    GS_NEED(real, cuFuncLoad);
    CUmodule module;
    __typeof__(&cuFuncGetModule) get = GS_REAL(cuFuncGetModule);
    if (!get || get(&module, function) != CUDA_SUCCESS)
        return real(function);
    GS_USE(module, function);
}
