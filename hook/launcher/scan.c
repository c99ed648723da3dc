/* Search trigger words in the text of a config.json without parsing it. Every word that Python
 * could find in the parsed values is in the text, either literally or with JSON escapes of its
 * letters. */

#define _GNU_SOURCE
#include <ctype.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "launcher.h"
#include "launcher_tables.h"

#define MAX_TEXT (1 << 20) /* an ordinary config.json has 10 to 30 kB */

static int hex(char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* Return whether the text has an escape of a letter, digit or sign of trigger words: \u00XX. With
 * `slash`, also \/. Other escapes (\n, \u003c, which Go writes for <) cannot be part of one. */
static bool has_escapes(const char *text, size_t size, bool slash) {
    const char *end = text + size;
    for (const char *at = text; (at = memchr(at, '\\', (size_t)(end - at))); at += 2) {
        if (end - at < 2)
            return false;
        if (slash && at[1] == '/')
            return true;
        if (at[1] == 'u' && end - at >= 6 && at[2] == '0' && at[3] == '0') {
            int code = hex(at[4]) * 16 + hex(at[5]);
            if (hex(at[4]) >= 0 && hex(at[5]) >= 0 && (isalnum(code) || strchr("._-/", code)))
                return true;
        }
    }
    return false;
}

bool scan_has_escaped_letters(const char *text, size_t size) {
    return has_escapes(text, size, false);
}

static bool has_hidden_letters(const char *text, size_t size) {
    return has_escapes(text, size, true);
}

static bool holds(const char *text, size_t size, const char *word) {
    return memmem(text, size, word, strlen(word)) != NULL;
}

/* Return whether this is the sandbox of a pod, which requests nothing whatever annotations of its
 * pod it has. The caller knows that the engine is a CRI. Quotes inside a JSON string are escaped,
 * so this text is a member of an object, as containerd writes it, and only annotations and sysctls
 * can have such a name (no runtime accepts such a sysctl). Return false if gpushare has
 * already edited the text, or if it has the annotation of another engine: then it may be a
 * container whose pod has this annotation. */
static bool is_sandbox(const char *text, size_t size) {
    return holds(text, size, SANDBOX) && !holds(text, size, APPLIED) &&
           !holds(text, size, SANDBOX_TOO) && !holds(text, size, HOOK_STDOUT) &&
           !holds(text, size, HOOK_STDERR) && !has_hidden_letters(text, size);
}

/* Return whether a device may be NVIDIA's by its number, whatever its name: "major" : 195. */
static bool has_major(const char *text, size_t size) {
    static const char key[] = "\"major\"", number[] = NVIDIA_MAJOR;
    const char *end = text + size;
    for (const char *at = text; (at = memmem(at, (size_t)(end - at), key, sizeof key - 1));) {
        at += sizeof key - 1;
        while (at < end && *at && strchr(" \t\r\n:", *at))
            at++;
        if ((size_t)(end - at) >= sizeof number - 1 && memcmp(at, number, sizeof number - 1) == 0)
            return true;
    }
    return false;
}

/* A device rule, parsed so far. */
struct rule {
    const char *at, *end;
    unsigned seen; /* bits of members, by their index in KEYS */
    bool allows, is_block, is_character, only_makes_nodes, is_below;
};

static bool take(struct rule *rule, char wanted) {
    while (rule->at < rule->end && *rule->at && strchr(" \t\r\n", *rule->at))
        rule->at++;
    bool there = rule->at < rule->end && *rule->at == wanted;
    rule->at += there;
    return there;
}

struct value {
    const char *text; /* without NUL and quotes */
    size_t length;
    bool is_text;
};

/* Parse a string without escapes, a number or a literal. */
static bool take_value(struct rule *rule, struct value *value) {
    value->is_text = take(rule, '"');
    value->text = rule->at;
    while (rule->at < rule->end && (isalnum((unsigned char)*rule->at) || *rule->at == '-'))
        rule->at++;
    value->length = (size_t)(rule->at - value->text);
    if (!value->is_text)
        return value->length > 0;
    return rule->at < rule->end && *rule->at++ == '"';
}

static bool is(struct value value, const char *word) {
    return value.length == strlen(word) && memcmp(value.text, word, value.length) == 0;
}

static bool is_below_nvidia(struct value value) {
    int number = 0;
    for (size_t at = 0; at < value.length; at++) {
        if (value.length > 3 || !isdigit((unsigned char)value.text[at]))
            return false;
        number = number * 10 + (value.text[at] - '0');
    }
    return number < NVIDIA_MAJOR_NUMBER;
}

/* Parse one `"key": value`; false if engines do not write it so. */
static bool take_member(struct rule *rule) {
    static const char *const KEYS[] = {"allow", "type", "major", "minor", "access"};
    static const bool IS_TEXT[] = {false, true, false, false, true};
    struct value key, value;
    size_t which = 0, count = sizeof KEYS / sizeof *KEYS;
    if (!take_value(rule, &key) || !key.is_text || !take(rule, ':') || !take_value(rule, &value))
        return false;
    while (which < count && !is(key, KEYS[which]))
        which++;
    if (which == count || value.is_text != IS_TEXT[which] || rule->seen & 1u << which)
        return false;
    rule->seen |= 1u << which;
    switch (which) {
    case 0:
        rule->allows = is(value, "true");
        break;
    case 1:
        rule->is_block = is(value, "b");
        rule->is_character = is(value, "c");
        break;
    case 2:
        rule->is_below = is_below_nvidia(value);
        break;
    case 4:
        rule->only_makes_nodes = is(value, "m");
        break;
    }
    return true;
}

/* Return whether the object at rule->at could open NVIDIA's devices, like cdi_devices.reaches in
 * Python, which decides. A rule in an unusual format counts as one that could. */
static bool rule_reaches(struct rule rule) {
    if (!take(&rule, '{'))
        return true;
    do {
        if (!take_member(&rule))
            return true;
    } while (take(&rule, ','));
    if (!take(&rule, '}'))
        return true;
    return rule.allows && !rule.is_block &&
           !(rule.is_character && (rule.only_makes_nodes || rule.is_below));
}

static const char allow_key[] = "\"allow\"";

static size_t count_rules(const char *text, size_t size) {
    const char *at = text, *end = text + size;
    size_t found = 0;
    for (; (at = memmem(at, (size_t)(end - at), allow_key, sizeof allow_key - 1)); found++)
        at += sizeof allow_key - 1;
    return found;
}

/* Return whether any device rule in the text could open NVIDIA's devices. */
static bool rules_reach(const char *text, size_t size) {
    const char *end = text + size;
    for (const char *at = text;
         (at = memmem(at, (size_t)(end - at), allow_key, sizeof allow_key - 1));) {
        struct rule rule = {.at = at, .end = end};
        while (rule.at > text && *rule.at != '{' && *rule.at != '}')
            rule.at--;
        if (rule_reaches(rule))
            return true;
        at += sizeof allow_key - 1;
    }
    return false;
}

bool scan_text_may_ask(char *text, size_t size, bool cri) {
    bool sandbox = cri && is_sandbox(text, size);
    size_t rules = count_rules(text, size);
    if (rules_reach(text, size))
        return true;
    for (size_t at = 0; at < size; at++)
        text[at] = (char)(text[at] >= 'A' && text[at] <= 'Z' ? text[at] + 'a' - 'A' : text[at]);
    if (count_rules(text, size) != rules)
        return true; /* an unusual rule: runc applies it, and Python refuses it */
    for (const char *const *trigger = TRIGGERS; *trigger; trigger++) {
        char word[64];
        size_t length = strlen(*trigger);
        if (length >= sizeof word)
            return true;
        if (sandbox && strcmp(*trigger, DEVICE_TRIGGER) != 0)
            continue;
        for (size_t at = 0; at <= length; at++)
            word[at] = (char)tolower((unsigned char)(*trigger)[at]);
        if (memmem(text, size, word, length))
            return true;
    }
    return has_major(text, size) || has_hidden_letters(text, size);
}

bool scan_may_ask(const char *path, bool cri) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return true;
    struct stat status;
    bool asks = true;
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_size <= MAX_TEXT) {
        char *text = malloc(MAX_TEXT + 1);
        size_t size = 0;
        ssize_t got = text ? 1 : -1;
        while (got > 0 && size <= MAX_TEXT) {
            got = read(fd, text + size, MAX_TEXT + 1 - size);
            size += got > 0 ? (size_t)got : 0;
        }
        asks = got != 0 || scan_text_may_ask(text, size, cri); /* not 0: an error, or too large */
        free(text);
    }
    close(fd);
    return asks;
}
