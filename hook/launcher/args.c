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

/* The field of a flag of create, run or restore. */
static const char **field_of(struct call *call, struct flag flag) {
    return is(flag, "b") || is(flag, "bundle")   ? &call->bundle
           : is(flag, "f") || is(flag, "config") ? &call->config_name
                                                 : NULL;
}

/* `unknown` for a flag that is in no table or lacks its value, and for `--`. */
struct call args_parse(const char *const *words) {
    static const char *const none[] = {NULL};
    struct call call = {.config = DEFAULT_CONFIG, .state_dir = DEFAULT_STATE};
    const char *const *with_value = GLOBAL_VALUE, *const *bare = GLOBAL_BARE;
    call.rest = words = take_own(words, &call);
    while (*words) {
        const char *word = *words++;
        if (word[0] == '-' && word[1]) {
            struct flag flag = split(word);
            bool takes = args_listed(with_value, flag.name, flag.length);
            if (takes && !flag.value && *words)
                flag.value = *words++;
            call.unknown = strncmp(word, "---", 3) == 0 ||
                           (takes ? !flag.value : !args_listed(bare, flag.name, flag.length));
            if (call.unknown)
                return call;
            const char **field = takes && call.command ? field_of(&call, flag) : NULL;
            if (field)
                *field = flag.value; /* the last of two counts */
        } else if (call.command) {
            call.id = call.id ? call.id : word;
        } else {
            call.command = word;
            bool deletes = strcmp(word, "delete") == 0;
            if (!deletes && !args_listed(STARTING, word, strlen(word)))
                return call;
            with_value = deletes ? none : COMMAND_VALUE;
            bare = deletes ? DELETE_BARE : COMMAND_BARE;
        }
    }
    return call;
}
