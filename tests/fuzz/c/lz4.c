/* shim/code/lz4.c: the first two bytes are the size of the output buffer. */
#include "code/image.h"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct input in = {data, data + size};
    size_t room = take(&in, 2), left = (size_t)(in.end - in.at);
    uint8_t *packed = copy_of(in.at, left, 0), *out = malloc(room ? room : 1);
    require(gs_lz4(packed, left, out, room) <= room);
    free(packed);
    free(out);
    return 0;
}
