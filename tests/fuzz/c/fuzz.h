/* What the fuzz targets in C share. libFuzzer calls LLVMFuzzerTestOneInput with bytes of its own
 * making, over and over, in one process; a target fails by a sanitizer's report or by `require`. */
#ifndef GPUSHARE_FUZZ_H
#define GPUSHARE_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define require(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
            abort(); \
        } \
    } while (0)

/* The bytes as numbers, little-endian; behind their end there are zeros. */
struct input {
    const uint8_t *at, *end;
};

static inline uint64_t take(struct input *in, unsigned bytes) {
    uint64_t value = 0;
    for (unsigned i = 0; i < bytes; i++)
        value |= (uint64_t)(in->at < in->end ? *in->at++ : 0) << 8 * i;
    return value;
}

/* A copy that ends where it ends, so that a read behind it is seen; `more` bytes of 0 behind it. */
static inline void *copy_of(const uint8_t *data, size_t size, size_t more) {
    char *copy = malloc(size + more ? size + more : 1);
    require(copy);
    if (size)
        memcpy(copy, data, size);
    memset(copy + size, 0, more);
    return copy;
}

/* files.c: what the shim finds below /usr/lib/gpushare, and the same bytes for the target to
 * change. Linked with --wrap=open. */
void *file_make(const char *path, size_t size);
void file_resize(const char *path, size_t size);
void file_write(const char *path, size_t at, const void *bytes,
                size_t size); /* or it ends before */

/* folder.c: directories for a target that works on real files. All of it is in a mount namespace
 * of its own, on a tmpfs that goes with the process. */
#define FOLDER_LOG "/mnt/log"
void folder_enter(const char *path);
void folder_empty(int directory);     /* everything in it */
unsigned folder_names(int directory); /* how many, at any depth */
int folder_open(int directory, const char *path);
void folder_put(int directory, const char *path, const void *bytes, size_t size);
void folder_close_all(int first); /* descriptors from `first` on */

#endif
