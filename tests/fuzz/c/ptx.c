/* shim/code/ptx.c: text without a final NUL, as in a fat binary. */
#include "code/image.h"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *copy = copy_of(data, size, 0);
    gs_ptx(copy, size);
    free(copy);
    return 0;
}
