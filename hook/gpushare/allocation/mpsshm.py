"""What an MPS daemon and its containers have as /dev/shm: a tmpfs of their own. Not on the start path.

mount(path), unmount(path)
use(path)                       in the child that becomes the daemon
"""

from __future__ import annotations

import os
import shutil

from ..system import syscalls

_OPTIONS = {"size": "64m", "nr_inodes": "4096", "mode": "1777"}  # a file of 4 KiB for each client


def mount(path: str) -> None:
    """A tmpfs of its own, so that a tenant who fills it takes nothing from the state directory. One that is there
    stays: containers of a daemon that died have it, and are to meet the next one there."""
    if os.path.ismount(path):
        _empty(path)
        return
    flags = sum(syscalls.ATTRIBUTES[name] for name in ("nosuid", "nodev", "noexec"))
    tmpfs = syscalls.detached_tmpfs(_OPTIONS, flags, path)
    target = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        syscalls.move_mount(tmpfs, target, path)
        syscalls.mount_setattr(tmpfs, 0, syscalls.MS_PRIVATE, path)
    finally:
        os.close(target)
        os.close(tmpfs)


def _empty(path: str) -> None:
    """Containers write here too, also just now, and also directories."""
    for entry in os.scandir(path):
        try:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)
        except (OSError, RecursionError):  # gone, or another thing by now; what is left is its maker's
            pass


def unmount(path: str) -> None:
    while os.path.ismount(path):
        syscalls.umount(path, syscalls.MNT_DETACH | syscalls.UMOUNT_NOFOLLOW)


def use(path: str) -> None:
    """In the child that becomes the daemon: its own /dev/shm, seen by nobody else."""
    syscalls.unshare(syscalls.CLONE_NEWNS, "mount namespace")
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    syscalls.mount_setattr(root, 0, syscalls.MS_SLAVE, "/", recursive=True)
    tree = syscalls.open_tree(path)
    target = os.open("/dev/shm", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    syscalls.move_mount(tree, target, "/dev/shm")
