"""Find out whether a process of a container outlives its init (rare, but on the start path).

The kernel ends every process of a pid namespace before its first process becomes a zombie, so no process outlives an
init that is the first (`procs.is_first`). In the pid namespace of the host or a pod, processes can remain. They are
found in constant time, without a walk over processes or mount tables, which tenants and users can make long:

    in the cgroup that `own_cgroup` recorded     no other cgroup ever gets the inode number of its directory
    by a lock on the usage file                  shim/core/region.c takes it; kept while any process has the
                                                 file mapped, also after fork, chroot, pivot_root or in another cgroup
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from typing import Optional

from ..core import constants
from ..core.model import Lease
from ..system import cgroup, procs
from . import storage

UNKNOWN = -1  # Lease.cgroup_id of versions that recorded none
_MAX_DEPTH = 8
_MAX_CGROUPS = 256  # below a container's own; more than these count as in use
_FLOCK = "hhqqi4x"  # struct flock: l_type, l_whence, l_start, l_len, l_pid


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
    if is_locked(os.path.join(storage.container_dir(state_dir, lease.id), "rw", "usage")):
        return True
    if lease.cgroup_id == UNKNOWN:
        return _populated(_directory_of_0_1_0(lease), 0)
    return lease.cgroup_id > 0 and _populated(lease.cgroup_dir, lease.cgroup_id)


def process_of(lease: Lease) -> int:
    """Return a pid in the container's own cgroup; 0 if none is known."""
    try:
        if lease.cgroup_id > 0 and os.stat(lease.cgroup_dir).st_ino == lease.cgroup_id:
            return int((_read(lease.cgroup_dir, "cgroup.procs").split() or [b"0"])[0])
    except OSError:
        pass
    return 0


def is_locked(path: str) -> bool:
    """Return whether a process has the usage file mapped or locked. Never wait."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return error.errno == errno.EAGAIN  # a file lease: a process has the file open
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        return bool(struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        os.close(fd)


def _directory_of_0_1_0(lease: Lease) -> str:
    """Return the cgroup of a lease of 0.1.0, which recorded only its path; "" if it may be shared."""
    path, mine = lease.cgroup.rstrip("/"), procs.cgroup_of(os.getpid())
    is_run = lease.dialect == constants.RUN_DIALECT and not os.path.basename(path).startswith("gpushare-")
    if not path or is_run or f"{mine}/".startswith(f"{path}/"):
        return ""
    v1, v2 = cgroup.directories(path, path)
    return v1 or v2


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
    """Return the first process found; None if there are too many cgroups to search."""
    waiting, seen = [(top, 0)], 0
    while waiting:
        directory, depth = waiting.pop()
        seen += 1
        if seen > _MAX_CGROUPS or depth > _MAX_DEPTH:
            return None
        try:
            if _read(directory, "cgroup.procs"):
                return True
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((entry.path, depth + 1))
                        if len(waiting) > _MAX_CGROUPS:
                            return None
        except OSError:
            continue  # removed meanwhile
    return False
