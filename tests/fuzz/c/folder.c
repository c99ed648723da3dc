/* Real files for a target, in a mount namespace of its own: nothing is left when it ends. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "fuzz.h"

/* What uses this is a program that ends, and frees little before it does. */
int __lsan_is_turned_off(void);
int __lsan_is_turned_off(void) {
    return 1;
}

/* A ticket says where the line about a release goes; here that is one file, and no other of this
 * machine. */
void __real_decision_released(const char *where, const char *facts, const char *by);
void __wrap_decision_released(const char *where, const char *facts, const char *by);
void __wrap_decision_released(const char *where, const char *facts, const char *by) {
    if (strcmp(where, FOLDER_LOG) == 0)
        __real_decision_released(where, facts, by);
}

void folder_enter(const char *path) {
    if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("fuzz", path, "tmpfs", 0, "mode=755,size=64m") != 0) {
        perror("this target needs root, for a mount namespace of its own");
        exit(2);
    }
}

static DIR *list_of(int directory, const char *name) {
    int fd = openat(directory, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *list = fd < 0 ? NULL : fdopendir(fd);
    require(list);
    return list;
}

static bool is_name(const struct dirent *one) {
    return strcmp(one->d_name, ".") != 0 && strcmp(one->d_name, "..") != 0;
}

void folder_empty(int directory) {
    DIR *list = list_of(directory, ".");
    for (struct dirent *one; (one = readdir(list));) {
        if (!is_name(one) || unlinkat(dirfd(list), one->d_name, 0) == 0)
            continue;
        int below = openat(dirfd(list), one->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
        require(below >= 0);
        folder_empty(below);
        close(below);
        require(unlinkat(dirfd(list), one->d_name, AT_REMOVEDIR) == 0);
    }
    closedir(list);
}

unsigned folder_names(int directory) {
    DIR *list = list_of(directory, ".");
    unsigned names = 0;
    for (struct dirent *one; (one = readdir(list));) {
        if (!is_name(one))
            continue;
        names++;
        int below = openat(dirfd(list), one->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
        if (below >= 0) {
            names += folder_names(below);
            close(below);
        }
    }
    closedir(list);
    return names;
}

int folder_open(int directory, const char *path) {
    if (mkdirat(directory, path, 0755) != 0)
        require(errno == EEXIST);
    int fd = openat(directory, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    require(fd >= 0);
    return fd;
}

void folder_put(int directory, const char *path, const void *bytes, size_t size) {
    int fd = openat(directory, path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    require(fd >= 0 && write(fd, bytes, size) == (ssize_t)size);
    close(fd);
}

void folder_close_all(int first) {
    require(syscall(SYS_close_range, (unsigned)first, ~0u, 0) == 0);
}
