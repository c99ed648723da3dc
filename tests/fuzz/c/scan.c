/* hook/launcher/scan.c: the text of a config.json. */
#include "fuzz.h"
#include "launcher.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *text = copy_of(data, size, 0);
    scan_text_may_ask(text, size, size % 2);
    free(text);
    return 0;
}
