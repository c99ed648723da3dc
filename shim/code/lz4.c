/* Decode one LZ4 block of a fat binary, without access outside of both buffers. */
#include <string.h>

#include <stdbool.h>

#include "image.h"

/* A length goes on while its bytes are 255; false at the end of the data. */
static bool longer(const unsigned char **at, const unsigned char *end, size_t *length) {
    unsigned char more;
    do {
        if (*at == end)
            return false;
        *length += more = *(*at)++;
    } while (more == 255);
    return true;
}

size_t gs_lz4(const unsigned char *at, size_t size, unsigned char *out, size_t room) {
    const unsigned char *end = at + size;
    size_t done = 0;
    while (at < end) {
        unsigned token = *at++;
        size_t literals = token >> 4, match = (token & 15) + 4;
        if (literals == 15 && !longer(&at, end, &literals))
            return 0;
        if (literals > (size_t)(end - at) || literals > room - done)
            return 0;
        memcpy(out + done, at, literals);
        done += literals;
        at += literals;
        if (end - at < 2)
            return done;
        size_t back = at[0] | (size_t)at[1] << 8;
        at += 2;
        if ((token & 15) == 15 && !longer(&at, end, &match))
            return 0;
        if (back == 0 || back > done || match > room - done)
            return 0;
        for (; match; match--, done++)
            out[done] = out[done - back];
    }
    return done;
}
