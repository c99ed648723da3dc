/* The mask over /proc/driver/nvidia, which gpushare/procmask.py has put together in
 * STATE_DIR/containers/<id>/proc: a copy of that mount is attached in the container's mount
 * namespace. All that can fail for a reason is done before this process goes in there, and it
 * always comes back: what is executed after this, Python, must be the host's. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "adopt.h"
#include "launcher_tables.h"

#define DEEPEST 64 /* directories between /proc/driver/nvidia and the root of its mount */

static bool set_mount(int mount, uint64_t attributes, uint64_t propagation) {
    struct mount_attr attr = {.attr_set = attributes, .propagation = propagation};
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

bool mask_prepare(struct mask *mask, int container, int init, int root) {
    *mask = (struct mask){.target = in_root(root, PROC_DIR, O_DIRECTORY)};
    if (mask->target < 0)
        return errno == ENOENT; /* no procfs in there: nothing to hide */
    mask->wanted = true;
    mask->top = mount_root(mask->target);
    mask->tree = (int)syscall(SYS_open_tree, container, TICKET_PROC,
                              OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_SYMLINK_NOFOLLOW);
    mask->theirs = openat(init, "ns/mnt", O_RDONLY | O_CLOEXEC);
    mask->ours = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
    mask->our_root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    mask->our_directory = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    return mask->top >= 0 && mask->tree >= 0 && mask->theirs >= 0 && mask->ours >= 0 &&
           mask->our_root >= 0 && mask->our_directory >= 0 &&
           set_mount(mask->tree,
                     MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC,
                     MS_PRIVATE);
}

/* A mount below a shared one would appear at every peer, so on the host: a slave only receives. */
static bool attach(const struct mask *mask) {
    return set_mount(mask->top, 0, MS_SLAVE) &&
           syscall(SYS_move_mount, mask->tree, "", mask->target, "",
                   MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH) == 0;
}

bool mask_attach(const struct mask *mask) {
    if (!mask->wanted)
        return true;
    if (setns(mask->theirs, CLONE_NEWNS) != 0)
        return false;
    bool done = attach(mask);
    if (setns(mask->ours, CLONE_NEWNS) != 0 || fchdir(mask->our_root) != 0 || chroot(".") != 0 ||
        fchdir(mask->our_directory) != 0) {
        fprintf(stderr, "gpushare: no way back from the container's mount namespace\n");
        _exit(1);
    }
    return done;
}
