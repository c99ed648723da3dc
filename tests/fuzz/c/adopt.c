/* hook/launcher/adopt.c: a ticket, for a container that is there: a process in a mount namespace
 * and a root of its own, with links that lead out of it. Whatever the ticket says, nothing appears
 * outside of that root; and what is not adopted has its root as it was.
 *
 * The input is the ticket's words, each on a line. "$dev" and such stand for numbers that only this
 * run knows. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "adopt.h"
#include "fuzz.h"
#include "launcher.h"
#include "launcher_tables.h"

#define TOP "/mnt"

static struct state container = {.bundle = "/bundle", .id = "c"};
static int first;

/* The container's init. */
static long start(void) {
    int ready[2];
    char byte;
    require(pipe(ready) == 0);
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (unshare(CLONE_NEWNS) != 0 || chroot(TOP "/root") != 0 || chdir("/") != 0 ||
            write(ready[1], "", 1) != 1)
            _exit(1);
        for (;;)
            pause();
    }
    require(read(ready[0], &byte, 1) == 1);
    close(ready[0]);
    close(ready[1]);
    return child;
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    folder_enter(TOP);
    require(mkdir(TOP "/root", 0755) == 0 && mkdir(TOP "/outside", 0755) == 0 &&
            mkdir(TOP "/state", 0755) == 0 && mkdir(TOP "/state/containers", 0755) == 0 &&
            mkdir(TOP "/state/containers/c", 0755) == 0 && mkdir(TOP "/folder", 0755) == 0);
    folder_put(AT_FDCWD, TOP "/file", "", 0);
    container.pid = start();
    first = dup(0);
    close(first);
    return 0;
}

static void fill(int root, int state) {
    folder_empty(root);
    folder_empty(state);
    close(folder_open(root, "etc"));
    close(folder_open(root, "usr"));
    close(folder_open(root, "usr/lib"));
    require(symlinkat("usr/lib", root, "lib") == 0 && symlinkat("/outside", root, "abs") == 0 &&
            symlinkat("../../.." TOP "/outside", root, "out") == 0);
    folder_put(root, "etc/ld.so.cache", "cache", 5);
    folder_put(root, "source", "", 0);
    folder_put(state, LEASE_FILE, "{}", 2);
    folder_put(state, TICKET_CACHE, "new", 3);
}

struct known {
    const char *word;
    unsigned long long number;
};

static size_t word_of(char *to, const uint8_t *line, size_t length, const struct known *known) {
    for (; known->word; known++)
        if (length == strlen(known->word) && memcmp(line, known->word, length) == 0)
            return (size_t)sprintf(to, "%llu", known->number) + 1;
    if (length == 2 && memcmp(line, "$v", 2) == 0)
        return (size_t)sprintf(to, "%s", TICKET_VERSION) + 1;
    memcpy(to, line, length);
    to[length] = '\0';
    return length + 1;
}

static size_t ticket(char *to, const uint8_t *data, size_t size) {
    struct stat cache, source, file, folder;
    size_t have = 0;
    require(stat(TOP "/file", &file) == 0 && stat(TOP "/folder", &folder) == 0);
    require(stat(TOP "/root/etc/ld.so.cache", &cache) == 0 &&
            stat(TOP "/root/source", &source) == 0);
    const struct known known[] = {{"$dev", source.st_dev},
                                  {"$ino", source.st_ino},
                                  {"$file", file.st_ino},
                                  {"$folder", folder.st_ino},
                                  {"$cache", cache.st_ino},
                                  {"$sec", (unsigned long long)cache.st_mtim.tv_sec},
                                  {"$nsec", (unsigned long long)cache.st_mtim.tv_nsec},
                                  {NULL, 0}};
    while (size) {
        const uint8_t *end = memchr(data, '\n', size);
        size_t length = end ? (size_t)(end - data) : size, step = length + (end != NULL);
        have += word_of(to + have, data, length, known);
        data += step;
        size -= step;
    }
    return have;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    int root = open(TOP "/root", O_RDONLY | O_DIRECTORY),
        state = open(TOP "/state/containers/c", O_RDONLY | O_DIRECTORY),
        outside = open(TOP "/outside", O_RDONLY | O_DIRECTORY);
    char *text = malloc(32 * size + 64);
    fill(root, state);
    folder_put(open(TOP "/state", O_RDONLY | O_DIRECTORY), "lock", "", 0);
    size_t length = ticket(text, data, size);
    folder_put(state, TICKET_FILE, text, length);
    unsigned before = folder_names(root);
    require(unshare(CLONE_FS) == 0); /* a thread of libFuzzer's may share it; setns needs our own */
    bool adopted = adopt(&container, TOP "/state");
    require(folder_names(outside) == 0);
    require(adopted || folder_names(root) == before);
    require(!adopted || faccessat(state, HELD_FILE, F_OK, 0) == 0);
    free(text);
    folder_close_all(first);
    return 0;
}
