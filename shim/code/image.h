/* How much device memory a program image takes when it is loaded. */
#ifndef GPUSHARE_IMAGE_H
#define GPUSHARE_IMAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gs_kernel {
    uint64_t hash; /* of its name */
    uint64_t bytes;
};

/* The sizes of the program in an image that one device would run. One block of memory: free(). */
struct gs_image {
    uint64_t shared; /* global data, constants and code that belong to no kernel */
    uint64_t all;    /* `shared` and every kernel */
    bool known;      /* false: a part cannot be read, and the sizes are upper bounds */
    uint32_t n_kernels;
    struct gs_kernel kernel[]; /* by ascending hash */
};

/* Read an image as cuModuleLoadData takes it: cubin, fat binary, PTX text. `size` is SIZE_MAX where
 * it is unknown, `arch` 10 * major + minor of the device's compute capability, 0 where unknown.
 * Never fails for lack of understanding: the driver then refuses the image. NULL: no memory. */
struct gs_image *gs_image_read(const void *image, size_t size, unsigned arch);
/* Read an image file; an unreadable file takes 0 bytes, and the driver reports the reason. */
struct gs_image *gs_image_read_file(const char *path, unsigned arch);
/* Hash of a kernel's name, never 0. */
uint64_t gs_image_hash(const char *name, size_t length);
/* Bytes of a kernel, 0 when the image names no such kernel. */
uint64_t gs_image_kernel(const struct gs_image *image, uint64_t hash);

/* ptx.c: what a module made from PTX text takes; UINT64_MAX when a declared size makes no sense. */
uint64_t gs_ptx(const char *text, size_t size);
/* lz4.c: bytes written to `out`, 0 when the data make no sense. */
size_t gs_lz4(const unsigned char *at, size_t size, unsigned char *out, size_t room);

#endif
