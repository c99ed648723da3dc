/* shim/code/ptx.c: text without a NUL behind it, as a fat binary holds it. */
#include "code/image.h"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *copy = copy_of(data, size, 0);
    gs_ptx(copy, size);
    free(copy);
    return 0;
}
