/* Parse the bundle of an OCI state. Only the top level counts, since an annotation may
 * be called "bundle". Everything unusual (a second bundle, an escape in a name, \u in the path,
 * invalid JSON) is left to Python. crun 1.28 escapes each slash. */

#include <string.h>

#include "launcher.h"
#include "launcher_tables.h"

struct text {
    const char *at, *end;
};

static char peek(struct text *t) {
    while (t->at < t->end && strchr(" \t\r\n", *t->at) && *t->at)
        t->at++;
    return t->at < t->end ? *t->at : '\0';
}

/* Parse a string; false if it does not end. `plain`: it has no escape. */
static bool string(struct text *t, const char **begin, size_t *length, bool *plain) {
    if (peek(t) != '"')
        return false;
    *begin = ++t->at;
    *plain = true;
    for (; t->at < t->end && *t->at != '"'; t->at++)
        if (*t->at == '\\') {
            *plain = false;
            t->at++;
        }
    if (t->at >= t->end)
        return false;
    *length = (size_t)(t->at++ - *begin);
    return true;
}

/* Skip one value of any type. */
static bool skip(struct text *t) {
    const char *begin;
    size_t length;
    bool plain;
    int depth = 0;
    do {
        char c = peek(t);
        if (c == '"') {
            if (!string(t, &begin, &length, &plain))
                return false;
        } else if (c == '{' || c == '[') {
            depth++;
            t->at++;
        } else if (c == '}' || c == ']') {
            depth--;
            t->at++;
        } else if (c && (depth > 0 || !strchr(",:", c))) {
            t->at++;
            if (!strchr(",:", c)) /* a number or a literal */
                while (t->at < t->end && !strchr(",:]}[{\" \t\r\n", *t->at))
                    t->at++;
        } else {
            return false;
        }
        if (depth < 0)
            return false;
    } while (depth > 0);
    return true;
}

static bool is(const char *text, size_t length, const char *name) {
    return length == strlen(name) && memcmp(text, name, length) == 0;
}

/* Copy a string, with `\/` as a slash, or "" if it is too long. Return false if it has another
 * escape. */
static bool text_of(struct text *t, char *field, size_t room) {
    const char *value;
    size_t length, put = 0;
    bool plain;
    if (!string(t, &value, &length, &plain))
        return false;
    for (size_t at = 0; at < length && put < room; at++) {
        if (value[at] == '\\' && value[++at] != '/')
            return false;
        field[put++] = value[at];
    }
    field[put < room ? put : 0] = '\0';
    return true;
}

/* Return whether an annotation sends the output of hooks to a file; like hookoutput.is_redirected.
 */
static bool redirects(const char *name, size_t length, bool plain, struct text value) {
    char file[sizeof OWN_STDERR + 1];
    if (!plain)
        return scan_has_escaped_letters(name, length); /* neither name has a slash */
    if (is(name, length, HOOK_STDOUT))
        return true;
    return is(name, length, HOOK_STDERR) &&
           !(text_of(&value, file, sizeof file) && strcmp(file, OWN_STDERR) == 0);
}

/* Skip the comma after a member, and stay at '}'. Return false for any other text. */
static bool next_member(struct text *t) {
    if (peek(t) == ',')
        t->at++;
    else if (peek(t) != '}')
        return false;
    return true;
}

static bool annotations(struct text *t, struct state *state) {
    if (peek(t) != '{')
        return skip(t);
    t->at++;
    while (peek(t) != '}') {
        const char *name;
        size_t length;
        bool plain;
        if (!string(t, &name, &length, &plain) || peek(t) != ':')
            return false;
        t->at++;
        state->redirects |= redirects(name, length, plain, *t);
        if (!skip(t) || !next_member(t))
            return false;
    }
    t->at++;
    return true;
}

/* Parse one value. False: leave it to Python. */
static bool take(struct text *t, const char *name, size_t length, struct state *state) {
    if (is(name, length, "bundle") || is(name, length, "bundlePath"))
        return !*state->bundle && text_of(t, state->bundle, sizeof state->bundle) &&
               *state->bundle == '/';
    if (is(name, length, "annotations"))
        return annotations(t, state);
    return skip(t);
}

bool state_read(const char *json, size_t size, struct state *state) {
    struct text t = {json, json + size};
    *state = (struct state){.redirects = false};
    if (memchr(json, '\0', size) || peek(&t) != '{')
        return false;
    t.at++;
    while (peek(&t) != '}') {
        const char *name;
        size_t length;
        bool plain;
        if (!string(&t, &name, &length, &plain) || !plain || peek(&t) != ':')
            return false;
        t.at++;
        if (!take(&t, name, length, state) || !next_member(&t))
            return false;
    }
    t.at++;
    return *state->bundle && peek(&t) == '\0' && t.at >= t.end;
}
