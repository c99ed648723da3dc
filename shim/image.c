/* Sizes read out of program images: enough of ELF, of NVIDIA's fat binaries and of PTX to know how
 * much memory a module takes, so that `__device__ char x[8 << 30]` is charged like any other 8 GiB.
 *
 * A fat binary holds the same program for several GPUs: the largest of them counts. What is
 * compressed in it cannot be read here: its uncompressed size counts as code (`cuda_module.c`
 * compares with what the driver says afterwards). */
#include "image.h"

#include <elf.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

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
    uint16_t kind, flags; /* kind 1 = PTX, 2 = cubin */
    uint32_t header_size;
    uint64_t size;
    uint32_t compressed_size, options;
    uint16_t minor, major;
    uint32_t arch, name_offset, name_size;
    uint64_t more_flags, zero;
    uint64_t uncompressed_size;
};
#define FATBIN_COMPRESSED 0xa000u /* flags: LZ4 0x2000, zstd 0x8000 */

static uint64_t plus(uint64_t a, uint64_t b) {
    return a + b < a ? UINT64_MAX : a + b;
}

static uint64_t times(uint64_t a, uint64_t b) {
    uint64_t c;
    return __builtin_mul_overflow(a, b, &c) ? UINT64_MAX : c;
}

/* Every section that is in memory: code, initialised data, .nv.global (NOBITS), constants. */
static uint64_t elf_bytes(const unsigned char *image, size_t size) {
    Elf64_Ehdr head;
    uint64_t total = 0;
    if (size < sizeof(head))
        return 0;
    memcpy(&head, image, sizeof(head));
    if (head.e_ident[EI_CLASS] != ELFCLASS64 || head.e_shentsize != sizeof(Elf64_Shdr))
        return 0;
    if (plus(head.e_shoff, (uint64_t)head.e_shnum * sizeof(Elf64_Shdr)) > size)
        return 0;
    for (unsigned i = 0; i < head.e_shnum; i++) {
        Elf64_Shdr section;
        memcpy(&section, image + head.e_shoff + i * sizeof(section), sizeof(section));
        if (section.sh_flags & SHF_ALLOC)
            total = plus(total, section.sh_size);
    }
    return total;
}

/* "SIMMOD globals=<bytes> code=<bytes>\n": the simulated driver's modules. */
static uint64_t simulated_bytes(const char *text) {
    const char *globals = strstr(text, "globals="), *code = strstr(text, "code=");
    const char *end = strchr(text, '\n');
    if (!globals || !code || !end || globals > end || code > end)
        return 0;
    return plus(strtoull(globals + 8, NULL, 10), strtoull(code + 5, NULL, 10));
}

static unsigned ptx_type_bytes(const char *t) {
    static const struct {
        const char name[5];
        unsigned bytes;
    } types[] = {{"b8", 1},  {"u8", 1},  {"s8", 1},  {"b16", 2}, {"u16", 2}, {"s16", 2},
                 {"f16", 2}, {"b32", 4}, {"u32", 4}, {"s32", 4}, {"f32", 4}, {"b64", 8},
                 {"u64", 8}, {"s64", 8}, {"f64", 8}, {"b12", 16}};
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++)
        if (strncmp(t, types[i].name, strlen(types[i].name)) == 0)
            return types[i].bytes;
    return 0;
}

/* One declaration, up to ';' or '=': its type, and the product of its dimensions. */
static uint64_t ptx_declared(const char *at, const char *end) {
    uint64_t bytes = 0, n = 1;
    for (; at < end && *at != ';' && *at != '=' && *at != '{' && *at != '('; at++) {
        if (*at == '.' && !bytes)
            bytes = ptx_type_bytes(at + 1);
        else if (*at == '[' && at + 1 < end && at[1] >= '0' && at[1] <= '9')
            n = times(n, strtoull(at + 1, NULL, 0));
    }
    return times(bytes, n);
}

/* Code is estimated: a line of PTX is about one instruction of 16 bytes. */
static uint64_t ptx_bytes(const char *text, size_t size) {
    const char *end = text + size;
    uint64_t globals = 0, lines = 0;
    for (const char *at = text; at < end; at++) {
        if (*at == '\n')
            lines++;
        if (*at != '.' || (at > text && at[-1] != '\n' && at[-1] != ' ' && at[-1] != '\t'))
            continue;
        if (strncmp(at, ".global ", 8) == 0 || strncmp(at, ".const ", 7) == 0)
            globals = plus(globals, ptx_declared(at + 6, end));
    }
    return plus(globals, lines * 16);
}

static uint64_t fatbin_entry_bytes(const unsigned char *at, const struct fatbin_entry *entry) {
    const unsigned char *data = at + entry->header_size;
    if (entry->flags & FATBIN_COMPRESSED)
        return entry->uncompressed_size;
    if (entry->kind == 2)
        return elf_bytes(data, entry->size);
    return entry->kind == 1
               ? ptx_bytes((const char *)data, strnlen((const char *)data, entry->size))
               : 0;
}

static uint64_t fatbin_bytes(const unsigned char *image, size_t size) {
    struct fatbin_header head;
    uint64_t most = 0;
    if (size < sizeof(head))
        return 0;
    memcpy(&head, image, sizeof(head));
    uint64_t end = plus(head.header_size, head.size);
    if (end > size)
        end = size;
    for (uint64_t at = head.header_size; at < end && end - at >= sizeof(struct fatbin_entry);) {
        struct fatbin_entry entry;
        memcpy(&entry, image + at, sizeof(entry));
        uint64_t step = plus(entry.header_size, entry.size);
        if (entry.header_size < sizeof(entry) || step > end - at)
            break;
        uint64_t bytes = fatbin_entry_bytes(image + at, &entry);
        most = bytes > most ? bytes : most;
        at += step;
    }
    return most;
}

uint64_t gs_image_bytes(const void *image, size_t size) {
    uint32_t magic;
    if (!image || size < sizeof(magic))
        return 0;
    memcpy(&magic, image, sizeof(magic));
    if (magic == FATBIN_WRAPPER && size >= sizeof(struct fatbin_wrapper)) {
        struct fatbin_wrapper wrapper;
        memcpy(&wrapper, image, sizeof(wrapper));
        return wrapper.data ? fatbin_bytes(wrapper.data, SIZE_MAX) : 0;
    }
    if (magic == FATBIN)
        return fatbin_bytes(image, size);
    if (memcmp(image, ELFMAG, SELFMAG) == 0)
        return elf_bytes(image, size);
    if (memcmp(image, "SIMM", 4) == 0)
        return simulated_bytes(image);
    return ptx_bytes(image, strnlen(image, size));
}

/* A copy with a NUL behind it: text in a file need not end. */
uint64_t gs_image_file_bytes(const char *path) {
    uint64_t bytes = 0;
    struct stat st;
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : -1;
    if (fd < 0)
        return 0;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > 0) {
        size_t size = (size_t)st.st_size, have = 0;
        char *copy = malloc(size + 1);
        ssize_t n = 1;
        while (copy && have < size && (n = pread(fd, copy + have, size - have, (off_t)have)) > 0)
            have += (size_t)n;
        if (copy) {
            copy[have] = 0;
            bytes = gs_image_bytes(copy, have);
        }
        free(copy);
    }
    close(fd);
    return bytes;
}
