"""The place of a state directory: the directory that it is mounted on (rare, but on the start path).

    record(state_dir, mount)                -> None     write the file `place` of a new directory
    elsewhere(state_dir, tables, devices)   -> devices  file systems of state directories at another place, in use there

Hosts that share a kernel can each have a state directory of one path: a node in a chroot, a nested container host, a
test with its own /run. Each is mounted on another directory, so the place tells them apart. The path of a place is
inside its file system, so it is the same in every mount namespace.

A lost directory was at the place of the present one, and may still be mounted elsewhere: in a mount namespace with a
private copy of the mounts, or in a pod that has it as a volume. So a directory is in use elsewhere only if it is
mounted at the place that it has recorded, and if that is not the present directory's. Otherwise, also if either place
is unknown (0.1.0 recorded none), its containers count as our own: what they use is never granted twice."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from ..system import mountns, syscalls

FILE = "place"
_MAX_BYTES = 1 << 13  # more than the longest path
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_RESOLVE = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS | syscalls.RESOLVE_NO_SYMLINKS


def record(state_dir: str, mount: int) -> None:
    """Write the place of the directory `mount`, unless it has one. Raise OSError."""
    mounts = mountns.read_mounts()
    device = _device(mount)
    place = next((place_of(mounts, one) for one in mounts if (one.device, one.root) == (device, "/")), "")
    if not place or _recorded(mount, device):
        return
    fd = os.open(f"{state_dir}/{FILE}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, os.fsencode(place))
    finally:
        os.close(fd)


def place_of(mounts: Sequence[mountns.MountEntry], mount: mountns.MountEntry) -> str:
    """Return the file system and the path in it that `mount` is mounted on; "" if that is not in `mounts`. Pure."""
    for above in mounts:
        point = above.point.rstrip("/")
        if above.id == mount.parent and mount.point.startswith(f"{point}/"):
            return f"{above.device} {above.root.rstrip('/')}{mount.point[len(point) :]}"
    return ""


def elsewhere(state_dir: str, tables: Iterable[tuple[int, bytes]], devices: frozenset[str]) -> frozenset[str]:
    """Return those of `devices` ("major:minor") that are state directories in use at another place. `tables`: (pid,
    mountinfo) from mount namespaces of our own user namespace, since any user can make the others."""
    mine = _recorded_at(state_dir)
    found: set[str] = set()
    for pid, mountinfo in tables if mine and devices else ():
        here = [one for one in devices - found if f" {one} / ".encode() in mountinfo]
        if here:
            mounts = mountns.parse_mounts(mountinfo.decode("utf-8", "surrogateescape").split("\n")[:-1])
            for one in mounts:
                if one.device in here and one.root == "/" and _is_home(pid, mounts, one, mine):
                    found.add(one.device)
    return frozenset(found)


def _is_home(pid: int, mounts: Sequence[mountns.MountEntry], one: mountns.MountEntry, mine: str) -> bool:
    """Return whether this mount of a state directory is at its recorded place, and that is not ours."""
    place = place_of(mounts, one)
    if place in ("", mine):
        return False
    try:
        root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            top = syscalls.openat2(root, one.point, os.O_PATH | os.O_DIRECTORY, resolve=_RESOLVE)
        finally:
            os.close(root)
    except (OSError, syscalls.SyscallError):  # exited, or mounted over
        return False
    try:
        return _recorded(top, one.device) == place
    finally:
        os.close(top)


def _recorded_at(state_dir: str) -> str:
    try:
        top = os.open(state_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return _recorded(top, _device(top))
    finally:
        os.close(top)


def _recorded(top: int, device: str) -> str:
    """Return the recorded place of the state directory `top`, which is of file system `device`; "" if it has none."""
    try:
        fd = os.open(FILE, _READ, dir_fd=top)
    except OSError:
        return ""
    try:
        return os.fsdecode(os.read(fd, _MAX_BYTES)) if _device(fd) == device else ""
    except OSError:
        return ""
    finally:
        os.close(fd)


def _device(fd: int) -> str:
    number = os.fstat(fd).st_dev
    return f"{os.major(number)}:{os.minor(number)}"
