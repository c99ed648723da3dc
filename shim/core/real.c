/* Finding the real driver's functions. The private file is in the process already, as a dependency
 * of the shim: RTLD_NOLOAD requires that, and an absolute path prevents any search. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "real.h"

_Atomic(void *) gs_real_function[GS_SYMBOL_COUNT];

static void *library(void) {
    static _Atomic(void *) known;
    void *handle = atomic_load_explicit(&known, memory_order_acquire);
    if (handle)
        return handle;
    handle = dlopen(GS_REAL_PATH, RTLD_NOLOAD | RTLD_LAZY);
    void *none = NULL;
    if (handle && !atomic_compare_exchange_strong(&known, &none, handle)) {
        dlclose(handle); /* another thread was first; it is the same one */
        return none;
    }
    return handle;
}

void *gs_real_find(unsigned symbol) {
    if (atomic_load_explicit(&gs_real_function[symbol], memory_order_relaxed) == GS_MISSING)
        return NULL;
    int saved = errno;
    void *handle = library();
    void *function = handle ? dlsym(handle, gs_symbol_name[symbol]) : NULL;
    if (!function)
        dlerror(); /* clear our failure, which the program could take for its own */
    if (handle)
        atomic_store_explicit(&gs_real_function[symbol], function ? function : GS_MISSING,
                              memory_order_release);
    errno = saved;
    return function;
}

void gs_real_find_all(void) {
    for (unsigned i = 0; i < GS_SYMBOL_COUNT; i++)
        gs_real(i);
}

void gs_real_or(unsigned symbol, void *otherwise) {
    if (!gs_real(symbol))
        atomic_store_explicit(&gs_real_function[symbol], otherwise, memory_order_release);
}

/* ---- where its code is ------------------------------------------------------------------------
 */

struct text {
    uintptr_t base;
    uintptr_t start, end;
};

static int find_text(struct dl_phdr_info *info, size_t size, void *arg) {
    struct text *text = arg;
    (void)size;
    if (info->dlpi_addr != text->base)
        return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &info->dlpi_phdr[i];
        if (segment->p_type != PT_LOAD || !(segment->p_flags & PF_X))
            continue;
        text->start = text->base + segment->p_vaddr;
        text->end = text->start + segment->p_memsz;
        return 1;
    }
    return 0;
}

bool gs_real_contains(const void *address) {
    static _Atomic uintptr_t start, end; /* end is stored last; 0: not known yet */
    uintptr_t last = atomic_load_explicit(&end, memory_order_acquire);
    if (!last) {
        struct link_map *map = NULL;
        void *handle = library();
        if (!handle || dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0)
            return false;
        struct text text = {.base = map->l_addr};
        if (!dl_iterate_phdr(find_text, &text))
            return false;
        atomic_store_explicit(&start, text.start, memory_order_relaxed);
        atomic_store_explicit(&end, text.end, memory_order_release);
        last = text.end;
    }
    uintptr_t first = atomic_load_explicit(&start, memory_order_relaxed);
    return (uintptr_t)address >= first && (uintptr_t)address < last;
}

/* ---- functions that the driver lacks ------------------------------------------------------------
 */

static int compare_name(const void *name, const void *element) {
    return strcmp(name, *(const char *const *)element);
}

static bool is_missing(const char *name) {
    const char *const *known =
        bsearch(name, gs_symbol_name, GS_SYMBOL_COUNT, sizeof(*gs_symbol_name), compare_name);
    return known && gs_real_function[known - gs_symbol_name] == GS_MISSING;
}

static void *dynamic_entry(const struct link_map *map, long tag) {
    const ElfW(Dyn) *entry = map->l_ld;
    while (entry->d_tag != DT_NULL && entry->d_tag != tag)
        entry++;
    return entry->d_tag == tag ? (void *)entry->d_un.d_ptr : NULL;
}

/* Programs look a function up to find out whether the driver has it. So the wrapper of a function
 * that this driver lacks must not be found: the dynamic linker skips a symbol without an address.
 * Only the copy of the symbol table in this process's memory changes. */
static void hide_missing(void) {
    Dl_info info;
    struct link_map *map = NULL;
    if (!dladdr1(gs_wrapper, &info, (void **)&map, RTLD_DL_LINKMAP) || !map)
        return;
    ElfW(Sym) *symbol = dynamic_entry(map, DT_SYMTAB);
    const char *names = dynamic_entry(map, DT_STRTAB);
    const uint32_t *hash = dynamic_entry(map, DT_HASH);
    if (!symbol || !names || !hash)
        return;
    ElfW(Sym) *end = symbol + hash[1];
    uintptr_t page = (uintptr_t)symbol & ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1);
    if (mprotect((void *)page, (uintptr_t)end - page, PROT_READ | PROT_WRITE) != 0)
        return;
    for (; symbol < end; symbol++)
        if (symbol->st_value && symbol->st_shndx != SHN_UNDEF &&
            is_missing(names + symbol->st_name))
            symbol->st_value = 0;
    mprotect((void *)page, (uintptr_t)end - page, PROT_READ);
}

__attribute__((constructor)) static void find_all(void) {
    bool missing = false;
    for (unsigned i = 0; i < GS_WRAPPER_COUNT; i++)
        missing |= !gs_real(gs_wrapper[i].symbol);
    if (missing)
        hide_missing();
}
