/* The size of the variables that PTX text declares. An array size may use numbers, parentheses and
 * + - * / % << >>. For any other array size gs_ptx returns UINT64_MAX, so the module is refused;
 * compilers emit plain numbers. */
#define _GNU_SOURCE
#include <ctype.h>
#include <string.h>

#include "image.h"

#define DEEPEST 64u

struct text {
    const char *at, *end;
    bool bad;
    unsigned depth;
};

/* The next character that is not white space or in a comment; 0 at the end. */
static char peek(struct text *t) {
    for (;;) {
        while (t->at < t->end && isspace((unsigned char)*t->at))
            t->at++;
        const char *stop;
        if (t->end - t->at > 1 && t->at[0] == '/' && t->at[1] == '/')
            stop = memchr(t->at, '\n', (size_t)(t->end - t->at));
        else if (t->end - t->at > 1 && t->at[0] == '/' && t->at[1] == '*') {
            stop = memmem(t->at + 2, (size_t)(t->end - t->at - 2), "*/", 2);
            stop = stop ? stop + 2 : NULL;
        } else
            return t->at < t->end ? *t->at : 0;
        t->at = stop ? stop : t->end;
    }
}

static bool eat(struct text *t, const char *symbol) {
    size_t n = strlen(symbol);
    peek(t);
    if ((size_t)(t->end - t->at) < n || memcmp(t->at, symbol, n) != 0)
        return false;
    t->at += n;
    return true;
}

/* Read digits from `*at`, never past `end`: text in a fat binary does not end with a NUL. */
static uint64_t digits(const char **at, const char *end, unsigned base, bool *fits) {
    uint64_t value = 0;
    for (; *at < end && isxdigit((unsigned char)**at); ++*at) {
        char c = (char)tolower((unsigned char)**at);
        unsigned digit = (unsigned)(c <= '9' ? c - '0' : c - 'a' + 10);
        if (digit >= base)
            break;
        *fits &= !__builtin_mul_overflow(value, base, &value) &&
                 !__builtin_add_overflow(value, digit, &value);
    }
    return value;
}

/* These functions evaluate an array size. Overflow, a negative value and a division by 0 set `bad`.
 */
static uint64_t shifts(struct text *t);

static uint64_t number(struct text *t) {
    if (t->depth >= DEEPEST)
        t->bad = true;
    if (!t->bad && eat(t, "(")) {
        t->depth++;
        uint64_t value = shifts(t);
        t->depth--;
        t->bad |= !eat(t, ")");
        return value;
    }
    if (t->bad || !isdigit((unsigned char)peek(t))) {
        t->bad = true;
        return 0;
    }
    bool more = t->at[0] == '0' && t->end - t->at > 1, fits = true;
    char kind = more ? (char)tolower((unsigned char)t->at[1]) : '\0';
    unsigned base = kind == 'b' ? 2 : kind == 'x' ? 16 : isdigit((unsigned char)kind) ? 8 : 10;
    t->at += kind == 'b' || kind == 'x' ? 2 : 0;
    uint64_t value = digits(&t->at, t->end, base, &fits);
    t->bad |= !fits;
    eat(t, "U");
    return value;
}

static uint64_t product(struct text *t) {
    uint64_t value = number(t);
    while (!t->bad) {
        bool times = eat(t, "*"), over = !times && eat(t, "/");
        if (!times && !over && !eat(t, "%"))
            break;
        uint64_t right = number(t);
        if (times)
            t->bad |= __builtin_mul_overflow(value, right, &value);
        else if (right == 0)
            t->bad = true;
        else
            value = over ? value / right : value % right;
    }
    return value;
}

static uint64_t sum(struct text *t) {
    uint64_t value = product(t);
    while (!t->bad) {
        if (eat(t, "+"))
            t->bad |= __builtin_add_overflow(value, product(t), &value);
        else if (eat(t, "-"))
            t->bad |= __builtin_sub_overflow(value, product(t), &value);
        else
            break;
    }
    return value;
}

static uint64_t shifts(struct text *t) {
    uint64_t value = sum(t);
    while (!t->bad) {
        bool left = eat(t, "<<");
        if (!left && !eat(t, ">>"))
            break;
        uint64_t bits = sum(t);
        if (bits > 63 || (left && value << bits >> bits != value))
            t->bad = true;
        else
            value = left ? value << bits : value >> bits;
    }
    return value;
}

/* Set the bytes of a type (.u32: 4) or the number of lanes (.v4: 4). A type of unusual width counts
 * as the largest, 16 bytes. */
static void word(const char *at, size_t length, uint64_t *type, uint64_t *lanes) {
    if (length == 2 && at[0] == 'v' && isdigit((unsigned char)at[1])) {
        *lanes = (uint64_t)(at[1] - '0');
    } else if (length >= 2 && strchr("bsufe", at[0]) && isdigit((unsigned char)at[1])) {
        bool fits = true;
        const char *from = at + 1;
        uint64_t bits = digits(&from, at + length, 10, &fits);
        *type = fits && bits >= 8 && bits <= 128 ? bits / 8 : 16;
        if (length > 3 && memcmp(at + length - 2, "x2", 2) == 0)
            *type *= 2;
    } else if (length >= 4 && (memcmp(at, "bf16", 4) == 0 || memcmp(at, "tf32", 4) == 0)) {
        *type = 4;
    }
}

static bool in_name(char c) {
    return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '%';
}

/* Count the values of an initialiser, which decide if the first array size is left out. */
static uint64_t values(struct text *t) {
    uint64_t n = 1;
    unsigned depth = 0;
    for (char c; (c = peek(t)) && c != ';'; t->at++) {
        depth += c == '{';
        n += c == ',';
        if (c == '}' && --depth == 0) {
            t->at++;
            return n;
        }
    }
    return n;
}

/* The argument of ".attribute(...)". */
static void skip_parentheses(struct text *t) {
    if (peek(t) == '(') {
        const char *close = memchr(t->at, ')', (size_t)(t->end - t->at));
        t->at = close ? close + 1 : t->end;
    }
}

/* Parse the rest of a declaration, from after .global or .const to the ';'. Return its bytes. */
static uint64_t declaration(struct text *t) {
    uint64_t type = 0, lanes = 1, count = 1, total = 0, bytes;
    bool open = false;
    for (char c; (c = peek(t)) && !t->bad;) {
        if (c == '.' || in_name(c)) {
            bool attribute = c == '.';
            const char *from = t->at += attribute;
            while (t->at < t->end && in_name(*t->at))
                t->at++;
            if (attribute && (size_t)(t->at - from) == 5 && memcmp(from, "align", 5) == 0)
                number(t);
            else if (attribute && (size_t)(t->at - from) == 9 && memcmp(from, "attribute", 9) == 0)
                skip_parentheses(t);
            else if (attribute)
                word(from, (size_t)(t->at - from), &type, &lanes);
        } else if (c == '[') {
            t->at++;
            open = peek(t) == ']';
            t->bad |= !open && __builtin_mul_overflow(count, shifts(t), &count);
            t->bad |= !eat(t, "]");
        } else if (c == '=') {
            uint64_t n = values(t);
            count = open && n > count ? n : count;
        } else if (c == ',' || c == ';') {
            t->bad |= __builtin_mul_overflow(type * lanes, count, &bytes) ||
                      __builtin_add_overflow(total, bytes, &total);
            count = 1;
            if (c == ';')
                return total;
            t->at++;
        } else if (c == '{' || c == '(' || c == ')') {
            return total; /* not a declaration */
        } else {
            t->at++;
        }
    }
    return total;
}

uint64_t gs_ptx(const char *text, size_t size) {
    static const char *const spaces[] = {".global", ".const"};
    struct text t = {.at = text, .end = text + size};
    uint64_t total = 0, lines = 0;
    if (!memmem(text, size, ".version", 8))
        return 0; /* not PTX */
    for (const char *at = text; at < t.end; at++)
        lines += *at == '\n';
    while (t.at < t.end && peek(&t)) {
        const char *from = t.at++;
        for (size_t i = 0; *from == '.' && i < sizeof(spaces) / sizeof(spaces[0]); i++) {
            size_t n = strlen(spaces[i]);
            if ((size_t)(t.end - from) <= n || memcmp(from, spaces[i], n) != 0 ||
                in_name(from[n]) || (from > text && (in_name(from[-1]) || from[-1] == '.')))
                continue;
            t.at = from + n;
            uint64_t bytes = declaration(&t);
            if (t.bad || __builtin_add_overflow(total, bytes, &total))
                return UINT64_MAX;
        }
    }
    /* A line is about one instruction. */
    return __builtin_add_overflow(total, lines * 16, &total) ? UINT64_MAX : total;
}
