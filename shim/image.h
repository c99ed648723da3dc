/* How much device memory a program image takes when it is loaded. */
#ifndef GPUSHARE_IMAGE_H
#define GPUSHARE_IMAGE_H

#include <stddef.h>
#include <stdint.h>

/* Bytes of global data and code of an image as cuModuleLoadData takes it (cubin, fatbin, PTX text);
 * never below what is known from its tables. 0: not understood. `size` SIZE_MAX: not known. */
uint64_t gs_image_bytes(const void *image, size_t size);
/* The same of a file; 0 when it cannot be read (the driver will say so itself). */
uint64_t gs_image_file_bytes(const char *path);

#endif
