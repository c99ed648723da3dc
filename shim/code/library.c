/* Libraries belong to no context; they are loaded into each one in which they are used. */
#include "accounting/compute.h"
#include "code.h"

static struct gs_map libraries; /* CUlibrary -> extra = bytes | flags */
static struct gs_map kernels;   /* CUkernel -> extra = CUlibrary */
/* How many kernels were handed out: launches of other programs skip the look-up. */
static _Atomic uint64_t kernels_known;

static uint64_t key_of(const void *handle) {
    return (uint64_t)(uintptr_t)handle;
}

static uint64_t loaded_key(CUlibrary library, CUcontext context) {
    uint64_t key = (key_of(library) * UINT64_C(0x9e3779b97f4a7c15)) ^ key_of(context);
    key &= UINT64_MAX >> 1;
    return key ? key : 1;
}

#define UNMEASURED UINT64_C(1) /* in gs_loaded, beside the library's handle */

/* Charge a library in the current context, once. A kernel handle may be launched as it is, and then
 * loads its library: so handing one out is the first use. */
CUresult gs_library_use_begin(struct gs_use *use, CUlibrary library, bool loads) {
    struct gs_entry known, entry;
    struct gs_charge charge;
    struct gs_here here;
    *use = (struct gs_use){.library = library, .loads = loads};
    if (!gs_slot())
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!gs_map_get(&libraries, key_of(library), &known) || known.extra == 0)
        return CUDA_SUCCESS;
    if (known.extra & GS_DEAD)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!gs_here(&here))
        return CUDA_SUCCESS;
    use->key = loaded_key(library, here.context);
    if (gs_map_get(&gs_loaded, use->key, &entry)) {
        use->measure = entry.extra & UNMEASURED;
        use->before = use->measure ? gs_free_now() : 0;
        return CUDA_SUCCESS;
    }
    bool unread = known.extra & GS_UNREAD;
    uint64_t before = unread ? gs_free_now() : 0;
    CUresult result = gs_charge_begin(&charge, known.extra & ~GS_UNREAD);
    if (result != CUDA_SUCCESS)
        return result;
    entry = (struct gs_entry){.bytes = charge.bytes,
                              .context = key_of(here.context),
                              .dev = charge.dev,
                              .kind = GS_KIND_WHOLE,
                              .extra = key_of(library) | (unread ? UNMEASURED : 0)};
    gs_lock(&gs_self()->lock_context);
    bool raced = gs_map_get(&gs_loaded, use->key, &known);
    bool kept = !raced && gs_map_put(&gs_loaded, use->key, &entry);
    gs_unlock(&gs_self()->lock_context);
    if (!kept)
        gs_charge_abort(&charge);
    use->measure = kept && unread;
    use->before = before;
    return raced || kept ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static void forget_uses(CUlibrary library);

/* Too large: it goes, and its handle is remembered, so that the program may still unload it. */
CUresult gs_library_use_end(struct gs_use *use, CUresult result) {
    CUlibrary library = use->library;
    struct gs_entry entry;
    uint64_t more;
    if (!use->measure || !gs_map_take(&gs_loaded, use->key, &entry))
        return result;
    if (gs_charge_measured(use->before, entry.bytes, &more) == CUDA_SUCCESS) {
        entry.bytes += more;
        if (more || (use->loads && result == CUDA_SUCCESS))
            entry.extra &= ~UNMEASURED;
        gs_map_put(&gs_loaded, use->key, &entry);
        return result;
    }
    gs_compute_forget();
    GS_REAL(cuLibraryUnload)(library);
    gs_release(entry.dev, entry.bytes);
    forget_uses(library);
    if (gs_map_take(&libraries, key_of(library), &entry)) {
        entry.extra = GS_DEAD;
        gs_map_put(&libraries, key_of(library), &entry);
    }
    return CUDA_ERROR_OUT_OF_MEMORY;
}

#define GS_USE(loads, library, ...) \
    struct gs_use use; \
    CUresult result = gs_library_use_begin(&use, library, loads); \
    return result == CUDA_SUCCESS ? gs_library_use_end(&use, real(__VA_ARGS__)) : result

/* The image of a library that is too large to be counted is as good as unread. */
static CUresult library_loaded(CUresult result, const CUlibrary *library, struct gs_image image) {
    if (result != CUDA_SUCCESS || !library || !gs_slot())
        return result;
    struct gs_entry entry;
    gs_map_take(&libraries, key_of(*library), &entry); /* a dead one of the same handle */
    entry = (struct gs_entry){.extra = image.bytes < GS_DEAD ? image.bytes : GS_DEAD - GS_BLOCK};
    if (!image.known)
        entry.extra |= GS_UNREAD;
    if (gs_map_put(&libraries, key_of(*library), &entry))
        return result;
    GS_REAL(cuLibraryUnload)(*library);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* Eager loading takes the memory in the call, so it is charged before; undone when there is none.
 */
static CUresult room_for(uint64_t bytes, struct gs_charge *charge) {
    charge->passed = true;
    return bytes && !gs_lazy_loading() && gs_slot() ? gs_charge_begin(charge, bytes) : CUDA_SUCCESS;
}

#define GS_LIBRARY(read, ...) \
    struct gs_image image = read; \
    struct gs_charge room; \
    struct gs_use use; \
    CUresult result = room_for(image.bytes, &room); \
    if (result != CUDA_SUCCESS) \
        return result; \
    uint64_t before = image.known ? 0 : gs_free_now(); \
    result = library_loaded(real(__VA_ARGS__), library, image); \
    bool eager = result == CUDA_SUCCESS && library && !gs_lazy_loading(); \
    gs_charge_abort(&room); \
    if (!eager || gs_library_use_begin(&use, *library, true) != CUDA_SUCCESS) \
        return result; \
    use.before = before; \
    return gs_library_use_end(&use, result)

GS_EXPORT CUresult CUDAAPI cuLibraryLoadData(CUlibrary *library, const void *code,
                                             CUjit_option *jit, void **jitv, unsigned int njit,
                                             CUlibraryOption *opt, void **optv, unsigned int nopt) {
    GS_NEED(real, cuLibraryLoadData);
    GS_LIBRARY(gs_image_read(code, SIZE_MAX), library, code, jit, jitv, njit, opt, optv, nopt);
}

GS_EXPORT CUresult CUDAAPI cuLibraryLoadFromFile(CUlibrary *library, const char *file,
                                                 CUjit_option *jit, void **jitv, unsigned int njit,
                                                 CUlibraryOption *opt, void **optv,
                                                 unsigned int nopt) {
    GS_NEED(real, cuLibraryLoadFromFile);
    GS_LIBRARY(gs_image_read_file(file), library, file, jit, jitv, njit, opt, optv, nopt);
}

static bool of_library(uint64_t key, const struct gs_entry *entry, void *arg) {
    (void)key;
    return (entry->extra & ~UNMEASURED) == key_of(arg);
}

static void unloaded(uint64_t key, const struct gs_entry *entry, void *arg) {
    (void)arg;
    gs_uncharge(key, entry);
}

static void forgotten(uint64_t key, const struct gs_entry *entry, void *arg) {
    (void)key, (void)entry, (void)arg;
}

static void forget_uses(CUlibrary library) {
    gs_map_take_all(&gs_loaded, of_library, unloaded, library);
    gs_map_take_all(&kernels, of_library, forgotten, library);
}

GS_EXPORT CUresult CUDAAPI cuLibraryUnload(CUlibrary library) {
    GS_NEED(real, cuLibraryUnload);
    struct gs_entry entry;
    bool known = gs_slot() && gs_map_take(&libraries, key_of(library), &entry);
    if (known && entry.extra & GS_DEAD)
        return CUDA_SUCCESS;
    gs_compute_forget(); /* its kernels' handles may be another library's next */
    CUresult result = real(library);
    if (known && result == CUDA_SUCCESS)
        forget_uses(library);
    else if (known)
        gs_map_put(&libraries, key_of(library), &entry);
    return result;
}

GS_EXPORT CUresult CUDAAPI cuLibraryGetKernel(CUkernel *pKernel, CUlibrary library,
                                              const char *name) {
    GS_NEED(real, cuLibraryGetKernel);
    struct gs_entry entry = {.extra = key_of(library)}, known;
    struct gs_use use;
    CUresult result = gs_library_use_begin(&use, library, false);
    if (result == CUDA_SUCCESS)
        result = gs_library_use_end(&use, real(pKernel, library, name));
    if (result == CUDA_SUCCESS && pKernel && !gs_map_get(&kernels, key_of(*pKernel), &known)) {
        gs_map_put(&kernels, key_of(*pKernel), &entry);
        atomic_fetch_add(&kernels_known, 1);
    }
    return result;
}

GS_EXPORT CUresult CUDAAPI cuLibraryEnumerateKernels(CUkernel *out, unsigned int n, CUlibrary lib) {
    GS_NEED(real, cuLibraryEnumerateKernels);
    struct gs_entry entry = {.extra = key_of(lib)}, known;
    struct gs_use use;
    CUresult result = gs_library_use_begin(&use, lib, false);
    if (result == CUDA_SUCCESS)
        result = gs_library_use_end(&use, real(out, n, lib));
    for (unsigned i = 0; result == CUDA_SUCCESS && out && i < n && out[i]; i++) {
        if (gs_map_get(&kernels, key_of(out[i]), &known))
            continue;
        gs_map_put(&kernels, key_of(out[i]), &entry);
        atomic_fetch_add(&kernels_known, 1);
    }
    return result;
}

GS_EXPORT CUresult CUDAAPI cuLibraryGetModule(CUmodule *pMod, CUlibrary library) {
    GS_NEED(real, cuLibraryGetModule);
    GS_USE(false, library, pMod, library);
}

GS_EXPORT CUresult CUDAAPI cuLibraryGetGlobal(CUdeviceptr *dptr, size_t *bytes, CUlibrary library,
                                              const char *name) {
    GS_NEED(real, cuLibraryGetGlobal);
    GS_USE(true, library, dptr, bytes, library, name);
}

GS_EXPORT CUresult CUDAAPI cuLibraryGetManaged(CUdeviceptr *dptr, size_t *bytes, CUlibrary library,
                                               const char *name) {
    GS_NEED(real, cuLibraryGetManaged);
    GS_USE(true, library, dptr, bytes, library, name);
}

GS_EXPORT CUresult CUDAAPI cuLibraryGetUnifiedFunction(void **fptr, CUlibrary library,
                                                       const char *symbol) {
    GS_NEED(real, cuLibraryGetUnifiedFunction);
    GS_USE(true, library, fptr, library, symbol);
}

/* Another context than the one in which the kernel was asked for: loaded there as well. */
CUresult gs_kernel_use_begin(struct gs_use *use, const void *function) {
    *use = (struct gs_use){0};
    struct gs_entry entry;
    if (atomic_load_explicit(&kernels_known, memory_order_relaxed) == 0 ||
        !gs_map_get(&kernels, key_of(function), &entry))
        return CUDA_SUCCESS;
    return gs_library_use_begin(use, (CUlibrary)(uintptr_t)entry.extra, true);
}
