"""Find out whether a process of a container outlives its init (rare, but on the start path).

The kernel ends every process of a pid namespace before its first process becomes a zombie, so no process outlives an
init that is the first (`procs.is_first`). In the pid namespace of the host or a pod, processes can remain. They are
found in constant time, without a walk over processes or mount tables, which tenants and users can make long:

    in the cgroup that `own_cgroup` recorded     no other cgroup ever gets the inode number of its directory
    by a lock on the usage file                  only if there is no such cgroup. shim/core/region.c takes it; kept
                                                 while any process has the file mapped, also after fork, chroot,
                                                 pivot_root or in another cgroup

The lock proves less than the cgroup: a container can pass its descriptor to a process outside (SCM_RIGHTS), which would
keep the share for ever. To leave its own cgroup, a process needs the rights of the host's root.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Optional

from ..core import constants
from ..core.model import Lease
from ..system import cgroup, filelock
from . import storage

_MAX_DEPTH = 8
_MAX_CGROUPS = 256  # below a container's own; more than these count as in use


def own_cgroup(init: int) -> tuple[str, int]:
    """Return (directory, inode number) of the container's own cgroup; ("", 0) if it shares one with this process
    (rootless podman without cgroups)."""
    try:
        theirs, own = cgroup.apart(init)
    except OSError:
        return "", 0
    is_self = init == os.getpid()
    for directory in theirs if is_self else own:
        try:
            if not directory:
                continue
            if is_self and _read(directory, "cgroup.procs").split() != [str(init).encode()]:
                continue  # the cgroup of this program's parent
            return directory, os.stat(directory).st_ino
        except OSError:
            continue
    return "", 0


def lives(state_dir: str, lease: Lease) -> bool:
    """Return whether a process of this held lease lives, after the end of its init."""
    if lease.cgroup_id > 0 and lease.dialect != constants.RUN_DIALECT:
        return _populated(lease.cgroup_dir, lease.cgroup_id)
    if filelock.is_locked(os.path.join(storage.container_dir(state_dir, lease.id), "rw", "usage")):
        return True
    return _populated(lease.cgroup_dir, lease.cgroup_id)


def pids(lease: Lease) -> list[int]:
    """Return the processes in the container's own cgroup and below, of a bounded number of cgroups; none if it has no
    own cgroup."""
    try:
        if lease.cgroup_id <= 0 or os.stat(lease.cgroup_dir).st_ino != lease.cgroup_id:
            return []
    except OSError:
        return []
    found: list[int] = []
    for directory in _below(lease.cgroup_dir):
        try:
            with open(f"{directory}/cgroup.procs", "rb") as file:
                found += map(int, file.read().split())
        except OSError:
            continue  # removed meanwhile, or a threaded cgroup
    return found


def _read(directory: str, name: str) -> bytes:
    with open(f"{directory}/{name}", "rb") as file:
        return file.read(1 << 16)


def _populated(directory: str, inode: int) -> bool:
    """Return whether a process is in this cgroup or below it. `inode` 0: whichever cgroup has the name now."""
    try:
        if not directory or (inode and os.stat(directory).st_ino != inode):
            return False
    except OSError:
        return False
    try:
        return b"populated 1" in _read(directory, "cgroup.events")
    except OSError:
        pass  # cgroup v1 does not have it
    found = _populated_v1(directory)
    return found is None or found


def _populated_v1(top: str) -> Optional[bool]:
    """Return whether there is a process; None if there are too many cgroups to search."""
    try:
        return any(_has_process(directory) for directory in _below(top, complete=True))
    except _TooMany:
        return None


def _has_process(directory: str) -> bool:
    try:
        return bool(_read(directory, "cgroup.procs"))
    except OSError:  # removed meanwhile
        return False


class _TooMany(Exception):
    """There are more cgroups than are searched."""


def _below(top: str, complete: bool = False) -> Iterator[str]:
    """Yield `top` and the cgroups below it, of a bounded number and depth. `complete`: raise _TooMany for more."""
    waiting, seen = [(top, 0)], 0
    while waiting:
        is_too_much = len(waiting) > _MAX_CGROUPS
        directory, depth = waiting.pop()
        seen += 1
        if is_too_much or seen > _MAX_CGROUPS or depth > _MAX_DEPTH:
            if complete:
                raise _TooMany
            return
        yield directory
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((entry.path, depth + 1))
                        if len(waiting) > _MAX_CGROUPS:
                            break
        except OSError:
            continue  # removed meanwhile
