/* The bytes of the variables that PTX text declares, so that room for `.global .b8 x[8589934592];`
 * is reserved before the driver compiles it. Compilers write array sizes as plain numbers; products
 * of numbers are read, too. Other text counts nothing here: the driver's count
 * (core/overhead.c) follows. */
#define _GNU_SOURCE
#include <ctype.h>
#include <stdbool.h>
#include <string.h>

#include "image.h"

static bool in_name(char c) {
    return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '%';
}

/* The end of white space and comments from `at` on. */
static const char *skip(const char *at, const char *end) {
    for (;;) {
        const char *stop = NULL;
        while (at < end && isspace((unsigned char)*at))
            at++;
        if (end - at < 2 || at[0] != '/' || (at[1] != '/' && at[1] != '*'))
            return at;
        if (at[1] == '/')
            stop = memchr(at, '\n', (size_t)(end - at));
        else if ((stop = memmem(at + 2, (size_t)(end - at - 2), "*/", 2)))
            stop += 2;
        at = stop ? stop : end;
    }
}

/* Text in a fat binary does not end with a NUL. */
static uint64_t number(const char **at, const char *end) {
    bool hex = end - *at > 2 && (*at)[0] == '0' && tolower((unsigned char)(*at)[1]) == 'x';
    uint64_t value = 0;
    for (*at += hex ? 2 : 0; *at < end && (hex ? isxdigit : isdigit)((unsigned char)**at); ++*at) {
        uint64_t digit = (uint64_t)(**at <= '9' ? **at - '0' : tolower((unsigned char)**at) - 87);
        if (__builtin_mul_overflow(value, hex ? 16 : 10, &value) ||
            __builtin_add_overflow(value, digit, &value))
            value = UINT64_MAX;
    }
    return value;
}

static uint64_t times(uint64_t a, uint64_t b) {
    uint64_t value;
    return __builtin_mul_overflow(a, b, &value) ? UINT64_MAX : value;
}

/* The size in brackets; 1 for one that is left out or no product of numbers. */
static uint64_t elements(const char **at, const char *end) {
    uint64_t n = 1;
    for (const char *c = skip(*at, end); c < end; c = skip(c, end)) {
        if (*c == ']') {
            *at = c + 1;
            return n;
        }
        if (isdigit((unsigned char)*c))
            n = times(n, number(&c, end));
        else if (*c == '*' || *c == 'U')
            c++;
        else
            break;
    }
    const char *close = memchr(*at, ']', (size_t)(end - *at));
    *at = close ? close + 1 : end;
    return 1;
}

/* The bytes of ".u32" or the lanes of ".v4"; 1 for another word. */
static uint64_t factor(const char *word, const char *end) {
    const char *from = word + 1;
    if (end - word < 2 || !strchr("bsufv", word[0]) || !isdigit((unsigned char)word[1]))
        return 1;
    uint64_t n = number(&from, end);
    return word[0] == 'v' ? n : n / 8;
}

/* Read from after .global or .const to the ';' and return the bytes of all variables. */
static uint64_t declaration(const char **at, const char *end) {
    uint64_t each = 1, count = 1, total = 0;
    while ((*at = skip(*at, end)) < end && !strchr("{(", **at)) {
        const char *word = *at;
        char c = *(*at)++;
        while (*at < end && (c == '.' || in_name(c)) && in_name(**at))
            ++*at;
        if (c == '.' && *at - word == 6 && memcmp(word, ".align", 6) == 0) {
            *at = skip(*at, end);
            number(at, end);
        } else if (c == '.') {
            each = times(each, factor(word + 1, *at));
        } else if (c == '[') {
            count = times(count, elements(at, end));
        } else if (strchr(",;=", c)) {
            uint64_t bytes = times(each, count);
            total = total + bytes < total ? UINT64_MAX : total + bytes;
            count = 1;
            if (c != ',')
                break; /* variables after one with values are small: they are in the text */
        }
    }
    return total;
}

uint64_t gs_ptx(const char *text, size_t size) {
    const char *at = text, *end = text + size;
    uint64_t total = 0;
    if (!memmem(text, size, ".version", 8))
        return 0; /* not PTX */
    while ((at = skip(at, end)) < end) {
        const char *word = at++;
        while (at < end && in_name(*at))
            at++;
        size_t n = (size_t)(at - word);
        if (word > text && in_name(word[-1]))
            continue; /* ld.global */
        if ((n != 7 || memcmp(word, ".global", 7) != 0) &&
            (n != 6 || memcmp(word, ".const", 6) != 0))
            continue;
        uint64_t bytes = declaration(&at, end);
        total = total + bytes < total ? UINT64_MAX : total + bytes;
    }
    return total;
}
