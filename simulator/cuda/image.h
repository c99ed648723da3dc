/* The contents of a program image that the simulated driver uses. */
#ifndef SIM_IMAGE_H
#define SIM_IMAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define IMAGE_NAMES 256

struct image {
    uint64_t code_bytes, global_bytes; /* without the code of the functions below */
    unsigned n_functions, n_globals;
    struct {
        char *name;
        uint64_t bytes; /* loaded when it is first used */
    } function[IMAGE_NAMES];
    struct {
        char *name;
        uint64_t bytes;
    } global[IMAGE_NAMES];
    bool named; /* the image lists its functions: other names are not found */
};

/* False: not an image. `size` may be SIZE_MAX when unknown. */
/* `arch`: of the device, 10 * major + minor. */
bool image_read(const void *data, size_t size, unsigned arch, struct image *image);
void image_free(struct image *image);
#endif
