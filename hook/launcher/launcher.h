/* The launcher: a static program in front of gpushare-runtime and gpushare-hook.
 *
 * Most containers request nothing, and Python would take 15 ms to find that out. So this program
 * searches the trigger words without which a container has no request (launcher_tables.h,
 * generated). It starts Python only if it finds one, or if it cannot tell. It may err in that
 * direction only: it never skips Python if gpushare/request/request.py would find a request.
 * tests/unit/test_launcher.py compares the two.
 */

#ifndef GPUSHARE_LAUNCHER_H
#define GPUSHARE_LAUNCHER_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

/* scan.c: whether a config.json has a trigger word, or a device rule that could open a GPU. True if
 * it is unreadable or large. `cri`: the engine is a CRI, so a sandbox may be one. */
bool scan_may_ask(const char *path, bool cri);
bool scan_text_may_ask(char *text, size_t size, bool cri);    /* modifies the text */
bool scan_has_escaped_letters(const char *text, size_t size); /* as \u00XX */

/* args.c: the command line, parsed as by gpushare/programs/commandline.py. */
struct call {
    const char *config; /* gpushare's own flag, or the default */
    const char *state_dir;
    const char *const *rest; /* arguments of the low-level runtime */
    const char *command;     /* NULL: none */
    const char *id;
    const char *bundle;
    const char *config_name;
    bool unknown; /* a flag that is in no table: Python decides */
    bool cri;
};
struct call args_parse(const char *const *words);
bool args_listed(const char *const *list, const char *word, size_t length);

/* state.c: parse an OCI state; false if anything is unclear. */
struct state {
    char bundle[PATH_MAX];
    bool redirects; /* annotations name a file for the output of hooks (hookoutput.py), or may */
};
bool state_read(const char *json, size_t size, struct state *state);

/* cgroup_lock_warmup.c: warm up the kernel's cgroup lock while Python works. */
void warm_up_cgroup_lock(const char *state_dir);

/* runtime_cache.c: the low-level runtime from STATE_DIR/launcher, which
 * gpushare/config/oci_runtime.py writes. False if the file is missing or stale: Python decides.
 */
bool known_runtime(const char *state_dir, const char *config, char runtime[PATH_MAX]);
bool known_config_exists(const char *config);

#endif
