"""Work in a container's mount namespace, and parse mountinfo.

A pidfd pins the process before any data read through its pid is used. The namespace was opened while that process
lived, so it is the container's even if another process gets the pid later.
"""

import fcntl
import os
import select
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar, Union

from ..core.errors import KernelError
from . import syscalls

Result = TypeVar("Result")


class MountEntry(NamedTuple):
    """One line of mountinfo. `point` as seen from the reader's root; `device` is the superblock's "major:minor"."""

    id: int
    device: str
    root: str
    point: str
    shared: bool
    fstype: str
    source: str
    super_options: str
    parent: int = 0


def _unescaped(field: str) -> str:
    if "\\" not in field:
        return field
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field


CGROUPS = " - cgroup"  # in the lines of cgroup and cgroup2


def read_mounts(process: Union[str, int] = "self", containing: str = "") -> list[MountEntry]:
    """The mount table of a process, or behind a descriptor of `open_mounts`; only lines that contain `containing`."""
    lines = syscalls.lines_of(process if isinstance(process, int) else f"/proc/{process}/mountinfo")
    return parse_mounts(line for line in lines if containing in line)


def parse_mounts(lines: Iterable[str]) -> list[MountEntry]:
    """Parse lines of mountinfo. Source: proc(5)."""
    entries = []
    for line in lines:
        left, _, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        shared = any(f.startswith("shared:") for f in fields[6:])
        root, point = _unescaped(fields[3]), _unescaped(fields[4])
        source, options = _unescaped(tail[1]) if len(tail) > 1 else "", tail[2] if len(tail) > 2 else ""
        parent = int(fields[1])
        entries.append(MountEntry(int(fields[0]), fields[2], root, point, shared, tail[0], source, options, parent))
    return entries


def open_mounts() -> int:
    """A descriptor of the mount table of the current namespace; it stays valid in another namespace."""
    return os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)


def host_path(entry: MountEntry, host: int) -> str:
    """Host path of the directory that `entry` (of a container) mounts; "" if the host has not mounted that file system.
    If the host has mounted only other parts of it: "source:path inside the file system". `host` is a descriptor of
    `open_mounts`."""
    os.lseek(host, 0, os.SEEK_SET)
    lines = read_mounts(host, f" {entry.device} ")
    same = [mount for mount in lines if mount.device == entry.device]
    for mount in sorted(same, key=lambda one: -len(one.root)):
        above = mount.root.rstrip("/")
        if entry.root == mount.root or entry.root.startswith(above + "/"):
            return (mount.point.rstrip("/") + entry.root[len(above) :]).rstrip("/") or "/"
    return f"{entry.source}:{entry.root}" if same else ""


def container_owner(pid: int) -> tuple[int, int]:
    """(uid, gid) on the host of the container's root user, which must own files that gpushare creates in its root. In
    the same user namespace (rootless podman's hooks) that is 0: the map has the ids outside the namespace."""
    ids = []
    if os.path.samestat(os.stat(f"/proc/{pid}/ns/user"), os.stat("/proc/self/ns/user")):
        return 0, 0
    for name in ("uid_map", "gid_map"):
        owner = 0
        for line in syscalls.lines_of(f"/proc/{pid}/{name}"):
            inside, outside, _ = (int(v) for v in line.split())
            if inside == 0:
                owner = outside
        ids.append(owner)
    return ids[0], ids[1]


class Namespace:
    """The mount namespace of process `pid`. `inside` works there; `close` closes all descriptors."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fds: list[int] = []
        try:
            self.pidfd = self._keep(syscalls.pidfd_open(pid))
            self._container = self._open(f"/proc/{pid}/ns/mnt")
            self._own = self._open("/proc/self/ns/mnt")
            self._root = self._open("/", os.O_PATH)
            self._cwd = self._open(".", os.O_PATH)
            self.owner = container_owner(pid)
            self.require_alive()
            if os.path.samestat(os.fstat(self._container), os.fstat(self._own)):
                raise KernelError(
                    f"process {pid} has no mount namespace of its own", 'add {"type": "mount"} to linux.namespaces'
                )
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise syscalls.from_os_error(error, "open", error.filename or f"/proc/{pid}") from None
            raise

    def _keep(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def _open(self, path: str, flags: int = os.O_RDONLY) -> int:
        return self._keep(os.open(path, flags | os.O_CLOEXEC))

    def require_alive(self) -> None:
        """Raise if the pinned process has exited: data read through its pid may then be another process's."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        if poll.poll(0):
            raise KernelError(
                f"the container's process {self.pid} has exited",
                "see the engine's log: why did the runtime's create fail?",
            )

    def is_ours(self) -> bool:
        """Whether its user namespace is ours, so that only users who may mount on this host made its mounts. In its own
        user namespace every user may mount. Source: ioctl_ns(2), NS_GET_USERNS."""
        owner = fcntl.ioctl(self._container, 0xB701)
        try:
            return os.path.samestat(os.fstat(owner), os.stat("/proc/self/ns/user"))
        finally:
            os.close(owner)

    def inside(self, work: Callable[[], Result]) -> Result:
        """Call `work` in the namespace, and return to our own. A signal can raise an exception between any two calls,
        also of the return, which then starts again: an undo in the container's namespace would use its files."""
        try:
            try:
                syscalls.setns(self._container, f"/proc/{self.pid}/ns/mnt")
                return work()
            finally:
                self._return()
        except BaseException:
            self._return()
            raise

    def _return(self) -> None:
        syscalls.setns(self._own, "/proc/self/ns/mnt")  # this also moves root and cwd to the namespace's root
        os.fchdir(self._root)
        os.chroot(".")
        os.fchdir(self._cwd)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())
