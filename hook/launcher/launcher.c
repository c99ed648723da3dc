/* gpushare-runtime and gpushare-hook, as engines call them: see launcher.h. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "launcher.h"
#include "launcher_tables.h"

#ifndef PYTHON_PROGRAM /* its directory relative to this program, and its name */
#define PYTHON_PROGRAM "%s/../libexec/%s"
#define SNAPSHOT "%s/../libexec/snapshot"
#endif

static int fail(const char *what) {
    fprintf(stderr, "gpushare: %s: %s; install gpushare again\n", what, strerror(errno));
    return 127;
}

/* An engine may pass an image's variables to a hook (CVE-2025-23266), and loader and interpreter
 * act on too many of them. The variables kept here locate the state of a rootless user, and
 * rootless.py checks them. */
static char **environment_of_hook(void) {
    static const char kept[] = "XDG_RUNTIME_DIR=";
    static char *variables[] = {"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                                NULL, NULL};
    for (char **variable = environ; *variable && !variables[1]; variable++)
        if (strncmp(*variable, kept, sizeof kept - 1) == 0)
            variables[1] = *variable;
    return variables;
}

/* Execute the Python program of the same name, from the snapshot if there is one. The snapshot
 * executes argv[0] itself if it has to. */
static int python(const char *name, char **argv) {
    char self[PATH_MAX], snapshot[2 * PATH_MAX];
    static char path[2 * PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (length < 0)
        return fail("/proc/self/exe");
    self[length] = '\0';
    *strrchr(self, '/') = '\0';
    char **variables = strcmp(name, "gpushare-hook") == 0 ? environment_of_hook() : environ;
    snprintf(path, sizeof path, PYTHON_PROGRAM, self, name);
    snprintf(snapshot, sizeof snapshot, SNAPSHOT, self);
    argv[0] = path;
    execve(snapshot, argv, variables);
    execve(path, argv, variables);
    return fail(path);
}

static bool is_known_container(const struct call *call) {
    char path[PATH_MAX];
    if (!call->id || strchr(call->id, '/') || strcmp(call->id, ".") == 0 ||
        strcmp(call->id, "..") == 0)
        return true;
    if (snprintf(path, sizeof path, "%s/containers/%s", call->state_dir, call->id) >=
        (int)sizeof path)
        return true;
    return access(path, F_OK) == 0 || errno != ENOENT;
}

static bool may_ask(const struct call *call) {
    char path[PATH_MAX];
    const char *bundle = call->bundle && *call->bundle ? call->bundle : ".";
    const char *name = call->config_name && *call->config_name ? call->config_name : "config.json";
    bool usual =
        strcmp(name, "config.json") == 0; /* crun: a file of another name is not in the bundle */
    int length = snprintf(path, sizeof path, "%s%s%s", usual ? bundle : "", usual ? "/" : "", name);
    return length >= (int)sizeof path || scan_may_ask(path, call->cri);
}

/* Whether this is gpushare-runtime-cri, the name in the configuration of containerd and CRI-O. */
static bool is_called_cri(const char *name) {
    const char *slash = strrchr(name, '/');
    return strcmp(slash ? slash + 1 : name, CRI_NAME) == 0;
}

/* Python does not see the name, so pass the flag. */
static char **with_flag(char **argv, int count) {
    char **words = calloc((size_t)count + 2, sizeof *words);
    if (words) {
        words[0] = argv[0];
        words[1] = (char *)"--" OWN_CRI;
        memcpy(words + 2, argv + 1, (size_t)count * sizeof *words);
    }
    return words;
}

static int runtime(char **argv, int count) {
    char low[PATH_MAX];
    if (is_called_cri(argv[0]) && !(argv = with_flag(argv, count)))
        return fail("memory");
    struct call call = args_parse((const char *const *)argv + 1);
    const char *command = call.command ? call.command : "";
    bool ours = call.unknown || call.config[0] != '/' || call.state_dir[0] != '/';
    bool starts = args_listed(STARTING, command, strlen(command));
    if (!ours && starts)
        ours = may_ask(&call);
    else if (!ours && strcmp(command, "delete") == 0)
        ours = is_known_container(&call);
    bool known = call.config[0] == '/' && call.state_dir[0] == '/' && !call.unknown &&
                 known_runtime(call.state_dir, call.config, low);
    char **words = (char **)call.rest - 1; /* at least argv[0] is before it */
    if (known && !ours) {
        char *before = words[0];
        words[0] = low;
        execv(low, words);
        words[0] = before; /* it is gone: Python, which finds another one, needs the whole line */
    }
    if (starts && !call.unknown)
        warm_up_cgroup_lock(call.state_dir);
    return python("gpushare-runtime", argv);
}

/* Read all of standard input and put it back, for Python. */
static char *read_state(size_t *size) {
    static char text[MAX_STATE_BYTES + 1];
    size_t have = 0;
    int file = memfd_create("state", 0);
    ssize_t got = 1;
    if (file < 0)
        return NULL;
    while (got > 0 && have <= MAX_STATE_BYTES) {
        got = read(0, text + have, MAX_STATE_BYTES + 1 - have);
        if (got < 0 && errno == EINTR)
            got = 1;
        else if (got > 0)
            have += (size_t)got;
    }
    for (size_t done = 0; done < have;) {
        ssize_t put = write(file, text + done, have - done);
        if (put < 0)
            return NULL;
        done += (size_t)put;
    }
    if (lseek(file, 0, SEEK_SET) != 0)
        return NULL;
    if (file != 0) { /* standard input was open */
        if (dup2(file, 0) != 0)
            return NULL;
        close(file);
    }
    *size = have;
    return got == 0 ? text : NULL;
}

/* crun sends this output to a file that an image chose: neither this program nor Python may write.
 */
static void be_silent(void) {
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null < 0 || dup2(null, 1) < 0 || dup2(null, 2) < 0)
        _exit(1);
}

/* crun runs hooks with the resource limits of the container. Its file size must not keep a start
 * out of the log of decisions and the usage journal, which are longer. */
static void lift_file_size(void) {
    struct rlimit most = {RLIM_INFINITY, RLIM_INFINITY};
    if (setrlimit(RLIMIT_FSIZE, &most) == 0 || getrlimit(RLIMIT_FSIZE, &most) != 0)
        return;
    most.rlim_cur = most.rlim_max; /* without CAP_SYS_RESOURCE */
    setrlimit(RLIMIT_FSIZE, &most);
}

static int hook(char **argv, int count) {
    static const char *const stages[] = {"prestart", "createRuntime", "poststop", "adopt", NULL};
    const char *config = DEFAULT_CONFIG, *state_dir = DEFAULT_STATE, *nri;
    static struct state state;
    char path[PATH_MAX + 16], low[PATH_MAX];
    char **word = argv + 1;
    bool cri = false;
    const char *stage = argv[count - 1];
    lift_file_size();
    size_t size = 0; /* gcc 14 and newer warn without a value */
    /* For every way to write the options: the snapshot may become the ordinary program, which reads
     * the state again. Not for `--help`, which has none. */
    bool reads = count > 1 && args_listed(stages, stage, strlen(stage));
    const char *text = reads ? read_state(&size) : NULL;
    bool clear = text && state_read(text, size, &state);
    if (state.redirects)
        be_silent();
    for (; *word && **word == '-'; word += 2) {
        if (strcmp(*word, CRI_FLAG) == 0) {
            cri = true;
            word--; /* it has no value */
            continue;
        }
        const char **field = strcmp(*word, "--config") == 0  ? &config
                             : strcmp(*word, "--state") == 0 ? &state_dir
                             : strcmp(*word, "--nri") == 0   ? &nri /* only Python needs it */
                                                             : NULL;
        if (!field || !word[1] ||
            *word[1] != '/') /* also `--config=FILE`: rare, and Python knows it */
            return python("gpushare-hook", argv);
        *field = word[1];
    }
    if (*word != stage)
        clear = false;
    bool adopts = strcmp(stage, "adopt") == 0;
    if (!clear)
        return python("gpushare-hook", argv);
    snprintf(path, sizeof path, "%s/config.json", state.bundle);
    if (!adopts && !scan_may_ask(path, cri) &&
        (!known_config_exists(config) || known_runtime(state_dir, config, low)))
        return 0;
    return python("gpushare-hook", argv);
}

int main(int argc, char **argv) {
    if (argc < 1)
        return 127;
    return IS_HOOK ? hook(argv, argc) : runtime(argv, argc);
}
