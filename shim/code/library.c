/* Libraries belong to no context; their code is loaded into each one in which it is used. */
#include "accounting/compute.h"
#include "code.h"

/* CUlibrary -> the sizes in its image as in gs_objects; `context` = where its image is while the
 * sizes are unread */
static struct gs_map libraries;
static struct gs_map kernels; /* CUkernel -> extra = CUlibrary */
struct gs_map gs_library_modules;
/* How many kernels were handed out: launches of other programs skip the look-up. */
static _Atomic uint64_t kernels_known;

static uint64_t key_of(const void *handle) {
    return (uint64_t)(uintptr_t)handle;
}

static struct gs_entry entry_of(struct gs_image image) {
    return (struct gs_entry){.bytes = image.data, .extra = image.code, .kind = GS_KIND_MODULE};
}

/* The sizes of a library, read at its first use: programs load many libraries that they never use.
 */
static bool sizes_of(CUlibrary library, CUdevice device, struct gs_image *image) {
    struct gs_entry entry;
    if (!gs_map_get(&libraries, key_of(library), &entry))
        return false;
    if (entry.context) {
        const void *code = (const void *)(uintptr_t)entry.context;
        struct gs_entry read = entry_of(gs_image_read(code, SIZE_MAX, gs_arch(device)));
        if (gs_map_take(&libraries, key_of(library), &entry)) /* else it is being unloaded */
            gs_map_put(&libraries, key_of(library), &read);
        entry = read;
    }
    *image = (struct gs_image){entry.bytes, entry.extra};
    return true;
}

CUresult gs_use_library(struct gs_use *use, CUlibrary library, bool whole) {
    struct gs_image image = {0};
    *use = (struct gs_use){.may_load = false};
    if (!gs_slot())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!gs_here(&use->here) || (!gs_use_is_known(key_of(library), &use->here) &&
                                 !sizes_of(library, use->here.device, &image)))
        return CUDA_SUCCESS;
    return gs_use_owner(use, key_of(library), &image, whole || !gs_lazy_loading());
}

#define GS_USE(library, whole, ...) \
    struct gs_use use; \
    CUresult result = gs_use_library(&use, library, whole); \
    if (result != CUDA_SUCCESS) \
        return result; \
    result = real(__VA_ARGS__); \
    gs_use_end(&use, result == CUDA_SUCCESS); \
    return result

/* ---- loading -------------------------------------------------------------------------------- */

static CUresult keep(CUresult result, const CUlibrary *library, const struct gs_entry *entry) {
    struct gs_entry old;
    if (result != CUDA_SUCCESS || !library)
        return result;
    gs_map_take(&libraries, key_of(*library), &old); /* of a handle that no unload has ended */
    if (gs_map_put(&libraries, key_of(*library), entry))
        return result;
    GS_REAL(cuLibraryUnload)(*library);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Eager loading takes the memory within the call, in the current context. `load` is the call. */
#define GS_LOAD(entry, library, load) \
    struct gs_use use = {.may_load = false}; \
    CUresult result = CUDA_SUCCESS; \
    if (!gs_lazy_loading() && gs_here(&use.here)) { \
        use.code = (entry)->bytes + (entry)->extra; \
        result = gs_use_reserve(&use); \
    } \
    if (result != CUDA_SUCCESS) \
        return result; \
    result = keep(load, library, entry); \
    use.owner = result == CUDA_SUCCESS && (library) ? key_of(*(library)) : 0; \
    gs_use_end(&use, use.owner != 0); \
    return result

static unsigned arch_here(void) {
    struct gs_here here;
    return gs_arch(gs_here(&here) ? here.device : 0);
}

/* The program keeps the image in place for as long as the library is loaded. */
static bool is_preserved(const CUlibraryOption *option, void *const *value, unsigned n) {
    for (unsigned i = 0; option && value && i < n; i++)
        if (option[i] == CU_LIBRARY_BINARY_IS_PRESERVED && value[i])
            return true;
    return false;
}

GS_EXPORT CUresult CUDAAPI cuLibraryLoadData(CUlibrary *library, const void *code,
                                             CUjit_option *jit, void **jitv, unsigned int njit,
                                             CUlibraryOption *opt, void **optv, unsigned int nopt) {
    GS_NEED(real, cuLibraryLoadData);
    if (!gs_slot() || !code)
        return real(library, code, jit, jitv, njit, opt, optv, nopt);
    struct gs_entry entry = {.kind = GS_KIND_MODULE};
    if (is_preserved(opt, optv, nopt) && gs_lazy_loading())
        entry.context = key_of(code);
    else
        entry = entry_of(gs_image_read(code, SIZE_MAX, arch_here()));
    GS_LOAD(&entry, library, real(library, code, jit, jitv, njit, opt, optv, nopt));
}

GS_EXPORT CUresult CUDAAPI cuLibraryLoadFromFile(CUlibrary *library, const char *file,
                                                 CUjit_option *jit, void **jitv, unsigned int njit,
                                                 CUlibraryOption *opt, void **optv,
                                                 unsigned int nopt) {
    GS_NEED(real, cuLibraryLoadFromFile);
    if (!gs_slot())
        return real(library, file, jit, jitv, njit, opt, optv, nopt);
    struct gs_entry entry = entry_of(gs_image_read_file(file, arch_here()));
    GS_LOAD(&entry, library, real(library, file, jit, jitv, njit, opt, optv, nopt));
}

static bool is_of_library(uint64_t key, const struct gs_entry *entry, void *library) {
    (void)key;
    return entry->extra == key_of(library);
}

static void forget_one(uint64_t key, const struct gs_entry *entry, void *arg) {
    (void)key, (void)entry, (void)arg;
}

GS_EXPORT CUresult CUDAAPI cuLibraryUnload(CUlibrary library) {
    GS_NEED(real, cuLibraryUnload);
    struct gs_entry entry;
    bool known = gs_slot() && gs_map_take(&libraries, key_of(library), &entry);
    gs_compute_forget(); /* its kernels' handles may be another library's next */
    CUresult result = real(library);
    if (known && result != CUDA_SUCCESS)
        gs_map_put(&libraries, key_of(library), &entry);
    if (!known || result != CUDA_SUCCESS)
        return result;
    gs_map_take_all(&kernels, is_of_library, forget_one, library);
    gs_map_take_all(&gs_library_modules, is_of_library, forget_one, library);
    gs_use_forget(key_of(library));
    return result;
}

/* ---- kernels -------------------------------------------------------------------------------- */

static void learn_kernel(CUkernel kernel, CUlibrary library) {
    struct gs_entry known, entry = {.extra = key_of(library)};
    if (!gs_slot() || gs_map_get(&kernels, key_of(kernel), &known))
        return;
    gs_map_put(&kernels, key_of(kernel), &entry);
    atomic_fetch_add(&kernels_known, 1);
}

/* A kernel handle loads nothing until it is used in a context. */
GS_EXPORT CUresult CUDAAPI cuLibraryGetKernel(CUkernel *pKernel, CUlibrary library,
                                              const char *name) {
    GS_NEED(real, cuLibraryGetKernel);
    CUresult result = real(pKernel, library, name);
    if (result == CUDA_SUCCESS && pKernel)
        learn_kernel(*pKernel, library);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuLibraryEnumerateKernels(CUkernel *out, unsigned int n, CUlibrary lib) {
    GS_NEED(real, cuLibraryEnumerateKernels);
    CUresult result = real(out, n, lib);
    for (unsigned i = 0; result == CUDA_SUCCESS && out && i < n && out[i]; i++)
        learn_kernel(out[i], lib);
    return result;
}

bool gs_is_kernel(const void *function) {
    struct gs_entry entry;
    return atomic_load_explicit(&kernels_known, memory_order_relaxed) != 0 &&
           gs_map_get(&kernels, key_of(function), &entry);
}

CUresult gs_use_kernel(struct gs_use *use, const void *function) {
    struct gs_entry entry;
    *use = (struct gs_use){.may_load = false};
    if (atomic_load_explicit(&kernels_known, memory_order_relaxed) == 0 ||
        !gs_map_get(&kernels, key_of(function), &entry))
        return CUDA_SUCCESS;
    return gs_use_library(use, (CUlibrary)(uintptr_t)entry.extra, false);
}

/* ---- what else of a library is used --------------------------------------------------------- */

GS_EXPORT CUresult CUDAAPI cuLibraryGetModule(CUmodule *pMod, CUlibrary library) {
    GS_NEED(real, cuLibraryGetModule);
    struct gs_entry entry = {.extra = key_of(library)};
    CUresult result = real(pMod, library);
    if (result == CUDA_SUCCESS && pMod && gs_slot() &&
        !gs_map_get(&gs_library_modules, key_of(*pMod), &(struct gs_entry){0}))
        gs_map_put(&gs_library_modules, key_of(*pMod), &entry);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuLibraryGetGlobal(CUdeviceptr *dptr, size_t *bytes, CUlibrary library,
                                              const char *name) {
    GS_NEED(real, cuLibraryGetGlobal);
    GS_USE(library, false, dptr, bytes, library, name);
}

GS_EXPORT CUresult CUDAAPI cuLibraryGetManaged(CUdeviceptr *dptr, size_t *bytes, CUlibrary library,
                                               const char *name) {
    GS_NEED(real, cuLibraryGetManaged);
    GS_USE(library, false, dptr, bytes, library, name);
}

GS_EXPORT CUresult CUDAAPI cuLibraryGetUnifiedFunction(void **fptr, CUlibrary library,
                                                       const char *symbol) {
    GS_NEED(real, cuLibraryGetUnifiedFunction);
    GS_USE(library, true, fptr, library, symbol);
}
