/* Sizes read out of program images: enough of ELF, of NVIDIA's fat binaries and of PTX to know how
 * much device memory a module takes, so that `__device__ char x[8 << 30]` is charged like any other
 * 8 GiB.
 *
 * A fat binary holds one program for several architectures. The driver loads the cubin that fits
 * the device, and compiles PTX only where no cubin fits; so only these are read. Entries may be
 * compressed with LZ4 or zstd, and are decompressed: their headers state the size of the file, in
 * which a zeroed variable of any size takes no bytes. */
#include "image.h"

#include <elf.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zstd.h>

#define FATBIN_WRAPPER 0x466243b1u
#define FATBIN 0xba55ed50u

struct fatbin_wrapper {
    uint32_t magic, version;
    const void *data;
    const void *more;
};
struct fatbin_header {
    uint32_t magic;
    uint16_t version, header_size;
    uint64_t size; /* of the entries that follow */
};
struct fatbin_entry {
    uint16_t kind, version;
    uint32_t header_size;
    uint64_t size;
    uint32_t compressed_size, options;
    uint16_t minor, major;
    uint32_t arch, name_offset, name_size;
    uint64_t flags, zero;
    uint64_t uncompressed_size;
};
#define KIND_PTX 1u
#define KIND_CUBIN 2u
#define COMPRESSED_LZ4 0x2000u /* flags */
#define COMPRESSED_ZSTD 0x8000u
#define DECOMPRESSED_MAX (UINT64_C(1) << 30)  /* no cubin is that large */
#define SHARED_MEMORY_MAX (UINT64_C(1) << 20) /* of a kernel: no device has a quarter of that */

static uint64_t plus(uint64_t a, uint64_t b) {
    return a + b < a ? UINT64_MAX : a + b;
}

/* ---- cubins --------------------------------------------------------------------------------- */

struct cubin {
    const unsigned char *data;
    size_t size;
    uint32_t n_sections;
    uint64_t sections; /* offset of the table */
    Elf64_Shdr names;
};

static Elf64_Shdr section_of(const struct cubin *c, uint32_t i) {
    Elf64_Shdr section;
    memcpy(&section, c->data + c->sections + (uint64_t)i * sizeof(section), sizeof(section));
    return section;
}

/* A section's name, "" if it is outside of the file. */
static const char *name_of(const struct cubin *c, const Elf64_Shdr *section) {
    if (section->sh_name >= c->names.sh_size)
        return "";
    const char *name = (const char *)c->data + c->names.sh_offset + section->sh_name;
    size_t room = c->names.sh_size - section->sh_name;
    return memchr(name, 0, room) ? name : "";
}

static bool inside(const struct cubin *c, const Elf64_Shdr *section) {
    return section->sh_type != SHT_NOBITS && plus(section->sh_offset, section->sh_size) <= c->size;
}

static bool open_cubin(struct cubin *c, const unsigned char *data, size_t size) {
    Elf64_Ehdr head;
    if (size < sizeof(head) || memcmp(data, ELFMAG, SELFMAG) != 0)
        return false;
    memcpy(&head, data, sizeof(head));
    if (head.e_ident[EI_CLASS] != ELFCLASS64 || head.e_shentsize != sizeof(Elf64_Shdr) ||
        head.e_shoff == 0 || plus(head.e_shoff, sizeof(Elf64_Shdr)) > size)
        return false;
    *c = (struct cubin){data, size, head.e_shnum, head.e_shoff, {0}};
    Elf64_Shdr first = section_of(c, 0); /* holds what has no room in the header */
    if (c->n_sections == 0)
        c->n_sections = first.sh_size > UINT32_MAX ? 0 : (uint32_t)first.sh_size;
    uint32_t names = head.e_shstrndx == SHN_XINDEX ? first.sh_link : head.e_shstrndx;
    if (plus(head.e_shoff, (uint64_t)c->n_sections * sizeof(Elf64_Shdr)) > size)
        return false;
    if (names < c->n_sections) {
        c->names = section_of(c, names);
        if (!inside(c, &c->names))
            c->names.sh_size = 0;
    }
    return true;
}

/* Does the section take device memory? Shared memory is the multiprocessor's own. */
static bool is_loaded(const struct cubin *c, const Elf64_Shdr *section) {
    if (!(section->sh_flags & SHF_ALLOC))
        return false;
    return section->sh_size > SHARED_MEMORY_MAX ||
           strncmp(name_of(c, section), ".nv.shared.", sizeof(".nv.shared.") - 1) != 0;
}

static struct gs_image elf(const unsigned char *data, size_t size) {
    struct gs_image image = {0};
    struct cubin c;
    if (!open_cubin(&c, data, size))
        return image;
    for (uint32_t i = 0; i < c.n_sections; i++) {
        Elf64_Shdr section = section_of(&c, i);
        if (!is_loaded(&c, &section))
            continue;
        uint64_t *sum = section.sh_flags & SHF_EXECINSTR ? &image.code : &image.data;
        *sum = plus(*sum, section.sh_size);
    }
    return image;
}

/* ---- other images --------------------------------------------------------------------------- */

/* "SIMMOD globals=<bytes> code=<bytes>\n": the simulated driver's modules. */
static struct gs_image simulated(const char *text, size_t size) {
    const char *end = memchr(text, '\n', strnlen(text, size < 1024 ? size : 1024));
    const char *globals = strstr(text, "globals="), *code = strstr(text, "code=");
    if (!globals || !code || !end || globals > end || code > end)
        return (struct gs_image){0};
    return (struct gs_image){strtoull(globals + 8, NULL, 10), strtoull(code + 5, NULL, 10)};
}

static struct gs_image program(const unsigned char *at, size_t size, unsigned kind) {
    if (size > 7 && memcmp(at, "SIMMOD ", 7) == 0)
        return simulated((const char *)at, size);
    if (kind == KIND_CUBIN)
        return elf(at, size);
    return (struct gs_image){.data = kind == KIND_PTX ? gs_ptx((const char *)at, size) : 0};
}

/* ---- fat binaries --------------------------------------------------------------------------- */

static struct gs_image decompressed(const unsigned char *at, const struct fatbin_entry *entry) {
    size_t packed = entry->compressed_size ? entry->compressed_size : entry->size;
    uint64_t stated = entry->uncompressed_size, size = 0;
    struct gs_image image = {0};
    unsigned char *out = NULL;
    if (packed <= entry->size && stated < DECOMPRESSED_MAX && (out = malloc(stated + 1)))
        size = entry->flags & COMPRESSED_LZ4 ? gs_lz4(at, packed, out, stated)
                                             : ZSTD_decompress(out, stated, at, packed);
    if (out && size == stated) {
        out[size] = 0;
        image = program(out, size, entry->kind);
    }
    free(out);
    return image;
}

/* How well an entry fits: 0 for not at all; the driver takes the best. */
static unsigned fit(const struct fatbin_entry *entry, unsigned arch) {
    bool unknown = arch == 0 || entry->arch == 0;
    if (entry->kind == KIND_CUBIN)
        return unknown || (entry->arch / 10 == arch / 10 && entry->arch <= arch)
                   ? 1000000 + entry->arch
                   : 0;
    if (entry->kind == KIND_PTX)
        return unknown || entry->arch <= arch ? 1000 + entry->arch : 0;
    return 1; /* an unknown kind: any known kind that fits wins */
}

/* CUDA_FORCE_PTX_JIT makes the driver pass over cubins: any entry may be the one. */
static bool is_any_entry_loaded(void) {
    const char *ptx_only = getenv("CUDA_FORCE_PTX_JIT"), *jit = getenv("CUDA_FORCE_JIT");
    return (ptx_only && *ptx_only && *ptx_only != '0') || (jit && *jit && *jit != '0');
}

/* The entry at `*at`, which moves behind it; false at the end and where the rest makes no sense. */
static bool next_entry(const unsigned char *data, uint64_t end, uint64_t *at,
                       struct fatbin_entry *entry, const unsigned char **body) {
    if (*at >= end || end - *at < sizeof(*entry))
        return false;
    memcpy(entry, data + *at, sizeof(*entry));
    uint64_t step = plus(entry->header_size, entry->size);
    if (entry->header_size < sizeof(*entry) || step > end - *at)
        return false;
    *body = data + *at + entry->header_size;
    *at += step;
    return true;
}

static struct gs_image fatbin(const unsigned char *data, size_t size, unsigned arch) {
    struct gs_image most = {0};
    struct fatbin_header head;
    struct fatbin_entry entry;
    const unsigned char *body;
    unsigned best = 0;
    if (size < sizeof(head))
        return most;
    memcpy(&head, data, sizeof(head));
    uint64_t end = plus(head.header_size, head.size);
    if (head.magic != FATBIN)
        return most;
    if (end > size)
        end = size;
    bool any = is_any_entry_loaded();
    for (uint64_t at = head.header_size; next_entry(data, end, &at, &entry, &body);)
        best = fit(&entry, arch) > best ? fit(&entry, arch) : best;
    for (uint64_t at = head.header_size; next_entry(data, end, &at, &entry, &body);) {
        if (!any && (best == 0 || fit(&entry, arch) != best))
            continue;
        struct gs_image one = entry.flags & (COMPRESSED_LZ4 | COMPRESSED_ZSTD)
                                  ? decompressed(body, &entry)
                                  : program(body, entry.size, entry.kind);
        if (plus(one.data, one.code) > plus(most.data, most.code))
            most = one;
    }
    return most;
}

/* Read an image that may come from a file: not a wrapper, which contains addresses. */
static struct gs_image plain(const void *image, size_t size, unsigned arch) {
    uint32_t magic;
    if (size < sizeof(magic))
        return (struct gs_image){0};
    memcpy(&magic, image, sizeof(magic));
    if (magic == FATBIN)
        return fatbin(image, size, arch);
    if (memcmp(image, ELFMAG, SELFMAG) == 0)
        return elf(image, size);
    if (memcmp(image, "SIMM", 4) == 0)
        return simulated(image, size);
    return (struct gs_image){.data = gs_ptx(image, strnlen(image, size))};
}

struct gs_image gs_image_read(const void *image, size_t size, unsigned arch) {
    struct fatbin_wrapper wrapper;
    if (!image)
        return (struct gs_image){0};
    if (size < sizeof(wrapper) || memcmp(image, &(uint32_t){FATBIN_WRAPPER}, 4) != 0)
        return plain(image, size, arch);
    memcpy(&wrapper, image, sizeof(wrapper));
    return wrapper.data ? fatbin(wrapper.data, SIZE_MAX, arch) : (struct gs_image){0};
}

/* A copy with a NUL behind it: text in a file need not end. */
struct gs_image gs_image_read_file(const char *path, unsigned arch) {
    struct gs_image found = {0};
    struct stat st;
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : -1;
    if (fd < 0)
        return found;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > 0) {
        size_t size = (size_t)st.st_size, have = 0;
        char *copy = malloc(size + 1);
        ssize_t n = 1;
        while (copy && have < size && (n = pread(fd, copy + have, size - have, (off_t)have)) > 0)
            have += (size_t)n;
        if (copy) {
            copy[have] = 0;
            found = plain(copy, have, arch);
        }
        free(copy);
    }
    close(fd);
    return found;
}
