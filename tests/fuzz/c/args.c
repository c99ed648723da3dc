/* hook/launcher/args.c: arguments, each ended by a NUL. */
#include "fuzz.h"
#include "launcher.h"

#define MOST 64

static bool is_one_of(const char *text, const char *const *words) {
    for (; *words; words++)
        if (text >= *words && text <= *words + strlen(*words))
            return true;
    return false;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *words[MOST + 1];
    size_t n = 0;
    for (size_t at = 0; at < size && n < MOST;) {
        const uint8_t *end = memchr(data + at, 0, size - at);
        size_t length = end ? (size_t)(end - data) - at : size - at;
        words[n++] = copy_of(data + at, length, 1); /* separate allocations */
        at += length + 1;
    }
    words[n] = NULL;
    const char *const *line = (const char *const *)words;
    struct call call = args_parse(line);
    require(call.rest >= line && call.rest <= line + n);
    require(!call.command || is_one_of(call.command, line));
    require(!call.id || is_one_of(call.id, line));
    require(!call.bundle || is_one_of(call.bundle, line));
    require(!call.config_name || is_one_of(call.config_name, line));
    require(call.config && call.state_dir);
    while (n)
        free(words[--n]);
    return 0;
}
