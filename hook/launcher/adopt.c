/* `gpushare-hook adopt` where it is simple: the lease becomes the container's own, and most mounts,
 * links and the loader's cache are put into its root, and a mask over its /proc.
 * STATE_DIR/containers/<id>/adopt says what is to be done (gpushare/ticket.py writes it); adopt.py
 * does the same and more, and does it whenever anything here is not exactly as it was when the
 * ticket was written. So every `false` here means: Python, with nothing half done that it would not
 * find and accept.
 *
 * Everything in the container's root is reached through a descriptor of its init's /proc directory,
 * so it is this very process's view whoever has its number later, and never leaves that root. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "adopt.h"
#include "launcher.h"
#include "launcher_tables.h"

ssize_t read_at(int directory, const char *name, char *text, size_t size) {
    int fd = openat(directory, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return -1;
    size_t have = 0;
    ssize_t got = 1;
    while (got > 0 && have < size - 1) {
        got = read(fd, text + have, size - 1 - have);
        have += got > 0 ? (size_t)got : 0;
    }
    close(fd);
    text[have] = '\0';
    return got == 0 ? (ssize_t)have : -1; /* not 0: an error, or more than there is room for */
}

char *ticket_word(struct adoption *a) {
    char *begin = a->at;
    if (!begin || begin >= a->end)
        return NULL;
    a->at = memchr(begin, '\0', (size_t)(a->end - begin));
    if (!a->at)
        return NULL;
    a->at++;
    return begin;
}

bool ticket_number(struct adoption *a, unsigned long long *value) {
    const char *text = ticket_word(a);
    char *end;
    if (!text || *text < '0' || *text > '9')
        return false;
    errno = 0;
    *value = strtoull(text, &end, 10);
    return *end == '\0' && errno == 0;
}

static bool is_word(struct adoption *a, const char *expected) {
    const char *text = ticket_word(a);
    return text && strcmp(text, expected) == 0;
}

/* Start time of the process, which must be one that runs: fields 3, 20 and 22 of its stat line. */
bool start_time(int process, unsigned long long *start) {
    char text[4096], state;
    long threads;
    ssize_t size = read_at(process, "stat", text, sizeof text);
    char *tail = size > 0 ? strrchr(text, ')') : NULL;
    return tail &&
           sscanf(
               tail + 1,
               " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %ld %*d %llu",
               &state, &threads, start) == 3 &&
           (!strchr("ZXx", state) || threads > 1);
}

/* Files that we make belong to uid 0 of the container; where that is another one here, Python. */
static bool is_own_root(int process) {
    static const char *const maps[] = {"uid_map", "gid_map"};
    for (size_t i = 0; i < 2; i++) {
        char text[4096];
        unsigned inside, outside;
        if (read_at(process, maps[i], text, sizeof text) <= 0 ||
            sscanf(text, "%u %u", &inside, &outside) != 2 || inside != 0 || outside != 0)
            return false;
    }
    return true;
}

/* Whether init is the first process of a pid namespace below ours, whose end the kernel makes the
 * end of all in there: as procs.is_first. Others' leases are Python's, at the end too. */
static bool is_first(int process) {
    char text[16 << 10];
    char *line =
        read_at(process, "status", text, sizeof text) > 0 ? strstr(text, "\nNSpid:") : NULL;
    unsigned numbers = 0, number = 0;
    int used = 0;
    for (line = line ? line + strlen("\nNSpid:") : "";
         sscanf(line, "%*[ \t]%u%n", &number, &used) == 1; line += used)
        numbers++;
    return numbers > 1 && number == 1;
}

static bool open_container(struct adoption *a, const char *rootfs, long pid) {
    char path[64];
    struct stat theirs, ours;
    snprintf(path, sizeof path, "/proc/%ld", pid);
    a->init = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (a->init < 0 || !start_time(a->init, &a->init_start) || !is_own_root(a->init) ||
        !is_first(a->init))
        return false;
    if (fstatat(a->init, "ns/mnt", &theirs, 0) != 0 || stat("/proc/self/ns/mnt", &ours) != 0 ||
        (theirs.st_dev == ours.st_dev && theirs.st_ino == ours.st_ino))
        return false;
    int top = openat(a->init, "root", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (top < 0)
        return false;
    a->root = in_root(top, rootfs, O_DIRECTORY);
    close(top);
    return a->root >= 0 && mount_of(a->root, &a->mount);
}

/* Whether the runtime really mounted what config.json says. */
static bool check_mount(struct adoption *a) {
    unsigned long long device, inode;
    struct stat status;
    const char *target;
    if (!ticket_number(a, &device) || !ticket_number(a, &inode) || !(target = ticket_word(a)))
        return false;
    int fd = in_root(a->root, target, O_NOFOLLOW);
    bool same =
        fd >= 0 && fstat(fd, &status) == 0 && status.st_dev == device && status.st_ino == inode;
    if (fd >= 0)
        close(fd);
    return same;
}

static bool copy(int from, int to) {
    static char block[64 << 10];
    ssize_t got;
    while ((got = read(from, block, sizeof block)) > 0)
        if (write(to, block, (size_t)got) != got)
            return false;
    return got == 0;
}

static bool write_cache(int parent, int new, const struct stat *old) {
    struct timespec times[] = {old->st_atim, old->st_mtim};
    if (unlinkat(parent, CACHE_TEMPORARY, 0) != 0 && errno != ENOENT)
        return false; /* of a run that was killed */
    int fd =
        openat(parent, CACHE_TEMPORARY, O_CREAT | O_EXCL | O_NOFOLLOW | O_WRONLY | O_CLOEXEC, 0600);
    if (fd < 0)
        return false;
    bool done = copy(new, fd) && fchown(fd, old->st_uid, old->st_gid) == 0 &&
                fchmod(fd, old->st_mode & 07777) == 0 && futimens(fd, times) == 0 &&
                renameat(parent, CACHE_TEMPORARY, parent, CACHE_NAME) == 0;
    close(fd);
    if (!done)
        unlinkat(parent, CACHE_TEMPORARY, 0);
    return done;
}

/* The loader's cache, if it is still the one from which the new one was made. */
static bool put_cache(struct adoption *a) {
    char path[] = CACHE_PATH;
    unsigned long long inode, size, seconds, nanoseconds;
    struct stat old;
    const char *name;
    if (!ticket_number(a, &inode) || !ticket_number(a, &size) || !ticket_number(a, &seconds) ||
        !ticket_number(a, &nanoseconds))
        return false;
    int parent = place_parent(a, path, &name);
    if (parent < 0)
        return false;
    int fd = openat(parent, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    unsigned long long mount;
    bool same = fd >= 0 && fstat(fd, &old) == 0 && S_ISREG(old.st_mode) && old.st_ino == inode &&
                (unsigned long long)old.st_size == size &&
                (unsigned long long)old.st_mtim.tv_sec == seconds &&
                (unsigned long long)old.st_mtim.tv_nsec == nanoseconds && mount_of(fd, &mount) &&
                mount == a->mount;
    int new = openat(a->container, TICKET_CACHE, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    bool done = same && new >= 0 && write_cache(parent, new, &old);
    if (done)
        unlinkat(a->container, TICKET_CACHE, 0); /* the state directory is one for all containers */
    if (fd >= 0)
        close(fd);
    if (new >= 0)
        close(new);
    close(parent);
    return done;
}

/* The path of the devices controller (v1), or of the unified hierarchy; as procs.cgroup_of. */
static const char *cgroup_path(char *text) {
    const char *unified = "", *devices = NULL;
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        char *controllers = strchr(line, ':');
        char *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path)
            continue;
        *controllers++ = *path++ = '\0';
        if (!*controllers && strcmp(line, "0") == 0)
            unified = path;
        for (char *one = controllers, *next; one; one = next) {
            if ((next = strchr(one, ',')))
                *next++ = '\0';
            if (strcmp(one, "devices") == 0)
                devices = path;
        }
    }
    return devices ? devices : unified;
}

/* Whether the container has a cgroup that this process is not in, nor below: as cgroup.own_cgroups.
 * Where it has none (podman --cgroups=disabled), Python refuses. */
static bool is_own_cgroup(const char *theirs) {
    char text[16 << 10];
    if (read_at(AT_FDCWD, "/proc/self/cgroup", text, sizeof text) < 0)
        return false;
    const char *ours = cgroup_path(text);
    size_t length = strcmp(theirs, "/") == 0 ? 0 : strlen(theirs);
    return strncmp(ours, theirs, length) != 0 || (ours[length] != '\0' && ours[length] != '/');
}

/* Under the lock: the reservation is still there, and init still lives. As leases.hold. */
static bool hold_locked(struct adoption *a, long pid, const char *creator, const char *cgroup) {
    char path[PATH_MAX], text[2 * PATH_MAX];
    struct stat opened, there;
    unsigned long long now;
    if (snprintf(path, sizeof path, "%s/containers/%s", a->state_dir, a->id) >= (int)sizeof path ||
        lstat(path, &there) != 0 || fstat(a->container, &opened) != 0 ||
        there.st_ino != opened.st_ino || there.st_dev != opened.st_dev)
        return false; /* it was released meanwhile, and perhaps given anew */
    if (faccessat(a->container, LEASE_FILE, F_OK, 0) != 0 ||
        faccessat(a->container, HELD_FILE, F_OK, 0) == 0 || !start_time(a->init, &now) ||
        now != a->init_start)
        return false;
    int size = snprintf(text, sizeof text, "%s\n%s\n%ld %llu\n%s\n", HELD_VERSION, creator, pid,
                        a->init_start, cgroup);
    int fd = openat(a->container, HELD_FILE ".new",
                    O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0 || size >= (int)sizeof text)
        return false;
    bool written = write(fd, text, (size_t)size) == size;
    close(fd);
    return written && renameat(a->container, HELD_FILE ".new", a->container, HELD_FILE) == 0;
}

static bool hold(struct adoption *a, long pid, const char *creator) {
    char path[PATH_MAX], cgroups[16 << 10];
    if (read_at(a->init, "cgroup", cgroups, sizeof cgroups) < 0 ||
        snprintf(path, sizeof path, "%s/lock", a->state_dir) >= (int)sizeof path)
        return false;
    const char *cgroup = cgroup_path(cgroups);
    if (!is_own_cgroup(cgroup))
        return false;
    int lock = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    bool held = lock >= 0 && flock(lock, LOCK_EX) == 0 && hold_locked(a, pid, creator, cgroup);
    if (lock >= 0)
        close(lock);
    return held;
}

static bool put_in(struct adoption *a) {
    for (const char *kind = ticket_word(a); kind; kind = ticket_word(a)) {
        if (strcmp(kind, "end") == 0)
            return true;
        bool done = strcmp(kind, "bind") == 0   ? place_bind(a)
                    : strcmp(kind, "link") == 0 ? place_link(a)
                                                : strcmp(kind, "cache") == 0 && put_cache(a);
        if (!done)
            return false;
    }
    return false;
}

static void forget_refusal(const struct adoption *a) {
    static const char *const endings[] = {"", TRACE_SUFFIX};
    for (size_t i = 0; i < 2; i++) {
        char path[PATH_MAX];
        if (snprintf(path, sizeof path, "%s/errors/%s%s", a->state_dir, a->id, endings[i]) <
            (int)sizeof path)
            unlink(path);
    }
}

bool adopt(const struct state *state, const char *state_dir) {
    static struct adoption a;
    static char ticket[MAX_TICKET];
    char path[PATH_MAX];
    in_root_begin();
    a = (struct adoption){.container = -1, .id = state->id, .state_dir = state_dir};
    if (state->pid <= 0 ||
        snprintf(path, sizeof path, "%s/containers/%s", state_dir, state->id) >= (int)sizeof path)
        return false;
    a.container = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    ssize_t size = a.container < 0 ? -1 : read_at(a.container, TICKET_FILE, ticket, sizeof ticket);
    if (size <= 0)
        return false;
    a.at = ticket;
    a.end = ticket + size;
    const char *rootfs, *creator;
    if (!is_word(&a, TICKET_VERSION) || !is_word(&a, state->bundle) ||
        !(rootfs = ticket_word(&a)) || !(creator = ticket_word(&a)) || !ticket_word(&a) ||
        !ticket_word(&a) /* of the line at the end: release.c */
        || !open_container(&a, rootfs, state->pid))
        return false;
    const char *kind;
    while ((kind = ticket_word(&a)) && strcmp(kind, "then") != 0) {
        bool right = strcmp(kind, "mount") == 0  ? check_mount(&a)
                     : strcmp(kind, "page") == 0 ? ticket_word(&a) && ticket_word(&a)
                                                 : strcmp(kind, "mask") == 0 && attach_mask(&a);
        if (!right)
            return false;
    }
    if (!kind || !hold(&a, state->pid, creator))
        return false;
    umask(022);
    if (!put_in(&a) || !attach_all(&a.attachments, a.init)) {
        place_undo(&a);
        return false;
    }
    forget_refusal(&a);
    return true;
}
