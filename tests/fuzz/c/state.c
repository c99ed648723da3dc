/* hook/launcher/state.c: an OCI state. */
#include "fuzz.h"
#include "launcher.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct state state;
    char *text = copy_of(data, size, 0);
    if (state_read(text, size, &state))
        require(state.bundle[0] == '/' && memchr(state.bundle, 0, sizeof state.bundle));
    free(text);
    return 0;
}
