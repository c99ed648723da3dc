/* Program images take device memory for their code and global data. When depends on the loading
 * mode: at the load, or (lazy, the default) when a function or variable of them is first asked for
 * in a context. The size is read from the image before the driver sees it (image.c). */
#include "cuda_shim.h"
#include "image.h"

static struct gs_map libraries; /* CUlibrary -> extra = bytes */
static struct gs_map kernels;   /* CUkernel -> extra = CUlibrary */

static uint64_t key_of(const void *handle) {
    return (uint64_t)(uintptr_t)handle;
}

static bool lazy(void) {
    __typeof__(&cuModuleGetLoadingMode) get = GS_REAL(cuModuleGetLoadingMode);
    CUmoduleLoadingMode mode = CU_MODULE_EAGER_LOADING;
    return get && get(&mode) == CUDA_SUCCESS && mode == CU_MODULE_LAZY_LOADING;
}

/* ---- modules: entry of gs_objects, extra = bytes not charged yet -------------------------------
 */

struct load {
    struct gs_charge charge;
    uint64_t later;
};

static CUresult load_begin(struct load *load, uint64_t bytes) {
    load->later = lazy() ? bytes : 0;
    return gs_charge_begin(&load->charge, load->later ? 0 : bytes);
}

static CUresult load_end(struct load *load, CUresult result, const CUmodule *module) {
    if (result != CUDA_SUCCESS || !module) {
        gs_charge_abort(&load->charge);
        return result;
    }
    struct gs_entry entry = {.bytes = load->charge.bytes,
                             .context = key_of(load->charge.context),
                             .dev = load->charge.dev,
                             .kind = GS_KIND_WHOLE,
                             .extra = gs_round_up(load->later, GS_BLOCK)};
    if (!load->charge.passed && gs_map_put(&gs_objects, key_of(*module), &entry))
        return result;
    GS_REAL(cuModuleUnload)(*module);
    gs_charge_abort(&load->charge);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* First use: charge what was put off. Whoever takes the entry out charges; others find it charged.
 */
static CUresult first_use(CUmodule module) {
    struct gs_entry entry;
    struct gs_charge charge;
    if (!gs_slot())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!gs_map_get(&gs_objects, key_of(module), &entry) || entry.extra == 0 ||
        !gs_map_take(&gs_objects, key_of(module), &entry))
        return CUDA_SUCCESS;
    CUresult result = gs_charge_begin(&charge, entry.extra);
    if (result == CUDA_SUCCESS && !charge.passed) {
        entry.bytes += charge.bytes;
        entry.extra = 0;
    }
    gs_map_put(&gs_objects, key_of(module), &entry);
    return result;
}

#define GS_LOAD(bytes, ...) \
    struct load load; \
    CUresult result = load_begin(&load, bytes); \
    return result == CUDA_SUCCESS ? load_end(&load, real(__VA_ARGS__), module) : result

#define GS_USE(module, ...) \
    CUresult result = first_use(module); \
    return result == CUDA_SUCCESS ? real(__VA_ARGS__) : result

GS_EXPORT CUresult CUDAAPI cuModuleLoad(CUmodule *module, const char *fname) {
    GS_NEED(real, cuModuleLoad);
    GS_LOAD(gs_image_file_bytes(fname), module, fname);
}

GS_EXPORT CUresult CUDAAPI cuModuleLoadData(CUmodule *module, const void *image) {
    GS_NEED(real, cuModuleLoadData);
    GS_LOAD(gs_image_bytes(image, SIZE_MAX), module, image);
}

GS_EXPORT CUresult CUDAAPI cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int n,
                                              CUjit_option *options, void **values) {
    GS_NEED(real, cuModuleLoadDataEx);
    GS_LOAD(gs_image_bytes(image, SIZE_MAX), module, image, n, options, values);
}

GS_EXPORT CUresult CUDAAPI cuModuleLoadFatBinary(CUmodule *module, const void *fatCubin) {
    GS_NEED(real, cuModuleLoadFatBinary);
    GS_LOAD(gs_image_bytes(fatCubin, SIZE_MAX), module, fatCubin);
}

GS_EXPORT CUresult CUDAAPI cuModuleUnload(CUmodule hmod) {
    GS_NEED(real, cuModuleUnload);
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

/* ---- libraries: belong to no context; loaded into each one in which they are used ---------------
 */

static uint64_t loaded_key(CUlibrary library, CUcontext context) {
    uint64_t key = (key_of(library) * UINT64_C(0x9e3779b97f4a7c15)) ^ key_of(context);
    return key & (UINT64_MAX >> 1) ? key & (UINT64_MAX >> 1) : 1;
}

/* Charge a library in the current context, once. A kernel handle may be launched as it is, and then
 * loads its library: so handing one out is the first use. */
static CUresult use_library(CUlibrary library) {
    struct gs_entry known, entry;
    struct gs_charge charge;
    struct gs_here here;
    if (!gs_slot())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!gs_map_get(&libraries, key_of(library), &known) || known.extra == 0 || !gs_here(&here))
        return CUDA_SUCCESS;
    uint64_t key = loaded_key(library, here.context);
    if (gs_map_get(&gs_loaded, key, &entry))
        return CUDA_SUCCESS;
    CUresult result = gs_charge_begin(&charge, known.extra);
    if (result != CUDA_SUCCESS)
        return result;
    entry = (struct gs_entry){.bytes = charge.bytes,
                              .context = key_of(here.context),
                              .dev = charge.dev,
                              .kind = GS_KIND_WHOLE,
                              .extra = key_of(library)};
    gs_lock(&gs_self()->lock_context);
    bool raced = gs_map_get(&gs_loaded, key, &known);
    if (!raced)
        gs_map_put(&gs_loaded, key, &entry);
    gs_unlock(&gs_self()->lock_context);
    if (raced)
        gs_charge_abort(&charge);
    return CUDA_SUCCESS;
}

static CUresult library_loaded(CUresult result, const CUlibrary *library, uint64_t bytes) {
    if (result != CUDA_SUCCESS || !library || !gs_slot())
        return result;
    struct gs_entry entry = {.extra = bytes};
    gs_map_put(&libraries, key_of(*library), &entry);
    return result;
}

/* Eager loading takes the memory in the call, so it is charged before; undone when there is none.
 */
static CUresult room_for(uint64_t bytes, struct gs_charge *charge) {
    charge->passed = true;
    return bytes && !lazy() && gs_slot() ? gs_charge_begin(charge, bytes) : CUDA_SUCCESS;
}

#define GS_LIBRARY(size, ...) \
    uint64_t bytes = size; \
    struct gs_charge room; \
    CUresult result = room_for(bytes, &room); \
    if (result != CUDA_SUCCESS) \
        return result; \
    result = library_loaded(real(__VA_ARGS__), library, bytes); \
    bool eager = !room.passed && result == CUDA_SUCCESS && library; \
    gs_charge_abort(&room); \
    if (eager) \
        use_library(*library); \
    return result

GS_EXPORT CUresult CUDAAPI cuLibraryLoadData(CUlibrary *library, const void *code,
                                             CUjit_option *jit, void **jitv, unsigned int njit,
                                             CUlibraryOption *opt, void **optv, unsigned int nopt) {
    GS_NEED(real, cuLibraryLoadData);
    GS_LIBRARY(gs_image_bytes(code, SIZE_MAX), library, code, jit, jitv, njit, opt, optv, nopt);
}

GS_EXPORT CUresult CUDAAPI cuLibraryLoadFromFile(CUlibrary *library, const char *file,
                                                 CUjit_option *jit, void **jitv, unsigned int njit,
                                                 CUlibraryOption *opt, void **optv,
                                                 unsigned int nopt) {
    GS_NEED(real, cuLibraryLoadFromFile);
    GS_LIBRARY(gs_image_file_bytes(file), library, file, jit, jitv, njit, opt, optv, nopt);
}

static bool of_library(uint64_t key, const struct gs_entry *entry, void *arg) {
    (void)key;
    return entry->extra == key_of(arg);
}

static void unloaded(uint64_t key, const struct gs_entry *entry, void *arg) {
    (void)arg;
    gs_uncharge(key, entry);
}

static void forgotten(uint64_t key, const struct gs_entry *entry, void *arg) {
    (void)key, (void)entry, (void)arg;
}

GS_EXPORT CUresult CUDAAPI cuLibraryUnload(CUlibrary library) {
    GS_NEED(real, cuLibraryUnload);
    struct gs_entry entry;
    bool known = gs_slot() && gs_map_take(&libraries, key_of(library), &entry);
    CUresult result = real(library);
    if (known && result == CUDA_SUCCESS) {
        gs_map_take_all(&gs_loaded, of_library, unloaded, library);
        gs_map_take_all(&kernels, of_library, forgotten, library);
    } else if (known)
        gs_map_put(&libraries, key_of(library), &entry);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuLibraryGetKernel(CUkernel *pKernel, CUlibrary library,
                                              const char *name) {
    GS_NEED(real, cuLibraryGetKernel);
    struct gs_entry entry = {.extra = key_of(library)}, known;
    CUresult result = use_library(library);
    if (result != CUDA_SUCCESS || (result = real(pKernel, library, name)) != CUDA_SUCCESS ||
        !pKernel)
        return result;
    if (!gs_map_get(&kernels, key_of(*pKernel), &known))
        gs_map_put(&kernels, key_of(*pKernel), &entry);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuLibraryEnumerateKernels(CUkernel *out, unsigned int n, CUlibrary lib) {
    GS_NEED(real, cuLibraryEnumerateKernels);
    CUresult result = use_library(lib);
    return result == CUDA_SUCCESS ? real(out, n, lib) : result;
}

GS_EXPORT CUresult CUDAAPI cuLibraryGetModule(CUmodule *pMod, CUlibrary library) {
    GS_NEED(real, cuLibraryGetModule);
    CUresult result = use_library(library);
    return result == CUDA_SUCCESS ? real(pMod, library) : result;
}

GS_EXPORT CUresult CUDAAPI cuLibraryGetGlobal(CUdeviceptr *dptr, size_t *bytes, CUlibrary library,
                                              const char *name) {
    GS_NEED(real, cuLibraryGetGlobal);
    CUresult result = use_library(library);
    return result == CUDA_SUCCESS ? real(dptr, bytes, library, name) : result;
}

GS_EXPORT CUresult CUDAAPI cuLibraryGetManaged(CUdeviceptr *dptr, size_t *bytes, CUlibrary library,
                                               const char *name) {
    GS_NEED(real, cuLibraryGetManaged);
    CUresult result = use_library(library);
    return result == CUDA_SUCCESS ? real(dptr, bytes, library, name) : result;
}

/* Another context than the one in which the kernel was asked for: loaded there as well. */
GS_EXPORT CUresult CUDAAPI cuKernelGetFunction(CUfunction *pFunc, CUkernel kernel) {
    GS_NEED(real, cuKernelGetFunction);
    struct gs_entry entry;
    CUresult result = CUDA_SUCCESS;
    if (gs_map_get(&kernels, key_of(kernel), &entry))
        result = use_library((CUlibrary)(uintptr_t)entry.extra);
    return result == CUDA_SUCCESS ? real(pFunc, kernel) : result;
}
