/* The shim's files in memory: open() of a path that file_make() made returns a memory file. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fuzz.h"

#define MOST 16

static struct file {
    const char *path;
    int fd;
} files[MOST];

static struct file *find(const char *path) {
    for (struct file *file = files; file < files + MOST && file->path; file++)
        if (strcmp(file->path, path) == 0)
            return file;
    return NULL;
}

void *file_make(const char *path, size_t size) {
    struct file *file = files;
    while (file->path)
        require(++file < files + MOST);
    *file = (struct file){path, memfd_create("file", MFD_CLOEXEC)};
    require(file->fd >= 0 && ftruncate(file->fd, (off_t)size) == 0);
    void *bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file->fd, 0);
    require(bytes != MAP_FAILED);
    return bytes;
}

void file_resize(const char *path, size_t size) {
    require(ftruncate(find(path)->fd, (off_t)size) == 0);
}

void file_write(const char *path, size_t at, const void *bytes, size_t size) {
    int fd = find(path)->fd;
    struct stat status;
    require(fstat(fd, &status) == 0);
    if (at + size <= (size_t)status.st_size)
        require(pwrite(fd, bytes, size, (off_t)at) == (ssize_t)size);
}

int __real_open(const char *path, int flags, mode_t mode);
int __wrap_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...) {
    const struct file *file = find(path);
    va_list more;
    if (file)
        return dup(file->fd);
    va_start(more, flags);
    mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;
    va_end(more);
    return __real_open(path, flags, mode);
}

/* Waits for other processes return at once. */
int __wrap_nanosleep(const void *time, void *left);
int __wrap_nanosleep(const void *time, void *left) {
    (void)time;
    (void)left;
    return 0;
}
