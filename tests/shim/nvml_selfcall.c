/* Calls one function of libnvidia-ml as the library itself would: through its own GOT, with a
 * return address in its own code. Prints where the GOT pointed, and the results of that call, of
 * the same call from outside, and of the real function.
 *
 *   nvml_selfcall NAME
 *
 * x86-64, like the library. The arguments are six pointers to zeros; without a GPU every
 * function fails before it reads them. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REAL "/usr/lib/gpushare/driver/libnvidia-ml-real.so.1"

typedef long function(void *, void *, void *, void *, void *, void *);
static char zeros[6][4096];

/* Calls with `gadget`, the address of a `ret` instruction, as the return address. That
 * instruction returns to this function. */
static long call_from(function *target, const void *gadget) {
    register void *a5 __asm__("r9") = zeros[5];
    register void *a4 __asm__("r8") = zeros[4];
    long result;
    __asm__ volatile("mov %%rsp, %%rbx\n\t"
                     "and $-16, %%rsp\n\t"
                     /* at a function's first instruction the stack is at 16 n + 8 */
                     "sub $8, %%rsp\n\t"
                     "lea 1f(%%rip), %%rax\n\t"
                     "push %%rax\n\t" /* return address of the gadget's ret */
                     "push %[gadget]\n\t"
                     "jmp *%[target]\n"
                     "1:\n\t"
                     "mov %%rbx, %%rsp"
                     : "=&a"(result)
                     : [target] "r"(target), [gadget] "r"(gadget), "D"(zeros[0]), "S"(zeros[1]),
                       "d"(zeros[2]), "c"(zeros[3]), "r"(a4), "r"(a5)
                     : "rbx", "r10", "r11", "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4",
                       "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13",
                       "xmm14", "xmm15");
    return result;
}

struct tables {
    const Elf64_Sym *symbol;
    const char *string;
    const Elf64_Rela *relocation[2]; /* DT_JMPREL, DT_RELA */
    size_t size[2];
};

static struct tables tables_of(const struct link_map *map) {
    struct tables t = {0};
    for (const Elf64_Dyn *d = map->l_ld; d->d_tag != DT_NULL; d++) {
        const void *at = (const void *)d->d_un.d_ptr;
        switch (d->d_tag) {
        case DT_SYMTAB:
            t.symbol = at;
            break;
        case DT_STRTAB:
            t.string = at;
            break;
        case DT_JMPREL:
            t.relocation[0] = at;
            break;
        case DT_PLTRELSZ:
            t.size[0] = d->d_un.d_val;
            break;
        case DT_RELA:
            t.relocation[1] = at;
            break;
        case DT_RELASZ:
            t.size[1] = d->d_un.d_val;
            break;
        }
    }
    return t;
}

/* Finds the library's own entry for a function that it calls by name: in its PLT's table, or
 * elsewhere. */
static void **got_entry(const struct link_map *map, const char *name) {
    struct tables t = tables_of(map);
    for (int k = 0; k < 2; k++)
        for (size_t i = 0; t.relocation[k] && i < t.size[k] / sizeof(Elf64_Rela); i++) {
            const Elf64_Rela *r = &t.relocation[k][i];
            unsigned n = ELF64_R_SYM(r->r_info);
            if (n && strcmp(t.string + t.symbol[n].st_name, name) == 0)
                return (void **)(map->l_addr + r->r_offset);
        }
    return NULL;
}

int main(int argc, char **argv) {
    void *shim = dlopen("libnvidia-ml.so.1", RTLD_LAZY);
    void *real = dlopen(REAL, RTLD_LAZY | RTLD_NOLOAD);
    struct link_map *map;
    if (argc != 2 || !shim || !real || dlinfo(real, RTLD_DI_LINKMAP, &map) != 0) {
        fprintf(stderr, "nvml_selfcall: %s\n", dlerror());
        return 2;
    }
    function *theirs = (function *)dlsym(real, argv[1]);
    void **entry = got_entry(map, argv[1]);
    const unsigned char *ret = (const unsigned char *)theirs;
    if (!theirs || !entry) {
        fprintf(stderr, "nvml_selfcall: the library does not call %s by name\n", argv[1]);
        return 2;
    }
    while (*ret != 0xc3) /* any `ret` byte in its code */
        ret++;
    long inside = call_from((function *)*entry, ret);
    Dl_info bound, direct;
    dladdr(*entry, &bound);
    dladdr((void *)theirs, &direct);
    long outside = ((function *)dlsym(shim, argv[1]))(zeros[0], zeros[1], zeros[2], zeros[3],
                                                      zeros[4], zeros[5]);
    long straight = theirs(zeros[0], zeros[1], zeros[2], zeros[3], zeros[4], zeros[5]);
    printf("%s %s %ld %ld %ld\n", strcmp(bound.dli_fname, direct.dli_fname) ? "shim" : "real",
           bound.dli_sname, inside, outside, straight);
    return 0;
}
