/* What is put into a container's root: links, mount points, and the directories for them.
 * Everything is reached through a descriptor of that root, never leaves it, and is made on file
 * systems of the container alone: what is made in a volume appears on the host. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#include "adopt.h"
#include "launcher_tables.h"

/* As inroot.spend: an image's links must not take the host's processor. Python says so then. */
#define BUDGET_NS 250000000LL
#define CHECKED 8 /* look-ups between two questions for the time */

static long long until; /* 0: no bound */

static long long worked_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

void in_root_begin(void) {
    until = worked_ns() + BUDGET_NS;
}

static bool is_spent(void) {
    static unsigned looked;
    return until && ++looked % CHECKED == 0 && worked_ns() > until;
}

int in_root(int root, const char *path, int flags) {
    if (is_spent()) {
        errno = ELOOP;
        return -1;
    }
    struct open_how how = {.flags = (unsigned)(flags | O_PATH | O_CLOEXEC),
                           .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS};
    return (int)syscall(SYS_openat2, root, path, &how, sizeof how);
}

/* struct statx of the kernel's <linux/stat.h>, which cannot be included beside a C library's
 * <sys/stat.h>; that of musl before 1.2.5 lacks it, and later ones end before stx_mnt_id. */
struct statx_words {
    uint32_t mask, others[35];
    uint64_t mount_id, rest[13];
};
_Static_assert(offsetof(struct statx_words, mount_id) == 144, "as the kernel has it");
_Static_assert(sizeof(struct statx_words) == 256, "as the kernel has it");
#define WANT_MOUNT_ID 0x1000U /* STATX_MNT_ID */

bool mount_of(int fd, unsigned long long *mount) {
    struct statx_words status;
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, WANT_MOUNT_ID, &status) != 0 ||
        !(status.mask & WANT_MOUNT_ID))
        return false;
    *mount = status.mount_id;
    return true;
}

/* Whether the host has mounted this file system as well. All of a container's devices are in one,
 * and a host with many mounts has a long list of them: it is read once for them all. */
static bool host_has(dev_t device) {
    static dev_t last;
    static bool known, found;
    char *line = NULL;
    size_t room = 0;
    unsigned major, minor;
    if (known && last == device)
        return found;
    FILE *mounts = fopen("/proc/self/mountinfo", "re");
    found = !mounts;
    while (!found && getline(&line, &room, mounts) >= 0)
        found =
            sscanf(line, "%*d %*d %u:%u", &major, &minor) != 2 || makedev(major, minor) == device;
    if (mounts) {
        found = found || ferror(mounts);
        fclose(mounts);
    }
    free(line);
    last = device;
    known = true;
    return found;
}

/* The root file system itself, or one that the runtime made for this container (/dev, /run). */
static bool is_containers(const struct adoption *a, int directory) {
    unsigned long long mount;
    struct statfs kind;
    struct stat status;
    if (!mount_of(directory, &mount))
        return false;
    return mount == a->mount || (fstatfs(directory, &kind) == 0 && kind.f_type == TMPFS_MAGIC &&
                                 fstat(directory, &status) == 0 && !host_has(status.st_dev));
}

/* It is taken back when anything fails later; `parent` stays open for that. */
static bool remember(struct adoption *a, int parent, const char *name, int flags) {
    char *own = strdup(name); /* `name` may end where it does only for now */
    a->made[a->made_count++] = (struct made){parent, flags, own};
    return own;
}

void place_undo(struct adoption *a) {
    while (a->made_count) {
        struct made *made = &a->made[--a->made_count];
        if (made->name)
            unlinkat(made->parent, made->name, made->flags);
    }
}

/* An empty file or directory; a descriptor of it. -1 also when something is there by now. */
static int make(struct adoption *a, int parent, const char *name, bool directory) {
    if (a->made_count == MAX_MADE)
        return -1;
    int file = -1;
    if (directory ? mkdirat(parent, name, 0755) != 0
                  : (file = openat(parent, name,
                                   O_CREAT | O_EXCL | O_NOFOLLOW | O_WRONLY | O_CLOEXEC, 0644)) < 0)
        return -1;
    if (file >= 0)
        close(file);
    if (!remember(a, parent, name, directory ? AT_REMOVEDIR : 0))
        return -1;
    return openat(parent, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
}

static int directory_at(struct adoption *a, char *path) {
    const char *name;
    int fd = in_root(a->root, *path ? path : "/", O_DIRECTORY);
    if (fd >= 0 || errno != ENOENT)
        return fd;
    int above = place_parent(a, path, &name);
    return above < 0 ? -1 : make(a, above, name, true);
}

/* Whatever goes wrong, also on the way, is found again by Python. */
int place_parent(struct adoption *a, char *path, const char **name) {
    char *slash = strrchr(path, '/');
    if (!slash || !slash[1])
        return -1;
    *slash = '\0';
    int fd = directory_at(a, path);
    *slash = '/';
    *name = slash + 1;
    if (fd < 0 || is_containers(a, fd))
        return fd;
    close(fd);
    return -1;
}

bool place_link(struct adoption *a) {
    char *target = ticket_word(a), *text = ticket_word(a), there[PATH_MAX];
    const char *name;
    if (!target || !text || a->made_count == MAX_MADE)
        return false;
    int parent = place_parent(a, target, &name);
    if (parent < 0)
        return false;
    if (symlinkat(text, parent, name) == 0)
        return remember(a, parent, name, 0);
    ssize_t size = errno == EEXIST ? readlinkat(parent, name, there, sizeof there) : -1;
    close(parent);
    return size >= 0 && (size_t)size == strlen(text) && memcmp(there, text, (size_t)size) == 0;
}

/* As mountrules.accepts. */
static bool accepts(mode_t source, mode_t target) {
    return S_ISDIR(source) ? S_ISDIR(target)
                           : S_ISREG(target) || (S_ISSOCK(source) && S_ISSOCK(target));
}

/* A directory on the mount that `target` is on; -1 where a file is the root of its own mount. */
static int beside(struct adoption *a, char *path, int target, bool is_directory) {
    unsigned long long mount, above;
    if (is_directory)
        return target;
    if (!mount_of(target, &mount))
        return -1;
    if (mount == a->mount)
        return a->root;
    char *slash = strrchr(path, '/');
    if (!slash)
        return -1;
    *slash = '\0';
    int parent = in_root(a->root, *path ? path : "/", O_DIRECTORY);
    *slash = '/';
    return parent >= 0 && mount_of(parent, &above) && above == mount ? parent : -1;
}

/* The user namespace of mounts that hide the owner of what they show: gpushare/idmap.py. */
static bool open_userns(struct adoption *a) {
    char path[PATH_MAX];
    if (!a->attachments.userns &&
        snprintf(path, sizeof path, "%s/" IDMAP_NAMESPACE, a->state_dir) < (int)sizeof path)
        a->attachments.userns = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    return a->attachments.userns > 0;
}

/* A mount of ours. The source is still the file that Python saw, and its type with it. */
bool place_bind(struct adoption *a) {
    unsigned long long device, inode, attributes;
    struct stat source, there;
    const char *from, *name;
    char *to;
    if (!ticket_number(a, &device) || !ticket_number(a, &inode) || !ticket_number(a, &attributes) ||
        !(to = ticket_word(a)) || !(from = ticket_word(a)))
        return false;
    if (attributes & MOUNT_ATTR_IDMAP && !open_userns(a))
        return false;
    int tree = (int)syscall(SYS_open_tree, AT_FDCWD, from, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (tree < 0 || fstat(tree, &source) != 0 || source.st_dev != device || source.st_ino != inode)
        return false;
    int target = in_root(a->root, to, O_NOFOLLOW);
    if (target < 0 && errno == ENOENT) {
        int parent = place_parent(a, to, &name);
        target = parent < 0 ? -1 : make(a, parent, name, S_ISDIR(source.st_mode));
    }
    if (target < 0 || fstat(target, &there) != 0 || !accepts(source.st_mode, there.st_mode))
        return false;
    int directory = beside(a, to, target, S_ISDIR(there.st_mode));
    return directory >= 0 && attach_add(&a->attachments, tree, attributes, target, directory);
}
