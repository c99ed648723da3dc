"""Read the mount tables of other namespaces, if nothing better is known (rare, but on the start path). Never called
with a lock held.

    read(last)              -> Found    a table for each root in use in a namespace, of owners up to `last`
    user_of(device, point)  -> (pid, what was left out)

Any user and any container can create many user namespaces, mounts and processes. So the namespaces of our own user
namespace come first, since only a process that may mount on this host can create those. Of all other tables a bounded
number is read, root's before users', until a deadline, and only the beginning of a large table: the mounts of the
container's runtime come first. The result lists what was left out.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

from ..system import procs
from . import storage

OURS, ROOT, USER = range(3)  # mount namespaces of our user namespace, of one that root created, of any other
_NS_GET_USERNS, _NS_GET_OWNER_UID = 0xB701, 0xB704  # ioctl_ns(2)
_MAX_TABLE_BYTES = 1 << 20
_MAX_VIEWS = 4  # roots in one namespace, of its oldest processes
_MAX_OTHERS = 4096  # tables in namespaces that are not ours
_DEADLINE_S = 3.0  # for those


class Table(NamedTuple):
    """The mounts that `process` sees. `owner`: of its mount namespace."""

    process: procs.Process
    owner: int
    mountinfo: bytes


class Found(NamedTuple):
    tables: tuple[Table, ...]
    left_out: str  # what was not read, in a few words; "": nothing


def read(last: int = USER) -> Found:
    """Return the tables by owner, then by the age of a process that has them."""
    views = sorted(_views(last), key=lambda view: view[1])
    tables: list[Table] = []
    short = done = others = 0
    until = 0.0
    for process, owner in views:
        if owner != OURS:
            until = until or time.monotonic() + _DEADLINE_S
            others += 1
            if others > _MAX_OTHERS or time.monotonic() > until:
                break
        data, whole = _table(process.pid)
        tables += [Table(process, owner, data)] if data else []
        short += not whole
        done += 1
    words = []
    if done < len(views):
        words.append(f"{len(views) - done} mount tables were not read")
    if short:
        words.append(f"{short} were read up to {_MAX_TABLE_BYTES >> 20} MiB only")
    return Found(tuple(tables), " and ".join(words))


def _views(last: int) -> list[tuple[procs.Process, int]]:
    """Yield the oldest process for each root in each mount namespace, and the namespace's owner."""
    seen: dict[str, set[str]] = {}  # namespace -> roots in it
    owners: dict[str, int] = {}
    found: list[tuple[procs.Process, int]] = []
    us = os.stat("/proc/self/ns/user")
    for process in sorted(_processes(), key=lambda one: (one.start, one.pid)):
        base = f"/proc/{process.pid}"
        try:
            namespace = os.readlink(f"{base}/ns/mnt")
            roots = seen.setdefault(namespace, set())
            root = os.readlink(f"{base}/root") if len(roots) < _MAX_VIEWS else ""
            if not root or root in roots:
                continue
            if namespace not in owners:
                owners[namespace] = _owner(f"{base}/ns/mnt", us)
        except OSError:  # exited, or a zombie
            continue
        roots.add(root)
        if owners[namespace] <= last:
            found.append((process, owners[namespace]))
    return found


def _processes() -> Iterator[procs.Process]:
    for name in os.listdir("/proc"):
        process = procs.find(int(name)) if name.isdigit() else None
        if process is not None:
            yield process


def _owner(path: str, us: os.stat_result) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        owner = fcntl.ioctl(fd, _NS_GET_USERNS)
    except OSError:  # EPERM: neither ours nor a descendant
        return USER
    finally:
        os.close(fd)
    try:
        if os.path.samestat(os.fstat(owner), us):
            return OURS
        uid = int.from_bytes(fcntl.ioctl(owner, _NS_GET_OWNER_UID, bytes(4)), "little")
        return ROOT if uid == os.geteuid() else USER
    finally:
        os.close(owner)


def _table(pid: int) -> tuple[bytes, bool]:
    """Return (complete lines of a table, whether these are all)."""
    data = b""
    try:
        fd = os.open(f"/proc/{pid}/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b"", True
    try:
        while len(data) < _MAX_TABLE_BYTES:
            part = os.read(fd, 1 << 16)
            if not part:
                return data, True
            data += part
    except OSError:  # it has exited
        return b"", True
    finally:
        os.close(fd)
    return data[: data.rfind(b"\n") + 1], False


def user_of(device: str, point: str) -> tuple[int, str]:
    """Find a process in another mount namespace with the file system `device` ("major:minor") mounted at `point` of its
    root or, before pivot_root, of its future root. Return (pid or 0, what was left out). Other namespaces have copies
    of the host's own mount at other paths."""
    if not device:
        return 0, ""
    mine = os.readlink("/proc/self/ns/mnt")
    tables, left_out = read()
    for table in tables:
        for line in table.mountinfo.split(b"\n"):
            fields = line.split(b" ", 5)
            if len(fields) > 5 and fields[2] == device.encode() and fields[4].endswith(point.encode()):
                try:
                    if os.readlink(f"/proc/{table.process.pid}/ns/mnt") != mine:
                        return table.process.pid, ""
                except OSError:
                    break
    return 0, left_out


def page_device(state_dir: str, container_id: str) -> str:
    """Return the "major:minor" of a container's tmpfs, as in mountinfo; "" if it has none."""
    folder = storage.container_dir(state_dir, container_id)
    try:
        device, outside = os.lstat(os.path.join(folder, "rw")).st_dev, os.lstat(folder).st_dev
    except OSError:
        return ""
    return "" if device == outside else f"{os.major(device)}:{os.minor(device)}"
