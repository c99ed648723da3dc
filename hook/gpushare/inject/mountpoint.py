"""Mount points and links inside a container's root: found or made, by descriptor, refused when a tenant laid something
there.

    nothing there          made (an empty file or directory), except inside a user's volume: that is the host's
    an empty file          a mount point of an earlier run (`docker commit` keeps them): used again
    a file, a directory    used when it is of the right kind
    a link                 followed in-root; accepted when it ends in a library directory
    anything else          refused, by name
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

_RACES = 16  # how often something may change under us before we give up


def _create(dir_fd: int, name: str, kind: str) -> int:
    """A descriptor of a new empty file or directory. Raises OSError."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    if kind == "dir":
        os.mkdir(name, 0o755, dir_fd=dir_fd)
        return os.open(name, flags | os.O_PATH, dir_fd=dir_fd)
    return os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=dir_fd)  # nobody writes to it


class Root:
    """A container's root while a plan is applied to it: where things go, and how to take each one back."""

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
        self._the_containers = {self.mount_id}  # mounts that the host has not

    # descriptors

    def keep(self, fd: int) -> int:
        """`fd`, closed at the end: undo needs the descriptors of what was made."""
        self._fds.append(fd)
        return fd

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def lookup(self, path: str, flags: int = os.O_PATH) -> int:
        """What is at `path`, or -1 when nothing is. Magic links and loops are refused, not "nothing"."""
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
        """Mounts the detached `tree` on `target`, so that it never shows anywhere but in this container."""
        self._silence(target, path)
        syscalls.move_mount(tree, target, path)
        self._own_mounts.add(syscalls.mount_id(tree))
        self.undo.append(lambda: syscalls.umount(f"/proc/self/fd/{tree}"))

    def claim(self, path: str, source: os.stat_result) -> None:
        """Counts the mount at `path` as this plan's own: the runtime was told to make it. Raises when it did not."""
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
        """Stops propagation out of the mount that `target` is on: a mount below a shared one appears at every peer, so
        on the host. It becomes a slave (it still receives), in this namespace only."""
        mount_id = syscalls.mount_id(target)
        if mount_id in self._quiet or mount_id in self._own_mounts:
            return
        syscalls.mount_setattr(self._mount_root(target, mount_id, path), 0, syscalls.MS_SLAVE, path)
        self._quiet.add(mount_id)

    def _mount_root(self, fd: int, mount_id: int, path: str) -> int:
        """The root of the mount that `fd` is on: up by ".." until the mount would change."""
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
        """O_PATH descriptor of a place for a mount of `kind` ("file", "dir", "socket") at `path`; made if need be."""
        if kind == "dir":
            self._directories.clear()  # what is mounted here hides those below
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
        """What the link `path` leads to, if that is in a library directory; else it is refused."""
        fd = self.lookup(path)
        if fd < 0:
            raise KernelError(f"{shown(path)} is a link to nothing", "remove it from the image")
        real = inroot.path_of(self.fd, fd)
        if not is_library_path(real):
            raise not_a_library(path, real)
        return fd

    def parent(self, path: str) -> tuple[int, str]:
        """(descriptor of the directory that holds `path`, made if need be; the last name)."""
        above, _, name = path.rstrip("/").rpartition("/")
        if not name or name in (".", ".."):
            raise KernelError(f"{shown(path)} cannot be a mount point", "name a file below the container's root")
        return self.directory(above or "/"), name

    def directory(self, path: str) -> int:
        """Descriptor of the directory `path`, made with its parents if need be, and looked up once for all that a plan
        puts there."""
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
        """Creates an empty file or directory at `path`; -1 when something is there by now."""
        dir_fd, name = self.parent(path)
        self.require_writable(dir_fd, path)
        try:
            try:
                fd = self.keep(_create(dir_fd, name, kind))
            except OSError as error:
                if error.errno != errno.EOVERFLOW or self.owner == (0, 0):
                    raise
                fd = self.keep(self._create_as_owner(dir_fd, name, kind))
        except (FileExistsError, FileNotFoundError):  # the name of a directory that we made, gone again
            return -1
        except OSError as error:
            raise self._cannot_make(error, path) from None
        self.undo.append(lambda: self._remove(dir_fd, name, fd))
        if self.owner != (0, 0):
            os.chown(f"/proc/self/fd/{fd}", *self.owner)
        return fd

    def _create_as_owner(self, dir_fd: int, name: str, kind: str) -> int:
        """On a file system that was mounted in the container's user namespace (its /dev) our own uid has no name."""
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
        """Takes back an empty file or directory that we made, if it is still the same one and still empty."""
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
        """Whether something may be made at `path`, if nothing is there."""
        try:
            self.require_writable(self.parent(path)[0], path)
        except KernelError:
            return False
        return True

    def require_writable(self, dir_fd: int, path: str) -> None:
        """Refuses to create in a volume: a mount other than the root whose superblock the host has mounted as well.
        What we made there would appear on the host. File systems that the runtime made (/dev, /run) are the
        container's."""
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
