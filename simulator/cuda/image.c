/* Program images. Real ones (cubin, fat binary, PTX) are read as far as names and sizes go; those
 * made for tests are one line of text:
 *
 *     SIMMOD globals=<bytes> code=<bytes> [functions=a,b]\n
 *
 * in which the one variable is called "globals". */
#include "image.h"

#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

#define FATBIN_WRAPPER 0x466243b1u
#define FATBIN 0xba55ed50u
#define FATBIN_PTX 1
#define FATBIN_CUBIN 2
#define LZ4 0x2000u
#define ZSTD 0x8000u
#define PLAIN_MAX (1ull << 30)

static void add_function(struct image *im, const char *name, size_t length) {
    if (im->n_functions < IMAGE_NAMES)
        im->function[im->n_functions++].name = strndup(name, length);
    im->named = true;
}

static void add_global(struct image *im, const char *name, size_t length, uint64_t bytes) {
    if (im->n_globals == IMAGE_NAMES)
        return;
    im->global[im->n_globals].name = strndup(name, length);
    im->global[im->n_globals++].bytes = bytes;
}

void image_free(struct image *im) {
    for (unsigned i = 0; i < im->n_functions; i++)
        free(im->function[i].name);
    for (unsigned i = 0; i < im->n_globals; i++)
        free(im->global[i].name);
    *im = (struct image){0};
}

static bool read_text(const char *text, struct image *im) {
    char functions[512] = "";
    unsigned long long globals, code;
    int n =
        sscanf(text, "SIMMOD globals=%llu code=%llu functions=%511s", &globals, &code, functions);
    if (n < 2)
        return false;
    im->global_bytes = globals;
    im->code_bytes = code;
    if (globals)
        add_global(im, "globals", 7, globals);
    char *rest = functions;
    for (char *name; (name = strsep(&rest, ","));)
        if (*name)
            add_function(im, name, strlen(name));
    return true;
}

static void read_symbols(const unsigned char *data, const Elf64_Shdr *table,
                         const Elf64_Shdr *strings, struct image *im) {
    const char *names = (const char *)data + strings->sh_offset;
    for (uint64_t at = 0; at + sizeof(Elf64_Sym) <= table->sh_size; at += sizeof(Elf64_Sym)) {
        Elf64_Sym symbol;
        memcpy(&symbol, data + table->sh_offset + at, sizeof symbol);
        if (symbol.st_shndx == SHN_UNDEF || symbol.st_name >= strings->sh_size)
            continue;
        const char *name = names + symbol.st_name;
        if (ELF64_ST_TYPE(symbol.st_info) == STT_FUNC)
            add_function(im, name, strlen(name));
        if (ELF64_ST_TYPE(symbol.st_info) == STT_OBJECT)
            add_global(im, name, strlen(name), symbol.st_size);
    }
}

/* The function that a section belongs to by its name, such as ".text.f" or ".nv.constant0.f". */
static int owner_of(const char *section, const struct image *im) {
    const char *name = NULL;
    if (strncmp(section, ".text.", 6) == 0)
        name = section + 6;
    else if (strncmp(section, ".nv.constant", 12) == 0)
        name = strchr(section + 12, '.');
    name += name && *name == '.';
    for (unsigned i = 0; name && i < im->n_functions; i++)
        if (strcmp(im->function[i].name, name) == 0)
            return (int)i;
    return -1;
}

static bool read_elf(const unsigned char *data, size_t size, struct image *im) {
    Elf64_Ehdr head;
    memcpy(&head, data, sizeof head);
    if (head.e_ident[EI_CLASS] != ELFCLASS64 || head.e_shentsize != sizeof(Elf64_Shdr))
        return false;
    if (head.e_shoff > size || (size_t)head.e_shnum * sizeof(Elf64_Shdr) > size - head.e_shoff)
        return false;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(data + head.e_shoff);
    const char *names = "";
    if (head.e_shstrndx && head.e_shstrndx < head.e_shnum)
        names = (const char *)data + sections[head.e_shstrndx].sh_offset;
    for (unsigned i = 0; i < head.e_shnum; i++)
        if (sections[i].sh_type == SHT_SYMTAB && sections[i].sh_link < head.e_shnum)
            read_symbols(data, &sections[i], &sections[sections[i].sh_link], im);
    for (unsigned i = 0; i < head.e_shnum; i++) {
        Elf64_Shdr s = sections[i];
        const char *name = *names || head.e_shstrndx ? names + s.sh_name : "";
        int function = owner_of(name, im);
        if (!(s.sh_flags & SHF_ALLOC) || strncmp(name, ".nv.shared", 10) == 0)
            continue;
        if (function >= 0)
            im->function[function].bytes += s.sh_size;
        else if (s.sh_flags & SHF_EXECINSTR)
            im->code_bytes += s.sh_size;
        else
            im->global_bytes += s.sh_size;
    }
    return true;
}

/* "4 * 1024]" */
static uint64_t product_of(const char *at) {
    char *end;
    uint64_t product = strtoull(at, &end, 0);
    for (end += strspn(end, " "); *end == '*'; end += strspn(end, " "))
        product *= strtoull(end + 1, &end, 0);
    return product;
}

/* PTX: `.entry name( and `.global .align 4 .b8 name[bytes];` */
static bool read_ptx(const char *text, size_t size, struct image *im) {
    size_t length = strnlen(text, size);
    if (!memmem(text, length, ".version", 8))
        return false;
    uint64_t lines = 0;
    for (const char *at = text; at < text + length; at++) {
        if (*at == '\n')
            lines++;
        if (strncmp(at, ".entry ", 7) == 0) {
            const char *name = at + 7 + strspn(at + 7, " \t\n");
            add_function(im, name, strcspn(name, " \t\n("));
        } else if (strncmp(at, ".global", 7) == 0 && strchr(" \t", at[7])) {
            const char *end = at + strcspn(at, ";=");
            const char *open = memchr(at, '[', (size_t)(end - at));
            const char *stop = open ? open : end, *name = stop;
            while (name > at && !strchr(" \t", name[-1]))
                name--;
            unsigned bits = 8;
            for (const char *t = at; t < name; t++)
                if (*t == '.' && strchr("bsuf", t[1]) && t[2] >= '1' && t[2] <= '9')
                    bits = (unsigned)atoi(t + 2);
            uint64_t bytes = (open ? product_of(open + 1) : 1) * bits / 8;
            im->global_bytes += bytes;
            add_global(im, name, (size_t)(stop - name), bytes);
        }
    }
    im->code_bytes = lines * 16;
    return true;
}

struct fatbin_head {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes;
};
struct fatbin_part {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t bytes;
    uint32_t compressed_bytes, pad;
    uint16_t minor, major;
    uint32_t arch, name_offset, name_bytes;
    uint64_t flags, zero, plain_bytes;
};

static size_t run_length(const unsigned char **at, unsigned start) {
    size_t length = start;
    for (unsigned more = start == 15 ? 255 : 0; more == 255;)
        length += more = *(*at)++;
    return length;
}

/* Trusts its data, as the real one may. */
static void unpack_lz4(const unsigned char *at, const unsigned char *end, unsigned char *out) {
    while (at < end) {
        unsigned token = *at++;
        size_t literals = run_length(&at, token >> 4);
        memcpy(out, at, literals);
        out += literals;
        at += literals;
        if (end - at < 2)
            return;
        size_t back = at[0] | (size_t)at[1] << 8;
        at += 2;
        for (size_t n = run_length(&at, token & 15) + 4; n; n--, out++)
            *out = out[-(ptrdiff_t)back];
    }
}

static void read_packed(const unsigned char *body, const struct fatbin_part *part,
                        struct image *im) {
    unsigned char *plain = part->plain_bytes <= PLAIN_MAX ? malloc(part->plain_bytes + 1) : NULL;
    if (!plain)
        return;
    if (part->flags & ZSTD)
        ZSTD_decompress(plain, part->plain_bytes, body, part->compressed_bytes);
    else
        unpack_lz4(body, body + part->compressed_bytes, plain);
    plain[part->plain_bytes] = '\0';
    if (strncmp((const char *)plain, "SIMMOD ", 7) == 0)
        read_text((const char *)plain, im);
    else if (part->kind == FATBIN_CUBIN)
        read_elf(plain, part->plain_bytes, im);
    else
        read_ptx((const char *)plain, part->plain_bytes, im);
    free(plain);
}

/* A cubin runs on devices of its major and at least its minor version, PTX on any newer one. */
static bool fits(const struct fatbin_part *part, unsigned arch) {
    if (part->kind == FATBIN_CUBIN)
        return part->arch / 10 == arch / 10 && part->arch <= arch;
    return part->kind == FATBIN_PTX && part->arch <= arch;
}

/* Cubins before PTX, then the newest. */
static bool is_better(const struct fatbin_part *a, const struct fatbin_part *b) {
    return a->kind != b->kind ? a->kind == FATBIN_CUBIN : a->arch > b->arch;
}

/* The one program in it that the device would run. */
static bool read_fatbin(const unsigned char *data, unsigned arch, struct image *im) {
    struct fatbin_head head;
    struct fatbin_part part, best = {0};
    const unsigned char *body = NULL;
    memcpy(&head, data, sizeof head);
    const unsigned char *end = data + head.header_bytes + head.bytes;
    for (const unsigned char *at = data + head.header_bytes; at + sizeof part <= end;
         at += part.header_bytes + part.bytes) {
        memcpy(&part, at, sizeof part);
        if (!fits(&part, arch) || (body && !is_better(&part, &best)))
            continue;
        best = part;
        body = at + part.header_bytes;
    }
    if (!body)
        return false;
    if (best.flags & (LZ4 | ZSTD))
        read_packed(body, &best, im);
    else if (best.kind == FATBIN_CUBIN)
        return strncmp((const char *)body, "SIMMOD ", 7) == 0 ? read_text((const char *)body, im)
                                                              : read_elf(body, best.bytes, im);
    else
        read_ptx((const char *)body, best.bytes, im);
    return true;
}

bool image_read(const void *data, size_t size, unsigned arch, struct image *im) {
    uint32_t magic;
    *im = (struct image){0};
    if (!data || size < sizeof magic)
        return false;
    if (strncmp(data, "SIMMOD ", 7) == 0)
        return read_text(data, im);
    memcpy(&magic, data, sizeof magic);
    if (magic == FATBIN_WRAPPER) {
        const void *inner;
        memcpy(&inner, (const char *)data + 8, sizeof inner);
        return read_fatbin(inner, arch, im);
    }
    if (magic == FATBIN)
        return read_fatbin(data, arch, im);
    if (memcmp(data, ELFMAG, SELFMAG) == 0)
        return read_elf(data, size, im);
    return read_ptx(data, size, im);
}
