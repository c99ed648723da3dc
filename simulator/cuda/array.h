/* Arrays: opaque memory with a shape. */
#ifndef SIM_ARRAY_H
#define SIM_ARRAY_H

#include "sim.h"

struct array {
    uint32_t magic;
    struct mem *mem; /* shared with the mipmap that it is a level of */
    uint64_t va;
    size_t pitch, rows, layers;
    CUDA_ARRAY3D_DESCRIPTOR shape;
    struct mipmap *mipmap; /* NULL: an array of its own */
    struct context *ctx;
    uint64_t context_id;
};

/* Bytes of an element; 0: no such format. */
unsigned array_element_bytes(CUarray_format format, unsigned channels);
#endif
