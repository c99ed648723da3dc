/* The end of a container where it is simple: its lease goes, with its files. As leaseend.release
 * and storage.empty_trash, for a lease that `held` says this program handed over (adopt.c): of a
 * container that its init's end is the end of, whatever mounts or descriptors are left. What is not
 * exactly as a start leaves it, is in use, or cannot be removed, is for Python, which does all
 * of it again: each step leaves what the next look finds. */

#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "adopt.h"
#include "launcher.h"
#include "launcher_tables.h"

#define MAX_DEPTH 16
#define MAX_TEXT (16 << 10)

volatile sig_atomic_t time_is_up;

/* Everything that a lease's directory may hold for this; a name that is not here is Python's. */
static const char *const NAMES[] = {LEASE_FILE,  HELD_FILE,  TICKET_FILE, TICKET_CACHE,
                                    TICKET_PROC, SHARE_NAME, RW_NAME,     NULL};

struct lease {
    int directory;
    char path[PATH_MAX];
    long pid;
    unsigned long long start;  /* of init */
    const char *where, *facts; /* of the line that says so: decision.c */
    const char *next, *end;    /* of the ticket */
};

/* The line at `*at`, which moves behind it; NULL when there is none. */
static char *line(char **at) {
    char *begin = *at, *end = strchr(begin, '\n');
    if (!end)
        return NULL;
    *end = '\0';
    *at = end + 1;
    return begin;
}

/* The next word of the ticket, whose last byte is a NUL. */
static const char *word(struct lease *lease) {
    const char *begin = lease->next;
    if (begin >= lease->end)
        return NULL;
    lease->next += strlen(begin) + 1;
    return begin;
}

/* `held` is of the very start that wrote the ticket beside it; `bundle`, when given, too. */
static bool read_held(struct lease *lease, const char *bundle) {
    char text[MAX_TEXT], *ticket = malloc(MAX_TICKET), *at = text;
    ssize_t size = read_at(lease->directory, HELD_FILE, text, sizeof text);
    ssize_t ticket_size = ticket ? read_at(lease->directory, TICKET_FILE, ticket, MAX_TICKET) : -1;
    if (size <= 0 || ticket_size <= 0 || strlen(text) != (size_t)size)
        return false;
    const char *version = line(&at), *creator = version ? line(&at) : NULL,
               *init = creator ? line(&at) : NULL, *cgroup = init ? line(&at) : NULL;
    int end = 0;
    if (!cgroup || *at || strcmp(version, HELD_VERSION) != 0 || !isdigit((unsigned char)*init) ||
        sscanf(init, "%ld %llu%n", &lease->pid, &lease->start, &end) != 2 || init[end])
        return false;
    lease->next = ticket;
    lease->end = ticket + ticket_size;
    const char *words[6]; /* version, bundle, root, creator, where, facts */
    for (size_t i = 0; i < 6; i++)
        if (!(words[i] = word(lease)))
            return false;
    lease->where = words[4];
    lease->facts = words[5];
    return strcmp(words[0], TICKET_VERSION) == 0 && strcmp(words[3], creator) == 0 &&
           (!bundle || strcmp(words[1], bundle) == 0) &&
           faccessat(lease->directory, LEASE_FILE, F_OK, 0) == 0;
}

static bool has_only_known_names(int directory) {
    int fd = openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *list = fd >= 0 ? fdopendir(fd) : NULL;
    bool known = list;
    for (struct dirent *one; known && !time_is_up && (one = readdir(list));)
        known = strcmp(one->d_name, ".") == 0 || strcmp(one->d_name, "..") == 0 ||
                args_listed(NAMES, one->d_name, strlen(one->d_name));
    if (list)
        closedir(list);
    return known && !time_is_up;
}

static bool lives(const struct lease *lease) {
    char path[64];
    unsigned long long start;
    snprintf(path, sizeof path, "/proc/%ld", lease->pid);
    int process = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    bool alive = process >= 0 && start_time(process, &start) && start == lease->start;
    if (process >= 0)
        close(process);
    return alive;
}

/* A moment for the init that the runtime has just killed to be gone. */
static void wait_gone(const struct lease *lease) {
    int fd = (int)syscall(SYS_pidfd_open, lease->pid, 0);
    struct pollfd one = {.fd = fd, .events = POLLIN};
    if (fd >= 0 && lives(lease))
        poll(&one, 1, POSTSTOP_WAIT_MS);
    if (fd >= 0)
        close(fd);
}

/* As pages.free: the index no longer has the number, and the page goes, also its memory where
 * somebody has it open. */
static bool free_page(const char *state_dir, const char *uuid, const char *number) {
    static const int flags = O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    char path[PATH_MAX], *end;
    unsigned long page = strtoul(number, &end, 10);
    uint64_t used, generation;
    if (!isdigit((unsigned char)*number) || *end || page >= MAX_PEERS || strchr(uuid, '/') ||
        *uuid == '.' || !*uuid ||
        snprintf(path, sizeof path, "%s/" PAGES_FOLDER "/%s/" PAGES_INDEX, state_dir, uuid) >=
            (int)sizeof path)
        return false;
    int index = open(path, O_RDWR | flags);
    off_t at = PEERS_USED + 8 * (off_t)(page / 64);
    bool done = index >= 0 && pread(index, &used, 8, at) == 8 &&
                pread(index, &generation, 8, PEERS_GENERATION) == 8;
    if (done && used >> page % 64 & 1) {
        used &= ~(1ULL << page % 64);
        generation++;
        done = pwrite(index, &used, 8, at) == 8 &&
               pwrite(index, &generation, 8, PEERS_GENERATION) == 8;
    }
    if (index >= 0)
        close(index);
    sprintf(strrchr(path, '/') + 1, "%lu", page);
    int file = done ? open(path, O_WRONLY | flags) : -1;
    if (file < 0)
        return done && errno == ENOENT;
    done = ftruncate(file, 0) == 0;
    close(file);
    return done && unlink(path) == 0;
}

static bool free_pages(struct lease *lease, const char *state_dir) {
    for (const char *kind; (kind = word(lease)) && strcmp(kind, "then") != 0;) {
        bool is_page = strcmp(kind, "page") == 0;
        const char *first = word(lease), *second = first ? word(lease) : NULL;
        if (!is_page)
            return true; /* they come first */
        if (!second || !free_page(state_dir, first, second))
            return false;
    }
    return true;
}

/* Under the lock: the directory is still the one that was looked at. `path` becomes where it is. */
static bool discard(struct lease *lease, const char *state_dir) {
    char path[PATH_MAX];
    struct stat opened, there;
    struct timespec now;
    if (snprintf(path, sizeof path, "%s/lock", state_dir) >= (int)sizeof path)
        return false;
    int lock = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    clock_gettime(CLOCK_MONOTONIC, &now);
    bool done = lock >= 0 && flock(lock, LOCK_EX) == 0 && lstat(lease->path, &there) == 0 &&
                fstat(lease->directory, &opened) == 0 && there.st_ino == opened.st_ino &&
                there.st_dev == opened.st_dev && free_pages(lease, state_dir) &&
                snprintf(path, sizeof path, "%s/" TRASH_NAME "/%llx-%d", state_dir,
                         now.tv_sec * 1000000000ULL + (unsigned long long)now.tv_nsec,
                         getpid()) < (int)sizeof path &&
                rename(lease->path, path) == 0;
    if (lock >= 0)
        close(lock);
    if (done)
        strcpy(lease->path, path);
    return done;
}

/* Everything in a directory of ours, never leaving its file system. Another may be at it, too. */
static bool empty(int directory, dev_t device, int depth) {
    int fd = depth < MAX_DEPTH ? openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    DIR *list = fd >= 0 ? fdopendir(fd) : NULL;
    bool done = list;
    for (struct dirent *one; done && !time_is_up && (one = readdir(list));) {
        struct stat status;
        if (strcmp(one->d_name, ".") == 0 || strcmp(one->d_name, "..") == 0)
            continue;
        if (fstatat(fd, one->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0) {
            done = errno == ENOENT;
            continue;
        }
        done = status.st_dev == device;
        bool is_folder = done && S_ISDIR(status.st_mode);
        int below = is_folder
                        ? openat(fd, one->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
                        : -1;
        done = done && (!is_folder || (below >= 0 && empty(below, device, depth + 1))) &&
               (unlinkat(fd, one->d_name, is_folder ? AT_REMOVEDIR : 0) == 0 || errno == ENOENT);
        if (below >= 0)
            close(below);
    }
    if (list)
        closedir(list);
    return done && !time_is_up;
}

static bool remove_files(const struct lease *lease) {
    char path[PATH_MAX];
    struct stat status;
    if (snprintf(path, sizeof path, "%s/" RW_NAME, lease->path) >= (int)sizeof path)
        return false;
    while (!time_is_up && umount2(path, MNT_DETACH | UMOUNT_NOFOLLOW) == 0)
        ; /* somebody may have mounted something over it */
    return (errno == EINVAL || errno == ENOENT) && fstat(lease->directory, &status) == 0 &&
           empty(lease->directory, status.st_dev, 0) &&
           (rmdir(lease->path) == 0 || errno == ENOENT);
}

/* Whether somebody was killed before he had removed what he had put there; a name ends in his pid.
 */
static bool has_leftovers(const char *state_dir) {
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/" TRASH_NAME, state_dir) >= (int)sizeof path)
        return true;
    DIR *list = opendir(path);
    bool left = !list && errno != ENOENT;
    for (struct dirent *one; list && !left && !time_is_up && (one = readdir(list));) {
        const char *pid = strrchr(one->d_name, '-');
        left = strcmp(one->d_name, ".") != 0 && strcmp(one->d_name, "..") != 0 &&
               (!pid || atoi(pid + 1) <= 0 || kill(atoi(pid + 1), 0) != 0);
    }
    if (list)
        closedir(list);
    return left || time_is_up;
}

enum release release(const char *state_dir, const char *id, const char *bundle) {
    struct lease lease;
    if (snprintf(lease.path, sizeof lease.path, "%s/containers/%s", state_dir, id) >=
        (int)sizeof lease.path)
        return RELEASE_UNCLEAR;
    lease.directory = open(lease.path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (lease.directory < 0)
        return errno == ENOENT && !has_leftovers(state_dir) ? RELEASE_DONE : RELEASE_UNCLEAR;
    if (!read_held(&lease, bundle) || !has_only_known_names(lease.directory))
        return RELEASE_UNCLEAR;
    if (bundle)
        wait_gone(&lease);
    if (lives(&lease)) /* of this pid namespace its processes end with it: is_first in adopt.c */
        return RELEASE_IN_USE;
    if (!discard(&lease, state_dir))
        return RELEASE_UNCLEAR;
    decision_released(lease.where, lease.facts, bundle ? "poststop" : "delete");
    return remove_files(&lease) && !has_leftovers(state_dir) ? RELEASE_DONE : RELEASE_UNCLEAR;
}
