/* Arrays: opaque memory with a shape. */
#ifndef SIM_ARRAY_H
#define SIM_ARRAY_H

#include "sim.h"

struct array {
    uint32_t magic;
    struct mem *mem; /* shared with the mipmapped array that it belongs to */
    uint64_t va;
    size_t pitch, rows, layers;
    CUDA_ARRAY3D_DESCRIPTOR shape;
    struct mipmap *mipmap; /* NULL unless it is a level of a mipmapped array */
    struct context *ctx;
    uint64_t context_id;
};

/* Bytes of an element; 0 for an unknown format. */
unsigned array_element_bytes(CUarray_format format, unsigned channels);
#endif
