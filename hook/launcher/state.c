/* The bundle in an OCI state. Only the top level is looked at: an annotation may well be called
 * "bundle". Whatever is unusual (a second bundle, an escape in a name or in the path, anything that
 * is not JSON) is left to Python. */

#include <string.h>

#include "launcher.h"

struct text {
    const char *at, *end;
};

static char peek(struct text *t) {
    while (t->at < t->end && strchr(" \t\r\n", *t->at) && *t->at)
        t->at++;
    return t->at < t->end ? *t->at : '\0';
}

/* A string: false when it does not end; `plain` when it has no escape. */
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

/* Goes past one value of any kind. */
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
            if (!strchr(",:", c)) /* a number or a word, to its end */
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

bool state_bundle(const char *json, size_t size, char bundle[PATH_MAX]) {
    struct text t = {json, json + size};
    bool found = false;
    if (memchr(json, '\0', size) || peek(&t) != '{')
        return false;
    t.at++;
    for (char c = peek(&t); c != '}'; c = peek(&t)) {
        const char *name, *value;
        size_t length;
        bool plain;
        if (!string(&t, &name, &length, &plain) || !plain || peek(&t) != ':')
            return false;
        t.at++;
        if (is(name, length, "bundle") || is(name, length, "bundlePath")) {
            if (found || !string(&t, &value, &length, &plain) || !plain || length >= PATH_MAX ||
                *value != '/')
                return false;
            memcpy(bundle, value, length);
            bundle[length] = '\0';
            found = true;
        } else if (!skip(&t)) {
            return false;
        }
        if (peek(&t) == ',')
            t.at++;
        else if (peek(&t) != '}')
            return false;
    }
    t.at++;
    return found && peek(&t) == '\0' && t.at >= t.end;
}
