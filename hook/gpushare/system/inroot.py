"""Open paths inside a container's untrusted root: by descriptor, never outside, never through magic links.

`openat2(RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)` does it in the kernel; before Linux 5.6 `_walk` does the same one
component at a time. Every path is absolute, as seen inside the container.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from types import TracebackType
from typing import Optional, Union

from ..core.errors import KernelError
from ..core.quoting import shown
from . import syscalls

_RESOLVE = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS
_RETRIES = 64  # EAGAIN: a rename or mount elsewhere raced with the look-up of ".."
_MAX_LINKS = 40  # as in the kernel
_PLAIN_PROC_LINKS = ("self", "thread-self", "mounts", "net")  # links in procfs that hold a real path
_kernel_has_openat2 = True


# One look-up follows up to 40 links of 4 KiB each, which takes the kernel milliseconds, and an image chooses the number
# of look-ups. The kernel does not report the steps of each, so their CPU time is bounded.
BUDGET_S = 0.5  # an ordinary start needs 5 ms
_CHECKED = 8  # look-ups between two checks of the time
_SHOWN = 200  # characters of a path
_until = 0.0  # of time.process_time(); 0: no bound
_lookups = 0


class budget:
    """Context manager: look-ups in it raise KernelError once this process has used BUDGET_S of CPU time."""

    def __enter__(self) -> None:
        global _until
        _until = time.process_time() + BUDGET_S

    def __exit__(self, kind: Optional[type], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        global _until
        _until = 0.0


def spend(path: str) -> None:
    """Check the budget. Called before each look-up, and for each link that gpushare follows itself. Raises KernelError,
    which callers must not take for a missing file; undoing needs no look-up."""
    global _lookups
    _lookups += 1
    if _until and _lookups % _CHECKED == 0 and time.process_time() > _until:
        raise KernelError(
            f"following links in the image takes more than {BUDGET_S} s of CPU time (at {shown(path[:_SHOWN])})",
            "use an image with fewer chained symbolic links",
        )


class View:
    """A root that is not a single directory of this host; rootfs.probe reads it like a descriptor. See spectree.py."""

    def open_in(self, path: str, flags: int) -> int:
        """As `inroot.open_in`, for reading."""
        raise NotImplementedError

    def path_of(self, fd: int) -> str:
        """As `inroot.path_of`, for a descriptor that `open_in` returned and that is still open."""
        raise NotImplementedError

    def is_mounted_over(self, fd: int) -> bool:
        """As `inroot.is_mounted_over`."""
        raise NotImplementedError

    def mounted_in(self, fd: int) -> list[str]:
        """Return the names in an opened directory at which, or below which, something will be mounted."""
        raise NotImplementedError

    def reopened(self, old: int, new: int) -> int:
        """Return `new`, another descriptor of the same file as `old`."""
        raise NotImplementedError


Root = Union[int, View]  # a descriptor of the directory, or a view


def open_in(root: Root, path: str, flags: int = os.O_PATH, mode: int = 0) -> int:
    """Open `path` with `root` as its "/". With O_NOFOLLOW a link at the end is opened itself.

    Raises SyscallError; a magic link (/proc/self/root, ...) gives ELOOP too.
    """
    if isinstance(root, View):
        return root.open_in(path, flags)
    return open_below(root, path, flags, mode, 0)


def open_below(root_fd: int, path: str, flags: int, mode: int, resolve: int) -> int:
    """`open_in` for a descriptor, with further RESOLVE_ flags, which need a kernel with openat2."""
    global _kernel_has_openat2
    for _ in range(_RETRIES):
        spend(path)
        try:
            if _kernel_has_openat2:
                return syscalls.openat2(root_fd, path, flags, mode, _RESOLVE | resolve)
            if resolve:
                raise syscalls.SyscallError("openat2", path, errno.ELOOP)  # as for a link: callers then check closely
            return _walk(root_fd, path, flags | os.O_CLOEXEC, mode)
        except syscalls.SyscallError as error:
            if error.errno == errno.ENOSYS and _kernel_has_openat2:
                _kernel_has_openat2 = False
            elif error.errno != errno.EAGAIN:
                raise
    hint = "use an image with fewer chained symbolic links, or stop the process that keeps renaming directories"
    raise syscalls.SyscallError("openat2", path[:_SHOWN], errno.EAGAIN, hint)


def exists(root: Root, path: str, flags: int = os.O_PATH) -> int:
    """Like `open_in`, but -1 when the file is missing (or a parent is missing, or is not a directory, or loops)."""
    try:
        return open_in(root, path, flags)
    except syscalls.SyscallError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.ENAMETOOLONG, errno.ENXIO):
            return -1
        raise


def path_of(root: Root, fd: int) -> str:
    """The path of `fd` as seen inside the root; "" when it is not below it (deleted, or moved away)."""
    if isinstance(root, View):
        return root.path_of(fd)
    above = os.readlink(f"/proc/self/fd/{root}").rstrip("/")
    path = os.readlink(f"/proc/self/fd/{fd}")
    if path == above:
        return "/"
    if not path.startswith(above + "/") or path.endswith(" (deleted)"):
        return ""
    return path[len(above) :]


def is_mounted_over(root: Root, fd: int) -> bool:
    """Whether `fd` is on another mount than the root: a volume, or a file system that the runtime makes."""
    if isinstance(root, View):
        return root.is_mounted_over(fd)
    return syscalls.mount_id(fd) != syscalls.mount_id(root)


def open_regular(root: Root, path: str) -> int:
    """A readable descriptor of a regular file, or -1. O_PATH finds the type before the file is opened for reading,
    because opening a FIFO can block for ever and opening a device has effects."""
    probe = exists(root, path)
    if probe < 0:
        return -1
    try:
        if not stat.S_ISREG(os.fstat(probe).st_mode):
            return -1
        return root.reopened(probe, reopen(probe)) if isinstance(root, View) else reopen(probe)
    finally:
        os.close(probe)


def reopen(path_fd: int, flags: int = os.O_RDONLY) -> int:
    """Open the file of an O_PATH descriptor for use; O_NONBLOCK, because a lease on the file would block the open."""
    return os.open(f"/proc/self/fd/{path_fd}", flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _open_at(dir_fd: int, name: str, flags: int, mode: int, path: str) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    except OSError as error:
        raise syscalls.from_os_error(error, "openat", path) from None


def link_text(link_fd: int, name: str, path: str) -> str:
    """The text of an opened link. Raises ELOOP for links in procfs that are not plain: they are magic links."""
    if name not in _PLAIN_PROC_LINKS and syscalls.filesystem_magic(link_fd) == syscalls.PROC_SUPER_MAGIC:
        raise syscalls.SyscallError("openat", path, errno.ELOOP)
    return os.readlink("", dir_fd=link_fd)


def _walk(root_fd: int, path: str, flags: int, mode: int) -> int:
    """The look-up of `open_in` without openat2. ".." pops a descriptor that was opened on the way down, so moving a
    directory meanwhile cannot lead above the root."""
    follow_last = not flags & os.O_NOFOLLOW
    trail = [os.dup(root_fd)]
    todo = [c for c in reversed(path.split("/")) if c not in ("", ".")]
    must_be_dir = path.endswith(("/", "/."))
    links = 0
    try:
        while todo:
            name = todo.pop()
            if name == "..":
                if len(trail) > 1:
                    os.close(trail.pop())
                continue
            last = not todo
            creates = flags & (os.O_CREAT | os.O_EXCL) == os.O_CREAT | os.O_EXCL
            if last and creates:
                return _open_at(trail[-1], name, flags, mode, path)
            fd = _open_at(trail[-1], name, os.O_PATH, 0, path)
            kind = os.fstat(fd).st_mode
            if stat.S_ISLNK(kind) and (not last or follow_last or must_be_dir):
                try:
                    text = link_text(fd, name, path)
                finally:
                    os.close(fd)
                links += 1
                if links > _MAX_LINKS:
                    raise syscalls.SyscallError("openat", path, errno.ELOOP)
                if text.startswith("/"):
                    while len(trail) > 1:
                        os.close(trail.pop())
                todo.extend(c for c in reversed(text.split("/")) if c not in ("", "."))
                continue
            trail.append(fd)
            if not stat.S_ISDIR(kind) and (not last or must_be_dir):
                raise syscalls.SyscallError("openat", path, errno.ENOTDIR)
        return _open_found(trail[-1], flags, path)
    finally:
        for fd in trail:
            os.close(fd)


def _open_found(fd: int, flags: int, path: str) -> int:
    """A new descriptor with `flags` for the inode that `_walk` ended at."""
    kind = os.fstat(fd).st_mode
    if flags & os.O_DIRECTORY and not stat.S_ISDIR(kind):
        raise syscalls.SyscallError("openat", path, errno.ENOTDIR)
    if flags & os.O_PATH:
        return os.dup(fd)
    if stat.S_ISLNK(kind):
        raise syscalls.SyscallError("openat", path, errno.ELOOP)
    try:
        return os.open(f"/proc/self/fd/{fd}", flags & ~os.O_NOFOLLOW)
    except OSError as error:
        raise syscalls.from_os_error(error, "open", path) from None
