/* The launcher's parsers as a library, for the targets that compare them with Python's. */
#include "launcher.h"

void read_line(const char *const *words, struct call *call);
void read_line(const char *const *words, struct call *call) {
    *call = args_parse(words);
}
