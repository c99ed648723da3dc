"""Going into a container's mount namespace and back, and what mountinfo says there.

The process is pinned by a pidfd before anything of its pid is believed: the namespace was opened while the process
lived, so it is the container's even if the pid was given to another process since.
"""

from __future__ import annotations

import os
import select
from types import TracebackType
from typing import NamedTuple, Optional, Union

from ..core.errors import KernelError
from . import syscalls


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


def _unescaped(field: str) -> str:
    if "\\" not in field:
        return field
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field


CGROUPS = " - cgroup"  # in the lines of cgroup and cgroup2


def read_mounts(process: Union[str, int] = "self", containing: str = "") -> list[MountEntry]:
    """The mount table of a process, or that behind a descriptor of `open_mounts`: those lines that contain a text. See
    proc(5)."""
    entries = []
    for line in syscalls.lines_of(process if isinstance(process, int) else f"/proc/{process}/mountinfo"):
        if containing not in line:
            continue
        left, _, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        shared = any(f.startswith("shared:") for f in fields[6:])
        root, point = _unescaped(fields[3]), _unescaped(fields[4])
        source, options = _unescaped(tail[1]) if len(tail) > 1 else "", tail[2] if len(tail) > 2 else ""
        entries.append(MountEntry(int(fields[0]), fields[2], root, point, shared, tail[0], source, options))
    return entries


def open_mounts() -> int:
    """A descriptor of the mount table of the namespace that this process is in now, wherever it is read."""
    return os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)


def host_path(entry: MountEntry, host: int) -> str:
    """Where the host sees what `entry` (of a container) shows; "" when the host has not mounted that file system.
    When it has mounted only other parts of it, the path is one inside the file system, after its source. `host` is of
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
    """(uid, gid) on the host of the container's root: what files that we create in its root must belong to. From within
    the same user namespace (rootless podman's hooks) its root is ours; the map would name the user's ids outside."""
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
    """The mount namespace of process `pid`. `with` goes in and comes back; `close` lets go of all descriptors."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fds: list[int] = []
        try:
            self.pidfd = self._keep(syscalls.pidfd_open(pid))
            self._theirs = self._open(f"/proc/{pid}/ns/mnt")
            self._ours = self._open("/proc/self/ns/mnt")
            self._root = self._open("/", os.O_PATH)
            self._cwd = self._open(".", os.O_PATH)
            self.owner = container_owner(pid)
            self.require_alive()
            if os.path.samestat(os.fstat(self._theirs), os.fstat(self._ours)):
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
        """Raises when the pinned process is gone: what was read through its pid may then be another's."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        if poll.poll(0):
            raise KernelError(f"the container's process {self.pid} has exited", "see why the runtime's create failed")

    def is_ours(self) -> bool:
        """Whether its mounts were made by those who may mount on this host: in a user namespace of his own everybody
        may. Source: ioctl_ns(2), NS_GET_USERNS."""
        import fcntl

        owner = fcntl.ioctl(self._theirs, 0xB701)
        try:
            return os.path.samestat(os.fstat(owner), os.stat("/proc/self/ns/user"))
        finally:
            os.close(owner)

    def __enter__(self) -> Namespace:
        syscalls.setns(self._theirs, f"/proc/{self.pid}/ns/mnt")
        return self

    def __exit__(self, kind: Optional[type], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        syscalls.setns(self._ours, "/proc/self/ns/mnt")  # this also moves root and cwd to the namespace's root
        os.fchdir(self._root)
        os.chroot(".")
        os.fchdir(self._cwd)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())
