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
#define DECOMPRESSED_MAX \
    (UINT64_C(1) << 30)                       /* no cubin is that large; beyond, the header counts \
                                               */
#define ENTRY_KERNEL 0x10                     /* st_other of a kernel's symbol (STO_CUDA_ENTRY) */
#define SHARED_MEMORY_MAX (UINT64_C(1) << 20) /* of a kernel: no device has a quarter of that */

static uint64_t plus(uint64_t a, uint64_t b) {
    return a + b < a ? UINT64_MAX : a + b;
}

static struct gs_image *make(uint64_t bytes, bool known, uint32_t n_kernels) {
    struct gs_image *image = calloc(1, sizeof(*image) + n_kernels * sizeof(image->kernel[0]));
    if (image)
        *image = (struct gs_image){.shared = bytes, .all = bytes, .known = known};
    return image;
}

uint64_t gs_image_hash(const char *name, size_t length) {
    uint64_t hash = UINT64_C(0xcbf29ce484222325); /* FNV-1a */
    for (size_t i = 0; i < length; i++)
        hash = (hash ^ (unsigned char)name[i]) * UINT64_C(0x100000001b3);
    return hash ? hash : 1;
}

static struct gs_kernel *find(struct gs_kernel *kernel, uint32_t n, uint64_t hash) {
    uint32_t low = 0, high = n;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (kernel[middle].hash < hash)
            low = middle + 1;
        else
            high = middle;
    }
    return low < n && kernel[low].hash == hash ? &kernel[low] : NULL;
}

uint64_t gs_image_kernel(const struct gs_image *image, uint64_t hash) {
    const struct gs_kernel *found =
        find((struct gs_kernel *)(uintptr_t)image->kernel, image->n_kernels, hash);
    return found ? found->bytes : 0;
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

/* ".nv.constant0.name" -> "name"; NULL for other sections. */
static const char *constants_of(const char *section) {
    static const char prefix[] = ".nv.constant";
    if (strncmp(section, prefix, sizeof(prefix) - 1) != 0)
        return NULL;
    section += sizeof(prefix) - 1;
    section += strspn(section, "0123456789");
    return *section == '.' ? section + 1 : NULL;
}

/* Does the section take device memory? Shared memory is the multiprocessor's own. */
static bool is_loaded(const struct cubin *c, const Elf64_Shdr *section) {
    if (!(section->sh_flags & SHF_ALLOC))
        return false;
    return section->sh_size > SHARED_MEMORY_MAX ||
           strncmp(name_of(c, section), ".nv.shared.", sizeof(".nv.shared.") - 1) != 0;
}

static int by_hash(const void *a, const void *b) {
    uint64_t x = ((const struct gs_kernel *)a)->hash, y = ((const struct gs_kernel *)b)->hash;
    return x < y ? -1 : x > y;
}

/* Write the hashes of the kernels that a symbol table lists, at most `room`; returns how many. */
static uint32_t kernels_in(const struct cubin *c, const Elf64_Shdr *symbols,
                           struct gs_kernel *kernel, uint32_t room) {
    uint32_t n = 0;
    if (symbols->sh_type != SHT_SYMTAB || symbols->sh_link >= c->n_sections || !inside(c, symbols))
        return 0;
    Elf64_Shdr text = section_of(c, symbols->sh_link);
    if (!inside(c, &text))
        return 0;
    for (uint64_t at = 0; at + sizeof(Elf64_Sym) <= symbols->sh_size && n < room;
         at += sizeof(Elf64_Sym)) {
        Elf64_Sym symbol;
        memcpy(&symbol, c->data + symbols->sh_offset + at, sizeof(symbol));
        const char *name = (const char *)c->data + text.sh_offset + symbol.st_name;
        if (ELF64_ST_TYPE(symbol.st_info) == STT_FUNC && symbol.st_other & ENTRY_KERNEL &&
            symbol.st_name < text.sh_size && memchr(name, 0, text.sh_size - symbol.st_name))
            kernel[n++].hash = gs_image_hash(name, strlen(name));
    }
    return n;
}

static struct gs_image *elf(const unsigned char *data, size_t size) {
    struct cubin c;
    uint32_t room = 0;
    if (!open_cubin(&c, data, size))
        return make(size == SIZE_MAX ? 0 : size, false, 0);
    for (uint32_t i = 0; i < c.n_sections; i++) {
        Elf64_Shdr section = section_of(&c, i);
        room += strncmp(name_of(&c, &section), ".text.", 6) == 0;
    }
    struct gs_image *image = make(0, true, room);
    if (!image)
        return NULL;
    for (uint32_t i = 0; i < c.n_sections; i++) {
        Elf64_Shdr section = section_of(&c, i);
        image->n_kernels +=
            kernels_in(&c, &section, image->kernel + image->n_kernels, room - image->n_kernels);
    }
    qsort(image->kernel, image->n_kernels, sizeof(image->kernel[0]), by_hash);
    for (uint32_t i = 0; i < c.n_sections; i++) {
        Elf64_Shdr section = section_of(&c, i);
        const char *name = name_of(&c, &section);
        if (!is_loaded(&c, &section))
            continue;
        const char *owner = strncmp(name, ".text.", 6) == 0 ? name + 6 : constants_of(name);
        struct gs_kernel *kernel =
            owner ? find(image->kernel, image->n_kernels, gs_image_hash(owner, strlen(owner)))
                  : NULL;
        uint64_t *sum = kernel ? &kernel->bytes : &image->shared;
        *sum = plus(*sum, section.sh_size);
        image->all = plus(image->all, section.sh_size);
    }
    return image;
}

/* ---- other images --------------------------------------------------------------------------- */

static struct gs_image *ptx(const char *text, size_t size) {
    return make(gs_ptx(text, strnlen(text, size)), true, 0);
}

/* "SIMMOD globals=<bytes> code=<bytes>\n": the simulated driver's modules. */
static struct gs_image *simulated(const char *text, size_t size) {
    const char *end = memchr(text, '\n', strnlen(text, size < 1024 ? size : 1024));
    const char *globals = strstr(text, "globals="), *code = strstr(text, "code=");
    if (!globals || !code || !end || globals > end || code > end)
        return make(0, false, 0);
    return make(plus(strtoull(globals + 8, NULL, 10), strtoull(code + 5, NULL, 10)), true, 0);
}

static struct gs_image *program(const unsigned char *at, size_t size, unsigned kind) {
    if (size > 7 && memcmp(at, "SIMMOD ", 7) == 0)
        return simulated((const char *)at, size);
    if (kind == KIND_CUBIN)
        return elf(at, size);
    return kind == KIND_PTX ? ptx((const char *)at, size) : make(size, false, 0);
}

/* ---- fat binaries --------------------------------------------------------------------------- */

static struct gs_image *decompressed(const unsigned char *at, const struct fatbin_entry *entry) {
    size_t packed = entry->compressed_size ? entry->compressed_size : entry->size;
    uint64_t stated = entry->uncompressed_size, size = 0;
    unsigned char *out = NULL;
    if (packed <= entry->size && stated < DECOMPRESSED_MAX && (out = malloc(stated + 1)))
        size = entry->flags & COMPRESSED_LZ4 ? gs_lz4(at, packed, out, stated)
                                             : ZSTD_decompress(out, stated, at, packed);
    struct gs_image *image;
    if (out && size == stated) {
        out[size] = 0;
        image = program(out, size, entry->kind);
    } else {
        image = make(stated > entry->size ? stated : entry->size, false, 0);
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

static struct gs_image *fatbin(const unsigned char *data, size_t size, unsigned arch) {
    struct fatbin_header head;
    struct fatbin_entry entry;
    const unsigned char *body;
    unsigned best = 0;
    if (size < sizeof(head))
        return make(0, false, 0);
    memcpy(&head, data, sizeof(head));
    uint64_t end = plus(head.header_size, head.size);
    if (head.magic != FATBIN)
        return make(0, false, 0);
    if (end > size)
        end = size;
    bool any = is_any_entry_loaded();
    for (uint64_t at = head.header_size; next_entry(data, end, &at, &entry, &body);)
        best = fit(&entry, arch) > best ? fit(&entry, arch) : best;
    struct gs_image *most = make(0, true, 0);
    for (uint64_t at = head.header_size; most && next_entry(data, end, &at, &entry, &body);) {
        if (!any && (best == 0 || fit(&entry, arch) != best))
            continue;
        struct gs_image *one = entry.flags & (COMPRESSED_LZ4 | COMPRESSED_ZSTD)
                                   ? decompressed(body, &entry)
                                   : program(body, entry.size, entry.kind);
        if (!one || one->all > most->all || most->all == 0) {
            free(most);
            most = one;
        } else {
            free(one);
        }
    }
    return most;
}

/* Read an image that may come from a file: not a wrapper, which contains addresses. */
static struct gs_image *plain(const void *image, size_t size, unsigned arch) {
    uint32_t magic;
    if (size < sizeof(magic))
        return make(0, false, 0);
    memcpy(&magic, image, sizeof(magic));
    if (magic == FATBIN)
        return fatbin(image, size, arch);
    if (memcmp(image, ELFMAG, SELFMAG) == 0)
        return elf(image, size);
    if (memcmp(image, "SIMM", 4) == 0)
        return simulated(image, size);
    return ptx(image, size);
}

struct gs_image *gs_image_read(const void *image, size_t size, unsigned arch) {
    struct fatbin_wrapper wrapper;
    if (!image)
        return make(0, false, 0);
    if (size < sizeof(wrapper) || memcmp(image, &(uint32_t){FATBIN_WRAPPER}, 4) != 0)
        return plain(image, size, arch);
    memcpy(&wrapper, image, sizeof(wrapper));
    return wrapper.data ? fatbin(wrapper.data, SIZE_MAX, arch) : make(0, false, 0);
}

/* A copy with a NUL behind it: text in a file need not end. */
struct gs_image *gs_image_read_file(const char *path, unsigned arch) {
    struct gs_image *found = NULL;
    struct stat st;
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : -1;
    if (fd < 0)
        return make(0, false, 0);
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
    return found ? found : make(0, false, 0);
}
