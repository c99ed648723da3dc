/* LD_PRELOAD for a runtime on a kernel without the dmem controller: its files in a cgroup below
 * /sys/fs/cgroup are plain files of the same path below $DMEM_TREE, if they exist. All other files
 * are unchanged. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CGROUPS "/sys/fs/cgroup"

typedef int (*open_fn)(int, const char *, int, ...);

static int open_there(const char *name, int dirfd, const char *path, int flags, mode_t mode) {
    open_fn real = (open_fn)dlsym(RTLD_NEXT, name);
    const char *tree = getenv("DMEM_TREE");
    if (!tree || (strcmp(path, "dmem.max") != 0 && strcmp(path, "dmem.min") != 0))
        return real(dirfd, path, flags, mode);
    char link[64], directory[4096] = "", to[8192];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", dirfd);
    if (readlink(link, directory, sizeof(directory) - 1) < (ssize_t)strlen(CGROUPS))
        return real(dirfd, path, flags, mode);
    snprintf(to, sizeof(to), "%s%s/%s", tree, directory + strlen(CGROUPS), path);
    return real(AT_FDCWD, to, flags & ~O_CREAT, mode);
}

#define MIRRORED(name) \
    int name(int dirfd, const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        return open_there(#name, dirfd, path, flags, mode); \
    }
MIRRORED(openat)
MIRRORED(openat64)
