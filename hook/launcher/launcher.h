/* The launcher: a static program in front of gpushare-runtime and gpushare-hook.
 *
 * Most containers ask for nothing, and starting Python costs them 15 ms for that answer. So this
 * program looks for the few words without which a container cannot ask (launcher_tables.h,
 * generated), and starts Python only when one is there, or when it cannot tell. It may be wrong in
 * that direction only: it never decides that a container asks for nothing when
 * gpushare/request/request.py would find something. tests/unit/test_launcher.py compares the two.
 */

#ifndef GPUSHARE_LAUNCHER_H
#define GPUSHARE_LAUNCHER_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

/* scan.c: does a config.json hold one of the words, or a device rule that could open a GPU?
 * Unreadable or large: yes. `cri`: the engine is one, so a sandbox may be one. */
bool scan_may_ask(const char *path, bool cri);
bool scan_text_may_ask(char *text, size_t size, bool cri); /* changes the text */
bool scan_has_hidden_letters(const char *text, size_t size);

/* args.c: the command line, as gpushare/programs/commandline.py reads it. */
struct call {
    const char *config; /* ours, or the default */
    const char *state_dir;
    const char *const *rest; /* what the low-level runtime is given */
    const char *command;     /* NULL: none */
    const char *id;
    const char *bundle;
    const char *config_name;
    bool unknown; /* a flag that is in no table: Python decides */
    bool cri;
};
struct call args_parse(const char *const *words);
bool args_listed(const char *const *list, const char *word, size_t length);

/* state.c: what an OCI state says; false when that is not perfectly clear. `id` is empty unless it
 * is one that may name a directory. */
struct state {
    char bundle[PATH_MAX];
    char id[256];
    bool redirects; /* annotations name a file for what hooks print (hookoutput.py), or may */
};
bool state_read(const char *json, size_t size, struct state *state);
bool state_is_id(const char *id);

/* waiting.c: the exit code of the hook that waits for this container, -1 when none does. */
int waiting_hook(const char *state_dir, const char *id, const char *text, size_t size);

/* cgroup_lock_warmup.c: the kernel gets ready for the low-level runtime while Python works. */
void warm_up_cgroup_lock(const char *state_dir);

/* runtime_cache.c: the low-level runtime from STATE_DIR/launcher, which
 * gpushare/config/oci_runtime.py writes. False when the file is missing or stale: Python decides.
 */
bool known_runtime(const char *state_dir, const char *config, char runtime[PATH_MAX]);
bool known_config_exists(const char *config);

#endif
