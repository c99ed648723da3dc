"""Make mounts in which the owner of every file is unmapped (start path).

    Hider(state_dir)                 decides which mounts of a container hide the owner; `attributes`, `fd`, `refused`
    shown(hider)                     source of a mount of config.json: the same file with its owner hidden
    new_namespace(), hides(tree, ...)    test whether a file system supports such mounts (doctor)

The owner of a file may take a lease on it (fcntl, F_SETLEASE). Every open of the file on this host then waits or
fails. Another owner would not help, because a container's root can take any uid. In a mount whose id map does not
map the owner, no process of a container is the owner. The kernel then refuses leases, writes, truncation and chmod,
even if a process has made the mount writable again (kernel: filesystems/idmappings.rst, HAS_UNMAPPED_ID).

One user namespace serves all such mounts. The first start makes it, without a process, and mounts its file on
STATE_DIR/idmap/ns to keep it; later starts open that file. It maps only KEEPER, to uid 0 of the host. KEEPER owns the
two directories above a share, so the low-level runtime can traverse them and no other user can. Next to it are clones
of the directories that mounts of config.json use (the leases' and the shim's), named after device and inode number.
If a file system refuses (overlayfs, tmpfs before Linux 6.3), a file `refused-<device>` records it, and its files keep
their owner. The record expires after RETRY_S: another file system can get the same device number, and a failure for
lack of memory or descriptors must not leave all later containers unprotected.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..core import constants
from ..core.errors import KernelError, of_source
from . import filelock, rootless, syscalls

if TYPE_CHECKING:
    from ..core.ops import Mount

FOLDER = "idmap"
NAMESPACE = "ns"
KEEPER = 4294967279  # uid that owns only the directories above a share
IDMAP = syscalls.MOUNT_ATTR_IDMAP
_NONE = "none"  # file that records: no user namespace could be made on this host
RETRY_S = 60
_REFUSALS = (errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CLONE = syscalls.ATTRIBUTES["ro"] | syscalls.ATTRIBUTES["nosuid"] | syscalls.ATTRIBUTES["nodev"]


def give(path: str) -> None:
    """Make KEEPER the owner of a directory above a share. Raises OSError."""
    rootless.give_away(path, KEEPER)


class Hider:
    """Hides owners for one start. `fd` is the user namespace; -1 if there is none, and then no owner is hidden."""

    def __init__(self, state_dir: str) -> None:
        self.folder = f"{state_dir}/{FOLDER}"
        self._refused: dict[int, bool] = {}
        self.fd = -1 if rootless.is_rootless() else _namespace(state_dir)

    def attributes(self, target: str, kind: str, flags: Sequence[str], status: os.stat_result) -> int:
        """Return IDMAP or 0 for the mount of a source with this `status`. A file that a container writes keeps its
        owner. So does a file that only its owner may read: with the owner hidden no process could read it."""
        mode = status.st_mode
        if (
            "ro" not in flags
            or kind == "socket"
            or target.startswith(constants.MPS_DIR + "/")
            or mode >> 6 & 0o5 & ~mode
        ):
            return 0
        return IDMAP if self.can(status.st_dev) else 0

    def can(self, device: int) -> bool:
        """Return whether this file system supports hiding owners, as far as known."""
        if self.fd < 0:
            return False
        if device not in self._refused:
            self._refused[device] = _failed_lately(self._mark(device))
        return not self._refused[device]

    def _mark(self, device: int) -> str:
        return f"{self.folder}/refused-{os.major(device)}:{os.minor(device)}"

    def refused(self, error: syscalls.SyscallError, device: int) -> bool:
        """Return whether `error` means that the file system does not support it; then skip that file system for
        RETRY_S."""
        if error.errno not in _REFUSALS:
            return False
        self._refused[device] = True
        _touch(self._mark(device))
        return True

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def shown(hider: Hider) -> Callable[[Mount], str]:
    """Return a function from a mount to its source path with the owner hidden, or to the unchanged source. It raises
    DeviceError if there is no source."""
    containers = f"{os.path.dirname(hider.folder)}/containers"

    def place(op: Mount) -> str:
        try:
            status = os.stat(op.source)
        except OSError as error:
            raise of_source(error.errno or 0, op.source) from None
        if not hider.attributes(op.target, op.kind, op.flags, status):
            return op.source
        within = op.source.startswith(containers + "/")
        directory = containers if within else op.source if op.kind == "dir" else os.path.dirname(op.source)
        path = _clone(hider, directory) + op.source[len(directory) :]
        # The clone shows another file where something is mounted on the source itself
        return path if os.path.samestat(os.stat(path), status) else op.source

    return place


def _clone(hider: Hider, directory: str) -> str:
    """Return a read-only clone of `directory` with hidden owners, which the first start that needs it makes;
    `directory` itself if cloning is not supported. A directory that replaces another has another inode number, so
    another clone."""
    status = os.stat(directory)
    clone = f"{hider.folder}/{status.st_dev}-{status.st_ino}"
    try:
        if os.path.samestat(os.stat(clone), status):
            return clone
    except FileNotFoundError:
        pass
    tree = target = -1
    try:
        os.makedirs(clone, 0o755, exist_ok=True)
        tree = syscalls.open_tree(directory)
        syscalls.mount_setattr(tree, _CLONE | IDMAP, syscalls.MS_PRIVATE, directory, userns=hider.fd)
        target = os.open(clone, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        syscalls.move_mount(tree, target, clone)
    except syscalls.SyscallError as error:
        if not hider.refused(error, status.st_dev):
            raise
        return directory
    finally:
        for fd in (tree, target):
            if fd >= 0:
                os.close(fd)
    return clone


def _namespace(state_dir: str) -> int:
    """Return a descriptor of the user namespace, which the first start makes; -1 if that is impossible."""
    path = f"{state_dir}/{FOLDER}/{NAMESPACE}"
    for made in (False, True):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            fd = -1
        if fd >= 0:
            if os.fstat(fd).st_dev != os.stat(state_dir).st_dev:  # the namespace's file is mounted there
                return fd
            os.close(fd)
        if made or _failed_lately(f"{state_dir}/{FOLDER}/{_NONE}"):
            break
        _make_namespace(state_dir, path)
    return -1


def _make_namespace(state_dir: str, path: str) -> None:
    folder = os.path.dirname(path)
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        lock = os.open(folder, _DIRECTORY)
    except OSError:
        return  # the next start tries again
    try:
        filelock.take(lock, folder)  # only root can open it, by the directory's mode
        if os.path.lexists(path) and os.stat(path).st_dev != os.fstat(lock).st_dev:
            return  # another start was first
        give(f"{state_dir}/containers")
        _touch(path)
        _keep_namespace(path)
    except (OSError, KernelError):
        _touch(f"{folder}/{_NONE}")
    finally:
        os.close(lock)


def _keep_namespace(path: str) -> None:
    """Make a namespace and mount its file on `path`, which keeps it alive. Raises OSError, KernelError."""
    fds = [new_namespace()]
    try:
        fds.append(syscalls.open_tree("", dir_fd=fds[0]))
        fds.append(os.open(path, os.O_PATH | os.O_CLOEXEC))
        syscalls.mount_setattr(fds[1], 0, syscalls.MS_PRIVATE, path)
        syscalls.move_mount(fds[1], fds[2], path)
    finally:
        for fd in fds:
            os.close(fd)


def new_namespace() -> int:
    """Make a user namespace with this module's map; it ends with the returned descriptor. Raises OSError,
    KernelError."""
    ready, signal_ready = os.pipe()
    held, release = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(release)
            syscalls.unshare(syscalls.CLONE_NEWUSER, "user namespace")
            os.write(signal_ready, b"x")
            os.read(held, 1)
        finally:
            os._exit(0)
    os.close(signal_ready)
    try:
        if not os.read(ready, 1):
            raise KernelError("cannot create a user namespace", "sysctl user.max_user_namespaces=1000")
        for name in ("uid_map", "gid_map"):
            fd = os.open(f"/proc/{child}/{name}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, b"%d 0 1\n" % KEEPER)
            finally:
                os.close(fd)
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for fd in (ready, held, release):
            os.close(fd)
        try:
            os.waitpid(child, 0)
        except ChildProcessError:
            pass


def _touch(path: str) -> None:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        os.utime(path)
    except OSError:
        pass  # the next start tries again


def _failed_lately(mark: str) -> bool:
    """Return whether the file `mark` is younger than RETRY_S. A time in the future does not count: the clock was set
    back."""
    try:
        return 0 <= time.time() - os.stat(mark).st_mtime <= RETRY_S
    except OSError:
        return False


def hides(tree: int, namespace: int, what: str) -> bool:
    """Try whether the file system of a detached mount can hide owners. Raises KernelError."""
    try:
        syscalls.mount_setattr(tree, IDMAP, syscalls.MS_PRIVATE, what, userns=namespace)
    except syscalls.SyscallError as error:
        if error.errno in _REFUSALS:
            return False
        raise
    return True
