/* Read STATE_DIR/launcher: the low-level runtime that gpushare/config/oci_runtime.py found. It is
 * valid only while the configuration file is unchanged, and only if no other user could write it.
 */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "launcher.h"
#include "launcher_tables.h"

#define MAX_FILE (16 << 10)

bool known_config_exists(const char *config) {
    struct stat status;
    return stat(config, &status) == 0;
}

/* The same as oci_runtime.identity. */
static void identity(const char *config, char *text, size_t size) {
    struct stat status;
    if (stat(config, &status) != 0)
        snprintf(text, size, "none");
    else
        snprintf(text, size, "%lld-%lld-%llu",
                 (long long)status.st_mtim.tv_sec * 1000000000LL + status.st_mtim.tv_nsec,
                 (long long)status.st_size, (unsigned long long)status.st_ino);
}

static bool read_file(const char *path, char text[MAX_FILE]) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    struct stat status;
    ssize_t got = -1;
    if (fd < 0)
        return false;
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
        (status.st_uid == 0 || status.st_uid == geteuid()) &&
        !(status.st_mode & (S_IWGRP | S_IWOTH)))
        got = read(fd, text, MAX_FILE - 1);
    close(fd);
    if (got < 0 || memchr(text, '\0', (size_t)got))
        return false;
    text[got] = '\0';
    return true;
}

/* Return the rest of the line that begins with `key` and a space, and end the text there; NULL:
 * none. */
static const char *value_of(char *text, const char *key, char **after) {
    size_t length = strlen(key);
    char *end = strchr(text, '\n');
    if (!end || strncmp(text, key, length) != 0 || text[length] != ' ')
        return NULL;
    *end = '\0';
    *after = end + 1;
    return text + length + 1;
}

bool known_runtime(const char *state_dir, const char *config, char runtime[PATH_MAX]) {
    static char text[MAX_FILE];
    char path[PATH_MAX], now[96], *at = text;
    if (snprintf(path, sizeof path, "%s/%s", state_dir, LAUNCHER_FILE) >= (int)sizeof path ||
        !read_file(path, text))
        return false;
    const char *version = value_of(at, "version", &at),
               *of = version ? value_of(at, "config", &at) : NULL;
    const char *then = of ? value_of(at, "identity", &at) : NULL,
               *found = then ? value_of(at, "runtime", &at) : NULL;
    identity(config, now, sizeof now);
    if (!found || strcmp(version, LAUNCHER_VERSION) != 0 || strcmp(of, config) != 0 ||
        strcmp(then, now) != 0 || strlen(found) >= PATH_MAX)
        return false;
    strcpy(runtime, found);
    return true;
}
