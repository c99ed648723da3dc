/* shim/code/image.c and the code that it calls: a program image in a file. */
#include "code/image.h"
#include "fuzz.h"

#define PATH "/image"
#define MOST (1 << 20)

static void *file;

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    file = file_make(PATH, MOST);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    size = size < MOST ? size : MOST;
    file_resize(PATH, size);
    if (size)
        memcpy(file, data, size);
    struct gs_image *once = gs_image_read_file(PATH, 86), *again = gs_image_read_file(PATH, 86);
    require(once && again && once->all == again->all && once->n_kernels == again->n_kernels);
    uint64_t sum = once->shared;
    for (uint32_t i = 0; i < once->n_kernels; i++) {
        require(i == 0 || once->kernel[i - 1].hash <= once->kernel[i].hash);
        if (__builtin_add_overflow(sum, once->kernel[i].bytes, &sum))
            sum = UINT64_MAX;
    }
    require(once->all <= sum);
    free(once);
    free(again);
    return 0;
}
