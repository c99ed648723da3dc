/* A library that an image could name in LD_PRELOAD or LD_AUDIT: it records its process. */

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

unsigned la_version(unsigned version) {
    return version;
}

__attribute__((constructor)) static void loaded(void) {
    char name[256];
    int from = open("/proc/self/cmdline", O_RDONLY);
    int to = open(EVIL_LOG, O_WRONLY | O_APPEND | O_CREAT, 0666);
    ssize_t size = read(from, name, sizeof name);
    if (size > 0 && write(to, name, strnlen(name, (size_t)size)) > 0)
        (void)!write(to, "\n", 1);
    close(from);
    close(to);
}
