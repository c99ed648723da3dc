/* cuGetProcAddress: the driver chooses the function (version, per-thread streams), and the shim
 * replaces the pointer by its wrapper of the same function. The driver returns addresses of its
 * exports, so no table of versions is needed. A newer driver may return a function that the table
 * lacks: a newer version of an intercepted one, or one with a new name. It is withheld if it
 * allocates or launches, which its name tells, and passed otherwise. */
#include <stdlib.h>
#include <string.h>

#include "driver.h"

/* Hash of the driver's addresses -> index into gs_wrapper, plus 1; 0 = empty. Several threads may
 * fill it at once: they all write the same. */
#define TABLE_BITS 11u
#define TABLE_SIZE (1u << TABLE_BITS)
static _Atomic uint16_t table[TABLE_SIZE];
static _Atomic bool table_ready;
_Static_assert(GS_WRAPPER_COUNT * 2 < TABLE_SIZE, "the table must stay half empty");

static unsigned hash(const void *function) {
    return (unsigned)(((uint64_t)(uintptr_t)function * UINT64_C(0x9e3779b97f4a7c15)) >>
                      (64 - TABLE_BITS));
}

static void enter_wrapper(unsigned wrapper) {
    void *function = gs_real(gs_wrapper[wrapper].symbol);
    if (!function)
        return;
    for (unsigned at = hash(function);; at = (at + 1) % TABLE_SIZE) {
        uint16_t seen = 0;
        if (atomic_compare_exchange_strong(&table[at], &seen, (uint16_t)(wrapper + 1)))
            return;
        if (gs_real(gs_wrapper[seen - 1].symbol) == function)
            return; /* another thread has entered it, or the driver has two names for it */
    }
}

static void *wrapper_of(const void *function) {
    if (!atomic_load_explicit(&table_ready, memory_order_acquire)) {
        for (unsigned i = 0; i < GS_WRAPPER_COUNT; i++)
            enter_wrapper(i);
        atomic_store_explicit(&table_ready, true, memory_order_release);
    }
    for (unsigned at = hash(function);; at = (at + 1) % TABLE_SIZE) {
        uint16_t seen = atomic_load_explicit(&table[at], memory_order_acquire);
        if (!seen)
            return NULL;
        if (gs_real(gs_wrapper[seen - 1].symbol) == function)
            return gs_wrapper[seen - 1].function;
    }
}

/* ---- names ------------------------------------------------------------------------------------
 */

/* Length without a "_v<digits>" and a "_ptds" or "_ptsz" at the end. */
static size_t base_length(const char *name) {
    size_t length = strlen(name), digits = length;
    if (length > 5 && (!strcmp(name + length - 5, "_ptds") || !strcmp(name + length - 5, "_ptsz")))
        digits = length -= 5;
    while (digits > 0 && name[digits - 1] >= '0' && name[digits - 1] <= '9')
        digits--;
    bool version =
        digits < length && digits > 2 && name[digits - 1] == 'v' && name[digits - 2] == '_';
    return version ? digits - 2 : length;
}

static int compare_base(const void *key, const void *element) {
    const char *name = key, *base = ((const struct gs_base *)element)->name;
    size_t length = base_length(name), other = strlen(base);
    int order = memcmp(name, base, length < other ? length : other);
    return order ? order : (length > other) - (length < other);
}

static bool begins_with_one(const char *text, const char *const *parts) {
    while (*parts && strncmp(text, *parts, strlen(*parts)) != 0)
        parts++;
    return *parts;
}

static bool is_withheld(const char *name) {
    for (; *name; name++)
        if (begins_with_one(name, gs_withheld) && !begins_with_one(name, gs_not_withheld))
            return true;
    return false;
}

/* A driver that was not linked with -Bsymbolic (NVIDIA's is) resolves its own symbols to the shim's
 * wrappers. */
static bool is_wrapper(const void *function) {
    for (unsigned i = 0; i < GS_WRAPPER_COUNT; i++)
        if (gs_wrapper[i].function == function)
            return true;
    return false;
}

/* Return false if the function is withheld. */
static bool replace_by_wrapper(const char *symbol, void **function) {
    void *wrapper = wrapper_of(*function);
    if (wrapper) {
        *function = wrapper;
        return true;
    }
    const struct gs_base *known =
        bsearch(symbol, gs_base, GS_BASE_COUNT, sizeof(gs_base[0]), compare_base);
    if ((known && !known->intercepted) || is_wrapper(*function))
        return true;
    if (!is_withheld(symbol)) {
        gs_log("cuGetProcAddress returned a function that this gpushare does not know", symbol,
               "update gpushare");
        gs_warn(GS_WARN_PASSED_PROC);
        return true;
    }
    gs_log("cuGetProcAddress withheld a function that this gpushare does not know", symbol,
           "update gpushare");
    gs_warn(GS_WARN_UNKNOWN_PROC);
    *function = NULL;
    return false;
}

/* A name that no driver has. Asked for it, the driver itself reports "not found" in the way of its
 * version (535 returns CUDA_SUCCESS, a NULL pointer and a status from _v2, and CUDA_ERROR_NOT_FOUND
 * from the first version). */
#define NO_SUCH_FUNCTION "cuGpushareNoSuchFunction"

GS_EXPORT CUresult CUDAAPI cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion,
                                            cuuint64_t flags) {
    GS_NEED(real, cuGetProcAddress);
    CUresult result = real(symbol, pfn, cudaVersion, flags);
    if (result != CUDA_SUCCESS || !symbol || !pfn || !*pfn || replace_by_wrapper(symbol, pfn))
        return result;
    return real(NO_SUCH_FUNCTION, pfn, cudaVersion, flags);
}

GS_EXPORT CUresult CUDAAPI cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion,
                                               cuuint64_t flags,
                                               CUdriverProcAddressQueryResult *symbolStatus) {
    GS_NEED(real, cuGetProcAddress_v2);
    CUresult result = real(symbol, pfn, cudaVersion, flags, symbolStatus);
    if (result != CUDA_SUCCESS || !symbol || !pfn || !*pfn || replace_by_wrapper(symbol, pfn))
        return result;
    return real(NO_SUCH_FUNCTION, pfn, cudaVersion, flags, symbolStatus);
}
