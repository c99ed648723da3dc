/* Parse the command line of an OCI runtime. gpushare/programs/commandline.py has the rules, and the
 * tables are generated from it. */

#include <string.h>

#include "launcher.h"
#include "launcher_tables.h"

struct flag {
    const char *name; /* without a NUL: `length` bytes */
    size_t length;
    const char *value; /* NULL: no `=` */
};

static struct flag split(const char *word) {
    word += word[1] == '-' ? 2 : 1;
    const char *equals = strchr(word, '=');
    return (struct flag){word, equals ? (size_t)(equals - word) : strlen(word),
                         equals ? equals + 1 : NULL};
}

static bool is(struct flag flag, const char *name) {
    return strlen(name) == flag.length && memcmp(flag.name, name, flag.length) == 0;
}

bool args_listed(const char *const *list, const char *word, size_t length) {
    for (; *list; list++)
        if (strlen(*list) == length && memcmp(*list, word, length) == 0)
            return true;
    return false;
}

/* Parse one flag at `*words` and move past it and its value. False: unknown flag, or no value. */
static bool take(const char *const **words, const char *const *with_value, const char *const *bare,
                 struct flag *flag) {
    const char *word = *(*words)++;
    *flag = split(word);
    if (strncmp(word, "---", 3) == 0)
        return false;
    if (args_listed(with_value, flag->name, flag->length)) {
        if (!flag->value)
            flag->value = **words ? *(*words)++ : NULL;
        return flag->value != NULL;
    }
    return args_listed(bare, flag->name, flag->length);
}

static bool is_flag(const char *word) {
    return word[0] == '-' && word[1] != '\0';
}

static const char *const *take_own(const char *const *words, struct call *call) {
    while (*words && strncmp(*words, "--", 2) == 0 && (*words)[2] != '-') {
        struct flag flag = split(*words);
        if (is(flag, OWN_CRI) && !flag.value) {
            call->cri = true;
            words++;
            continue;
        }
        bool config = is(flag, OWN_CONFIG);
        if (!config && !is(flag, OWN_STATE))
            break;
        if (!flag.value && !words[1])
            break;
        const char *value = flag.value ? flag.value : *++words;
        *(config ? &call->config : &call->state_dir) = *value   ? value
                                                       : config ? DEFAULT_CONFIG
                                                                : DEFAULT_STATE;
        words++;
    }
    return words;
}

static void parse_command(const char *const *words, struct call *call) {
    static const char *const none[] = {NULL};
    bool is_delete = strcmp(call->command, "delete") == 0;
    bool flags_end = false;
    while (*words) {
        struct flag flag;
        if (!flags_end && strcmp(*words, "--") == 0) {
            flags_end = true;
            words++;
        } else if (flags_end || !is_flag(*words)) {
            if (!call->id)
                call->id = *words;
            words++;
        } else if (!take(&words, is_delete ? none : COMMAND_VALUE,
                         is_delete ? DELETE_BARE : COMMAND_BARE, &flag)) {
            call->unknown = true;
            return;
        } else if (!is_delete && flag.value) {
            /* the last of two bundles counts: commandline.py handles it */
            const char **field = is(flag, "b") || is(flag, "bundle")   ? &call->bundle
                                 : is(flag, "f") || is(flag, "config") ? &call->config_name
                                                                       : NULL;
            if (field && *field)
                call->unknown = true;
            if (field)
                *field = flag.value;
        }
    }
}

struct call args_parse(const char *const *words) {
    struct call call = {.config = DEFAULT_CONFIG, .state_dir = DEFAULT_STATE};
    call.rest = words = take_own(words, &call);
    while (*words && is_flag(*words)) {
        struct flag flag;
        if (strcmp(*words, "--") == 0 || !take(&words, GLOBAL_VALUE, GLOBAL_BARE, &flag)) {
            call.unknown = true;
            return call;
        }
    }
    if (!*words)
        return call;
    call.command = *words++;
    if (args_listed(STARTING, call.command, strlen(call.command)) ||
        strcmp(call.command, "delete") == 0)
        parse_command(words, &call);
    return call;
}
