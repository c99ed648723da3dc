/* Libraries belong to no context; their code is loaded into each one in which it is used. */
#include <stdlib.h>
#include <string.h>

#include "accounting/compute.h"
#include "code.h"

/* CUlibrary -> extra = its struct gs_image, 0 while it is unread; bytes = where to read it then */
static struct gs_map libraries;
static struct gs_map kernels; /* CUkernel -> extra = CUlibrary, bytes = hash of its name */
struct gs_map gs_library_modules;
/* How many kernels were handed out: launches of other programs skip the look-up. */
static _Atomic uint64_t kernels_known;

static uint64_t key_of(const void *handle) {
    return (uint64_t)(uintptr_t)handle;
}

/* Read the image of a library at its first use: programs load many libraries that they never use.
 * False: no memory. */
static bool read_image(CUlibrary library, const struct gs_here *here) {
    struct gs_entry entry;
    if (!gs_map_get(&libraries, key_of(library), &entry) || entry.extra)
        return true;
    struct gs_image *image =
        gs_image_read((const void *)(uintptr_t)entry.bytes, SIZE_MAX, gs_arch(here->device));
    if (!image)
        return false;
    if (!gs_map_swap(&libraries, key_of(library), 0, key_of(image)))
        free(image); /* another thread was first, or has unloaded the library */
    return true;
}

CUresult gs_library_use(CUlibrary library, uint64_t part) {
    struct gs_here here;
    struct gs_entry entry;
    struct gs_part found = {0};
    if (!gs_slot())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!gs_map_get(&libraries, key_of(library), &entry) || !gs_here(&here) ||
        gs_code_is_charged(key_of(library), &here, part))
        return CUDA_SUCCESS;
    if (!gs_lazy_loading())
        part = GS_PART_ALL;
    if (!read_image(library, &here))
        return CUDA_ERROR_OUT_OF_MEMORY;
    gs_lock(&gs_self()->lock_context);
    if (gs_map_get(&libraries, key_of(library), &entry) && entry.extra)
        found = gs_part_of((const struct gs_image *)(uintptr_t)entry.extra, part);
    gs_unlock(&gs_self()->lock_context);
    return gs_part_use(key_of(library), &here, &found);
}

#define GS_USE(library, part, ...) \
    CUresult result = gs_library_use(library, part); \
    return result == CUDA_SUCCESS ? real(__VA_ARGS__) : result

/* ---- loading -------------------------------------------------------------------------------- */

/* Keep a library's image, or where it is. Takes the image over. */
static CUresult keep(CUresult result, const CUlibrary *library, struct gs_image *image,
                     const void *code) {
    struct gs_entry old, entry = {.bytes = key_of(code), .extra = key_of(image)};
    if (result == CUDA_SUCCESS && library)
        gs_map_take(&libraries, key_of(*library), &old); /* of a handle that no unload has ended */
    if (result == CUDA_SUCCESS && library && gs_map_put(&libraries, key_of(*library), &entry))
        return result;
    free(image);
    if (result != CUDA_SUCCESS || !library)
        return result;
    GS_REAL(cuLibraryUnload)(*library);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Eager loading takes the memory within the call, in the current context. `load` is the call. */
#define GS_LOAD(image, library, code, load) \
    struct gs_here here; \
    bool eager = (image) && !gs_lazy_loading() && gs_here(&here); \
    CUresult result = eager ? gs_code_take(&here, (image)->all, (image)->known) : CUDA_SUCCESS; \
    if (result != CUDA_SUCCESS) { \
        free(image); \
        return result; \
    } \
    uint64_t all = eager ? (image)->all : 0; \
    result = keep(load, library, image, code); \
    if (eager && result == CUDA_SUCCESS) \
        return gs_code_record(key_of(*library), &here, GS_PART_ALL, all); \
    if (eager) \
        gs_code_give(gs_context_key(here.context), here.dev, all); \
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
    bool later = is_preserved(opt, optv, nopt) && gs_lazy_loading();
    struct gs_image *image = later ? NULL : gs_image_read(code, SIZE_MAX, arch_here());
    if (!image && !later)
        return CUDA_ERROR_OUT_OF_MEMORY;
    GS_LOAD(image, library, code, real(library, code, jit, jitv, njit, opt, optv, nopt));
}

GS_EXPORT CUresult CUDAAPI cuLibraryLoadFromFile(CUlibrary *library, const char *file,
                                                 CUjit_option *jit, void **jitv, unsigned int njit,
                                                 CUlibraryOption *opt, void **optv,
                                                 unsigned int nopt) {
    GS_NEED(real, cuLibraryLoadFromFile);
    struct gs_image *image = gs_slot() ? gs_image_read_file(file, arch_here()) : NULL;
    if (!image)
        return gs_slot() ? CUDA_ERROR_OUT_OF_MEMORY
                         : real(library, file, jit, jitv, njit, opt, optv, nopt);
    GS_LOAD(image, library, NULL, real(library, file, jit, jitv, njit, opt, optv, nopt));
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
    gs_code_forget(key_of(library));
    gs_lock(&gs_self()->lock_context); /* while a thread may still read the sizes */
    free((void *)(uintptr_t)entry.extra);
    gs_unlock(&gs_self()->lock_context);
    return result;
}

/* ---- kernels -------------------------------------------------------------------------------- */

static void learn_kernel(CUkernel kernel, CUlibrary library, uint64_t part) {
    struct gs_entry known, entry = {.extra = key_of(library), .bytes = part};
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
    if (result == CUDA_SUCCESS && pKernel && name)
        learn_kernel(*pKernel, library, gs_image_hash(name, strlen(name)));
    return result;
}

GS_EXPORT CUresult CUDAAPI cuLibraryEnumerateKernels(CUkernel *out, unsigned int n, CUlibrary lib) {
    GS_NEED(real, cuLibraryEnumerateKernels);
    __typeof__(&cuKernelGetName) get_name = GS_REAL(cuKernelGetName);
    CUresult result = real(out, n, lib);
    for (unsigned i = 0; result == CUDA_SUCCESS && out && i < n && out[i]; i++) {
        const char *name;
        bool named = get_name && get_name(&name, out[i]) == CUDA_SUCCESS && name;
        learn_kernel(out[i], lib, named ? gs_image_hash(name, strlen(name)) : GS_PART_ALL);
    }
    return result;
}

bool gs_is_kernel(const void *function) {
    struct gs_entry entry;
    return atomic_load_explicit(&kernels_known, memory_order_relaxed) != 0 &&
           gs_map_get(&kernels, key_of(function), &entry);
}

CUresult gs_kernel_use(const void *function) {
    struct gs_entry entry;
    if (atomic_load_explicit(&kernels_known, memory_order_relaxed) == 0 ||
        !gs_map_get(&kernels, key_of(function), &entry))
        return CUDA_SUCCESS;
    return gs_library_use((CUlibrary)(uintptr_t)entry.extra, entry.bytes);
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
    GS_USE(library, GS_PART_SHARED, dptr, bytes, library, name);
}

GS_EXPORT CUresult CUDAAPI cuLibraryGetManaged(CUdeviceptr *dptr, size_t *bytes, CUlibrary library,
                                               const char *name) {
    GS_NEED(real, cuLibraryGetManaged);
    GS_USE(library, GS_PART_SHARED, dptr, bytes, library, name);
}

GS_EXPORT CUresult CUDAAPI cuLibraryGetUnifiedFunction(void **fptr, CUlibrary library,
                                                       const char *symbol) {
    GS_NEED(real, cuLibraryGetUnifiedFunction);
    GS_USE(library, GS_PART_ALL, fptr, library, symbol);
}
