/* The real driver's functions. GS_REAL(cuMemAlloc_v2) has that function's type and is NULL when the
 * driver lacks it. It never gives the shim's own function: gs_real_find searches only the driver's
 * library, opened under gpushare's own path, and the dependencies of that library.
 *
 * Two files symbols.h are generated from symbols.tsv: for CUDA and for NVML. */
#ifndef GPUSHARE_REAL_H
#define GPUSHARE_REAL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "symbols.h"

/* NULL: not looked up yet. GS_MISSING: looked up, the driver has none. Hidden, so that a launch
 * reads it without the global offset table. */
extern _Atomic(void *) gs_real_function[GS_SYMBOL_COUNT] __attribute__((visibility("hidden")));
#define GS_MISSING ((void *)1)

/* Look a function up and remember it; NULL when the driver lacks it. errno stays what it was. */
void *gs_real_find(unsigned symbol);
/* Look up all of them, in cuInit. A look-up waits for a thread that is in the constructor of
 * another library, and that one may wait for a lock of the shim. */
void gs_real_find_all(void);
/* Look it up now; where the driver lacks it, `otherwise` is called in its place. */
void gs_real_or(unsigned symbol, void *otherwise);

static inline void *gs_real(unsigned symbol) {
    void *function = atomic_load_explicit(&gs_real_function[symbol], memory_order_relaxed);
    if (__builtin_expect((uintptr_t)function > (uintptr_t)GS_MISSING, 1))
        return function;
    return gs_real_find(symbol);
}

#define GS_REAL(name) ((__typeof__(&name))gs_real(GS_SYMBOL_##name))
/* The same without a check, for functions that gs_real_or has looked up. */
#define GS_REAL_NOW(name) \
    ((__typeof__(&name))atomic_load_explicit(&gs_real_function[GS_SYMBOL_##name], \
                                             memory_order_relaxed))

/* True for an address in the real library's code: a call that comes from the driver itself. */
bool gs_real_contains(const void *address);

/* ---- the intercepted functions, as symbols.c lists them ---------------------------------------
 */

struct gs_wrapper {
    unsigned symbol; /* GS_SYMBOL_... */
    void *function;  /* ours */
};
extern const struct gs_wrapper gs_wrapper[GS_WRAPPER_COUNT];
extern const char *const gs_symbol_name[GS_SYMBOL_COUNT];
/* The names of the table without suffixes (_v2, _ptsz), sorted. */
struct gs_base {
    const char *name;
    bool intercepted; /* in all versions */
};
extern const struct gs_base gs_base[GS_BASE_COUNT];
/* Parts of names: a function that the table lacks is withheld if its name contains one of the first
 * that does not begin with one of the second. Each list ends with NULL. */
extern const char *const gs_withheld[], *const gs_not_withheld[];

#endif
