/* What the simulated driver reads out of a program image. */
#ifndef SIM_IMAGE_H
#define SIM_IMAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define IMAGE_NAMES 64

struct image {
    uint64_t code_bytes, global_bytes;
    unsigned n_functions, n_globals;
    char *function[IMAGE_NAMES];
    struct {
        char *name;
        uint64_t bytes;
    } global[IMAGE_NAMES];
    bool named; /* the image lists its functions: other names are not found */
};

/* False: not an image. `size` may be SIZE_MAX when unknown. */
bool image_read(const void *data, size_t size, struct image *image);
void image_free(struct image *image);
#endif
