/* Mounts of ours in a container: detached copies, attached all at once in its mount namespace. All
 * that can fail for a reason is done before this process goes in there, and it always comes back:
 * what is executed after this, Python, must be the host's. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "adopt.h"
#include "launcher_tables.h"

#define DEEPEST 64 /* directories between a mount point and the root of the mount that it is on */

static bool set_mount(int mount, uint64_t attributes, uint64_t propagation, int userns) {
    struct mount_attr attr = {
        .attr_set = attributes, .propagation = propagation, .userns_fd = (uint64_t)userns};
    return syscall(SYS_mount_setattr, mount, "", AT_EMPTY_PATH, &attr, sizeof attr) == 0;
}

/* The root of the mount that the directory is on: up until the mount, or nothing, changes. */
static int mount_root(int directory) {
    unsigned long long mount, above;
    if (!mount_of(directory, &mount))
        return -1;
    for (int depth = 0; depth < DEEPEST; depth++) {
        struct stat here, there;
        int up = openat(directory, "..", O_PATH | O_CLOEXEC);
        if (up < 0 || !mount_of(up, &above) || fstat(directory, &here) != 0 ||
            fstat(up, &there) != 0)
            return -1;
        if (above != mount || (here.st_dev == there.st_dev && here.st_ino == there.st_ino))
            return directory;
        directory = up; /* few, and this process is short: none is closed */
    }
    return -1;
}

static bool is_quiet(const struct attachments *all, unsigned long long mount) {
    for (size_t i = 0; i < all->quiet_count; i++)
        if (all->quiet[i].mount == mount)
            return true;
    return false;
}

/* A mount below a shared one would appear at every peer, so on the host: a slave only receives. */
static bool will_be_quiet(struct attachments *all, int directory) {
    unsigned long long mount;
    if (!mount_of(directory, &mount))
        return false;
    if (is_quiet(all, mount))
        return true;
    int top = all->quiet_count < MAX_QUIET ? mount_root(directory) : -1;
    if (top < 0)
        return false;
    all->quiet[all->quiet_count].mount = mount;
    all->quiet[all->quiet_count++].top = top;
    return true;
}

bool attach_add(struct attachments *all, int tree, uint64_t attributes, int target, int directory) {
    if (all->count == MAX_ATTACHED || !will_be_quiet(all, directory) ||
        !set_mount(tree, attributes, MS_PRIVATE, all->userns))
        return false;
    all->one[all->count].tree = tree;
    all->one[all->count++].target = target;
    return true;
}

/* gpushare/procmask.py has put it together in STATE_DIR/containers/<id>/proc. */
bool attach_mask(struct adoption *a) {
    int target = in_root(a->root, PROC_DIR, O_DIRECTORY);
    if (target < 0)
        return errno == ENOENT; /* no procfs in there: nothing to hide */
    int tree = (int)syscall(SYS_open_tree, a->container, TICKET_PROC,
                            OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_SYMLINK_NOFOLLOW);
    return tree >= 0 &&
           attach_add(&a->attachments, tree,
                      MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC,
                      target, target);
}

static void give_up(const char *what) {
    fprintf(stderr, "gpushare: %s: %s; remove the container\n", what, strerror(errno));
    _exit(1);
}

/* In the container's mount namespace: all of them or none. */
static bool attach_here(const struct attachments *all) {
    size_t done = 0;
    bool whole = true;
    for (size_t i = 0; whole && i < all->quiet_count; i++)
        whole = set_mount(all->quiet[i].top, 0, MS_SLAVE, 0);
    while (whole && done < all->count)
        if (syscall(SYS_move_mount, all->one[done].tree, "", all->one[done].target, "",
                    MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH) == 0)
            done++;
        else
            whole = false;
    while (!whole && done > 0) {
        char path[64];
        snprintf(path, sizeof path, "/proc/self/fd/%d", all->one[--done].tree);
        if (umount2(path, MNT_DETACH) != 0)
            give_up("cannot take a mount back");
    }
    return whole;
}

bool attach_all(struct attachments *all, int init) {
    if (!all->count)
        return true;
    int theirs = openat(init, "ns/mnt", O_RDONLY | O_CLOEXEC);
    int ours = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
    int root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    int directory = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (theirs < 0 || ours < 0 || root < 0 || directory < 0 || setns(theirs, CLONE_NEWNS) != 0)
        return false;
    bool done = attach_here(all);
    if (setns(ours, CLONE_NEWNS) != 0 || fchdir(root) != 0 || chroot(".") != 0 ||
        fchdir(directory) != 0)
        give_up("no way back from the container's mount namespace");
    return done;
}
