/* How much device memory a program image takes when it is loaded. */
#ifndef GPUSHARE_IMAGE_H
#define GPUSHARE_IMAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes of global data and code. Not `known`: at least that much, since a part of the image cannot
 * be read here. */
struct gs_image {
    uint64_t bytes;
    bool known;
};

/* An image as cuModuleLoadData takes it: cubin, fatbin, PTX text. `size` SIZE_MAX: not known. */
struct gs_image gs_image_read(const void *image, size_t size);
/* The same of a file; 0 bytes when it cannot be read (the driver will say so itself). */
struct gs_image gs_image_read_file(const char *path);

/* ptx.c */
struct gs_image gs_ptx(const char *text, size_t size);
/* lz4.c: bytes written to `out`, 0 when the data make no sense. */
size_t gs_lz4(const unsigned char *at, size_t size, unsigned char *out, size_t room);

#endif
