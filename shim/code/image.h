/* The sizes in a program image: how much device memory its first use may take. */
#ifndef GPUSHARE_IMAGE_H
#define GPUSHARE_IMAGE_H

#include <stddef.h>
#include <stdint.h>

/* Bytes in the program of an image that one device would run, 0 for what cannot be read. */
struct gs_image {
    uint64_t data; /* variables and constants: taken with the first use of any part */
    uint64_t code; /* of all kernels together; each is taken at its own first use */
};

/* Read an image as cuModuleLoadData takes it: cubin, fat binary, PTX text. `size` is SIZE_MAX where
 * it is unknown, `arch` 10 * major + minor of the device's compute capability, 0 where unknown. */
struct gs_image gs_image_read(const void *image, size_t size, unsigned arch);
/* Read an image file; the sizes of an unreadable file are 0, and the driver reports the reason. */
struct gs_image gs_image_read_file(const char *path, unsigned arch);

/* ptx.c: bytes of the variables that PTX text declares. */
uint64_t gs_ptx(const char *text, size_t size);
/* lz4.c: bytes written to `out`, 0 when the data make no sense. */
size_t gs_lz4(const unsigned char *at, size_t size, unsigned char *out, size_t room);

#endif
