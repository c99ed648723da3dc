"""Find or create mount points inside a container's root, by descriptor, and refuse what a tenant may have placed there.

nothing                created (an empty file or directory), except inside a user's volume, which is the host's
an empty file          used: a mount point of an earlier run (`docker commit` keeps them)
a file, a directory    used if it is of the right kind
a link                 followed inside the root; accepted if it ends in a library directory
anything else          refused
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable

from ..core.errors import KernelError
from ..core.quoting import shown
from ..system import inroot, mountns, syscalls
from .mountrules import accepts, in_volume, is_library_path, not_a_library, wrong_type

_RACES = 16  # concurrent changes before this gives up


def _create(dir_fd: int, name: str, kind: str) -> int:
    """Create an empty file or directory and return its descriptor. Raise OSError."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    if kind == "dir":
        os.mkdir(name, 0o755, dir_fd=dir_fd)
        return os.open(name, flags | os.O_PATH, dir_fd=dir_fd)
    return os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=dir_fd)  # it stays empty


class Root:
    """A container's root while a plan is applied to it, with the steps that undo what was done."""

    def __init__(self, fd: int, owner: tuple[int, int]) -> None:
        self.fd = fd
        self.owner = owner
        self.mount_id = syscalls.mount_id(fd)
        self.undo: list[Callable[[], None]] = []
        self.notes: list[str] = []
        self._fds: list[int] = []
        self._host = self.keep(mountns.open_mounts())
        self._directories: dict[str, int] = {}
        self._own_mounts: set[int] = set()
        self._quiet: set[int] = set()  # mounts that do not propagate
        self._the_containers = {self.mount_id}  # mounts that the host does not have

    # descriptors

    def keep(self, fd: int) -> int:
        """Return `fd` and close it at the end: undo needs the descriptors of created files."""
        self._fds.append(fd)
        return fd

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def lookup(self, path: str, flags: int = os.O_PATH) -> int:
        """Return a descriptor of `path`, or -1 if nothing is there. Magic links and loops are refused."""
        try:
            return self.keep(inroot.open_in(self.fd, path, flags))
        except syscalls.SyscallError as error:
            if error.errno == errno.ENOENT:
                return -1
            if error.errno == errno.ELOOP:
                raise KernelError(f"{shown(path)} leads through a magic link or a loop of links", "remove it") from None
            if error.errno == errno.ENOTDIR:
                raise KernelError(f"a parent of {shown(path)} is not a directory", "remove it from the image") from None
            raise

    # mounts

    def attach(self, tree: int, target: int, path: str) -> None:
        """Mount the detached `tree` on `target`, so that it appears in this container only."""
        self._silence(target, path)
        syscalls.move_mount(tree, target, path)
        self._own_mounts.add(syscalls.mount_id(tree))
        self.undo.append(lambda: syscalls.umount(f"/proc/self/fd/{tree}"))

    def claim(self, path: str, source: os.stat_result) -> None:
        """Count the mount at `path` as this plan's own. Raise if the runtime has not mounted it."""
        fd = self.lookup(path, os.O_PATH | os.O_NOFOLLOW)
        if fd < 0 or not os.path.samestat(os.fstat(fd), source):
            raise KernelError(
                f"{shown(path)} is not what config.json mounts there",
                "see whether another hook, or the image, changes it",
            )
        self._own_mounts.add(syscalls.mount_id(fd))

    def is_own(self, fd: int) -> bool:
        """Whether `fd` is on a mount that this plan made."""
        return syscalls.mount_id(fd) in self._own_mounts

    def _silence(self, target: int, path: str) -> None:
        """Stop propagation out of the mount of `target`: a mount below a shared mount appears at every peer, also on
        the host. The mount becomes a slave (it still receives), in this namespace only."""
        mount_id = syscalls.mount_id(target)
        if mount_id in self._quiet or mount_id in self._own_mounts:
            return
        syscalls.mount_setattr(self._mount_root(target, mount_id, path), 0, syscalls.MS_SLAVE, path)
        self._quiet.add(mount_id)

    def _mount_root(self, fd: int, mount_id: int, path: str) -> int:
        """Return the root of the mount of `fd`: go up by ".." until the mount would change."""
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            parent = self.lookup(path.rpartition("/")[0] or "/")
            if parent < 0 or syscalls.mount_id(parent) != mount_id:
                return fd  # a file that is itself the root of its mount
            fd = parent
        while True:
            up = self.keep(os.open("..", os.O_PATH | os.O_CLOEXEC, dir_fd=fd))
            if syscalls.mount_id(up) != mount_id or os.path.samestat(os.fstat(up), os.fstat(fd)):
                return fd
            fd = up

    # mount points

    def mount_point(self, path: str, kind: str) -> int:
        """Return an O_PATH descriptor of a mount point for `kind` ("file", "dir", "socket") at `path`; create it if
        needed."""
        if kind == "dir":
            self._directories.clear()  # the mount hides directories below it
        for made_first in (self.may_make(path), *[False] * _RACES):  # most are not there yet
            fd = -1 if made_first else self.lookup(path, os.O_PATH | os.O_NOFOLLOW)
            if fd < 0:
                fd = self._make(path, kind)
                if fd < 0:
                    continue
                return fd
            mode = os.fstat(fd).st_mode
            if stat.S_ISLNK(mode):
                fd = self.library_behind(path)
                mode = os.fstat(fd).st_mode
            if not accepts(kind, mode):
                raise wrong_type(path, kind, mode)
            return fd
        raise KernelError(f"{shown(path)} keeps changing", "stop what is writing to the container's file system")

    def library_behind(self, path: str) -> int:
        """Return the target of the link `path`. Raise if it is not in a library directory."""
        fd = self.lookup(path)
        if fd < 0:
            raise KernelError(f"{shown(path)} is a link to nothing", "remove it from the image")
        real = inroot.path_of(self.fd, fd)
        if not is_library_path(real):
            raise not_a_library(path, real)
        return fd

    def parent(self, path: str) -> tuple[int, str]:
        """Return (descriptor of the parent directory of `path`, created if needed; the last name)."""
        above, _, name = path.rstrip("/").rpartition("/")
        if not name or name in (".", ".."):
            raise KernelError(f"{shown(path)} cannot be a mount point", "name a file below the container's root")
        return self.directory(above or "/"), name

    def directory(self, path: str) -> int:
        """Return a descriptor of the directory `path`, created with its parents if needed. It is looked up once for all
        operations of a plan."""
        if path in self._directories:
            return self._directories[path]
        for _ in range(_RACES):
            fd = self.lookup(path, os.O_PATH | os.O_DIRECTORY)
            if fd < 0:
                fd = self._make(path, "dir")
            if fd >= 0:
                self._directories[path] = fd
                return fd
        raise KernelError(f"{shown(path)} is a link to nothing, or keeps changing", "remove it from the image")

    def _make(self, path: str, kind: str) -> int:
        """Create an empty file or directory at `path`; return -1 if something appeared there meanwhile."""
        dir_fd, name = self.parent(path)
        self.require_writable(dir_fd, path)
        try:
            try:
                fd = self.keep(_create(dir_fd, name, kind))
            except OSError as error:
                if error.errno != errno.EOVERFLOW or self.owner == (0, 0):
                    raise
                fd = self.keep(self._create_as_owner(dir_fd, name, kind))
        except (FileExistsError, FileNotFoundError):  # a directory that we created was removed again
            return -1
        except OSError as error:
            raise self._cannot_make(error, path) from None
        self.undo.append(lambda: self._remove(dir_fd, name, fd))
        if self.owner != (0, 0):
            os.chown(f"/proc/self/fd/{fd}", *self.owner)
        return fd

    def _create_as_owner(self, dir_fd: int, name: str, kind: str) -> int:
        """Create as the container's root: our uid has no mapping on a file system of its user namespace (its /dev)."""
        try:
            os.setegid(self.owner[1])
            os.seteuid(self.owner[0])
            return _create(dir_fd, name, kind)
        finally:
            os.seteuid(0)
            os.setegid(0)

    def _cannot_make(self, error: OSError, path: str) -> KernelError:
        hint = ""
        if error.errno == errno.EROFS:
            hint = "the image is read-only: create an empty file there in the image, or mount it writable"
        return syscalls.SyscallError("create", path, error.errno or 0, hint)

    @staticmethod
    def _remove(dir_fd: int, name: str, fd: int) -> None:
        """Remove an empty file or directory that we created, if it is still the same one and still empty."""
        made = os.fstat(fd)
        try:
            there = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
            if not os.path.samestat(made, there):
                return
            if stat.S_ISDIR(made.st_mode):
                os.rmdir(name, dir_fd=dir_fd)
            elif there.st_size == 0:
                os.unlink(name, dir_fd=dir_fd)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EBUSY):
                raise

    def may_make(self, path: str) -> bool:
        """Return whether a file may be created at `path`."""
        try:
            self.require_writable(self.parent(path)[0], path)
        except KernelError:
            return False
        return True

    def require_writable(self, dir_fd: int, path: str) -> None:
        """Refuse to create a file in a volume, where it would appear on the host. A volume is a mount other than the
        root whose superblock the host has mounted too. File systems of the runtime (/dev, /run) are the container's."""
        mount_id = syscalls.mount_id(dir_fd)
        if mount_id in self._the_containers or mount_id in self._own_mounts:
            return
        entry = next((one for one in mountns.read_mounts(containing=f"{mount_id} ") if one.id == mount_id), None)
        host_path = mountns.host_path(entry, self._host) if entry is not None else ""
        if entry is not None and host_path:
            point = entry.point
            prefix = os.readlink(f"/proc/self/fd/{self.fd}").rstrip("/")
            point = point[len(prefix) :] if point.startswith(prefix + "/") else point
            raise in_volume(path, point, host_path)
        self._the_containers.add(mount_id)
