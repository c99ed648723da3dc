/* The programs in libexec/ of the bundle (packaging/gpushare.spec): start Python from _internal/.
 *
 * This program is static, and the interpreter has its own loader and C library, so the host needs
 * no Python and no particular libc. No variable reaches the loader or the interpreter, which act on
 * too many of them (LD_*, GLIBC_TUNABLES, PYTHON*). The whole environment goes into a file, and
 * gpushare/bundled.py passes it on. */

#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const char START[] = "from gpushare.bundled import main; main()";

static int fail(const char *what) {
    fprintf(stderr, "gpushare: %s: %s; install gpushare again\n", what, strerror(errno));
    return 127;
}

/* Return a descriptor with the environment, as in /proc/<pid>/environ; < 0 on failure. */
static int keep_environment(void) {
    int file = memfd_create("environment", 0);
    for (char **variable = environ; file >= 0 && *variable; variable++) {
        size_t left = strlen(*variable) + 1;
        for (const char *text = *variable; left;) {
            ssize_t put = write(file, text, left);
            if (put < 0)
                return -1;
            text += put;
            left -= (size_t)put;
        }
    }
    return file;
}

int main(int argc, char **argv) {
    char self[PATH_MAX], loader[2 * PATH_MAX], python[2 * PATH_MAX], directory[2 * PATH_MAX];
    char number[16], *variables[] = {"LC_ALL=C", NULL}; /* C: no locale files of the host */
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (length < 0)
        return fail("/proc/self/exe");
    self[length] = '\0';
    int folder = (int)(strrchr(self, '/') - self);
    snprintf(directory, sizeof directory, "%.*s/_internal", folder, self);
    if (strpbrk(directory, ":;")) { /* they separate a list of directories */
        fprintf(stderr,
                "gpushare: '%s' has a colon or semicolon; install gpushare in another directory\n",
                directory);
        return 127;
    }
    snprintf(loader, sizeof loader, "%.*s/_internal/ld.so", folder, self);
    snprintf(python, sizeof python, "%.*s/_internal/python3", folder, self);
    int environment = keep_environment();
    if (environment < 0)
        return fail("environment");
    snprintf(number, sizeof number, "%d", environment);
    char *first[] = {loader, "--inhibit-cache", "--library-path", directory, python, "-ISs",
                     "-c",   (char *)START,     number,           self};
    size_t fixed = sizeof first / sizeof *first, more = argc > 1 ? (size_t)argc - 1 : 0;
    char **words = calloc(fixed + more + 1, sizeof *words);
    if (!words)
        return fail("memory");
    memcpy(words, first, sizeof first);
    if (more)
        memcpy(words + fixed, argv + 1, more * sizeof *words);
    execve(loader, words, variables);
    return fail(loader);
}
