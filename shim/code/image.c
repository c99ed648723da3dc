/* Sizes read out of program images: enough of ELF, of NVIDIA's fat binaries and of PTX to know how
 * much memory a module takes, so that `__device__ char x[8 << 30]` is charged like any other 8 GiB.
 *
 * A fat binary holds the same program for several GPUs: the largest of them counts. Parts may be
 * compressed: LZ4 is unpacked here; for zstd the uncompressed size counts as code, and the rest is
 * measured when it is loaded (module.c). */
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
    uint16_t kind, version; /* kind 1 = PTX, 2 = cubin */
    uint32_t header_size;
    uint64_t size;
    uint32_t compressed_size, options;
    uint16_t minor, major;
    uint32_t arch, name_offset, name_size;
    uint64_t flags, zero;
    uint64_t uncompressed_size;
};
#define FATBIN_LZ4 0x2000u /* flags */
#define FATBIN_ZSTD 0x8000u
#define UNPACKED_MAX (UINT64_C(4) << 30)
#define LZ4_MOST 255 /* bytes that come out of one; what claims more is not believed */

static uint64_t plus(uint64_t a, uint64_t b) {
    return a + b < a ? UINT64_MAX : a + b;
}

#define NOT_UNDERSTOOD \
    (struct gs_image) { \
        0 \
    }

/* Every section that is in memory: code, initialised data, .nv.global (NOBITS), constants. */
static struct gs_image elf(const unsigned char *image, size_t size) {
    Elf64_Ehdr head;
    struct gs_image found = {.known = true};
    if (size < sizeof(head) || memcmp(image, ELFMAG, SELFMAG) != 0)
        return NOT_UNDERSTOOD;
    memcpy(&head, image, sizeof(head));
    if (head.e_ident[EI_CLASS] != ELFCLASS64 || head.e_shentsize != sizeof(Elf64_Shdr))
        return NOT_UNDERSTOOD;
    if (plus(head.e_shoff, (uint64_t)head.e_shnum * sizeof(Elf64_Shdr)) > size)
        return NOT_UNDERSTOOD;
    for (unsigned i = 0; i < head.e_shnum; i++) {
        Elf64_Shdr section;
        memcpy(&section, image + head.e_shoff + i * sizeof(section), sizeof(section));
        if (section.sh_flags & SHF_ALLOC)
            found.bytes = plus(found.bytes, section.sh_size);
    }
    return found;
}

/* "SIMMOD globals=<bytes> code=<bytes>\n": the simulated driver's modules. */
static struct gs_image simulated(const char *text) {
    const char *globals = strstr(text, "globals="), *code = strstr(text, "code=");
    const char *end = strchr(text, '\n');
    if (!globals || !code || !end || globals > end || code > end)
        return NOT_UNDERSTOOD;
    return (struct gs_image){plus(strtoull(globals + 8, NULL, 10), strtoull(code + 5, NULL, 10)),
                             true};
}

static struct gs_image program(const unsigned char *at, size_t size, unsigned kind) {
    if (kind == 2)
        return elf(at, size);
    return kind == 1 ? gs_ptx((const char *)at, strnlen((const char *)at, size)) : NOT_UNDERSTOOD;
}

static struct gs_image unpacked(const unsigned char *at, const struct fatbin_entry *entry) {
    struct gs_image found = {.bytes = entry->uncompressed_size};
    size_t packed = entry->compressed_size, room = entry->uncompressed_size;
    if (!(entry->flags & FATBIN_LZ4) || packed > entry->size || room > UNPACKED_MAX ||
        room / LZ4_MOST > packed)
        return found;
    unsigned char *out = malloc(room + 1);
    if (out && gs_lz4(at, packed, out, room) == room) {
        out[room] = 0;
        found = program(out, room, entry->kind);
    }
    free(out);
    return found;
}

static struct gs_image fatbin(const unsigned char *image, size_t size) {
    struct fatbin_header head;
    struct gs_image most = {.known = true};
    if (size < sizeof(head))
        return NOT_UNDERSTOOD;
    memcpy(&head, image, sizeof(head));
    uint64_t end = plus(head.header_size, head.size);
    if (head.magic != FATBIN)
        return NOT_UNDERSTOOD;
    if (end > size)
        end = size;
    for (uint64_t at = head.header_size; at < end && end - at >= sizeof(struct fatbin_entry);) {
        struct fatbin_entry entry;
        memcpy(&entry, image + at, sizeof(entry));
        uint64_t step = plus(entry.header_size, entry.size);
        if (entry.header_size < sizeof(entry) || step > end - at) {
            most.known = false;
            break;
        }
        const unsigned char *data = image + at + entry.header_size;
        struct gs_image one = (entry.flags & (FATBIN_LZ4 | FATBIN_ZSTD))
                                  ? unpacked(data, &entry)
                                  : program(data, entry.size, entry.kind);
        most.bytes = one.bytes > most.bytes ? one.bytes : most.bytes;
        most.known &= one.known;
        at += step;
    }
    return most;
}

/* What a file may hold, too: without the wrapper, in which there are addresses. */
static struct gs_image plain(const void *image, size_t size) {
    uint32_t magic;
    if (size < sizeof(magic))
        return NOT_UNDERSTOOD;
    memcpy(&magic, image, sizeof(magic));
    if (magic == FATBIN)
        return fatbin(image, size);
    if (memcmp(image, ELFMAG, SELFMAG) == 0)
        return elf(image, size);
    if (memcmp(image, "SIMM", 4) == 0)
        return simulated(image);
    return gs_ptx(image, strnlen(image, size));
}

struct gs_image gs_image_read(const void *image, size_t size) {
    struct fatbin_wrapper wrapper;
    if (!image || size < sizeof(wrapper) || memcmp(image, &(uint32_t){FATBIN_WRAPPER}, 4) != 0)
        return image ? plain(image, size) : NOT_UNDERSTOOD;
    memcpy(&wrapper, image, sizeof(wrapper));
    return wrapper.data ? fatbin(wrapper.data, SIZE_MAX) : NOT_UNDERSTOOD;
}

/* A copy with a NUL behind it: text in a file need not end. */
struct gs_image gs_image_read_file(const char *path) {
    struct gs_image found = NOT_UNDERSTOOD;
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
            found = plain(copy, have);
        }
        free(copy);
    }
    close(fd);
    return found;
}
