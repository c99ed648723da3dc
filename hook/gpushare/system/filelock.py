"""Take file locks with a time limit (start path).

    refuse_foreign(directory)   raises KernelError if an ordinary user owns it, except this one
    open_own(path)    open a lock file that no other user can open
    take(fd, path)    take an exclusive flock; raises KernelError after WAIT_S, or `wait_s`
    is_locked(path)   whether a process has a lock of fcntl(2) on a file

Only the owner can open a lock file: any process that can open a file, even for reading, can lock it for ever.
A container start waits in the kernel without a limit here, since the start has its own deadline (deadline.watch).
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import struct
import time

from ..core.errors import KernelError
from ..core.quoting import shown

WAIT_S = 20.0
_FLOCK = "hhqqi4x"  # struct flock: l_type, l_whence, l_start, l_len, l_pid
_MAX_OFFSET = (1 << 62) - 1  # a tenant can write any number


def require_own(directory: str) -> None:
    """Raise KernelError if another user owns the directory. Raises OSError."""
    uid, owner = os.geteuid(), os.stat(directory).st_uid
    if owner != uid:
        what = f"state directory {shown(directory)} belongs to uid {owner}, not {uid}"
        raise KernelError(what, f"chown {uid} {directory}")


def refuse_foreign(directory: str) -> None:
    """Raise KernelError if another ordinary user owns the directory: its files name processes to stop, mounts to
    detach and directories to remove."""
    try:
        owner = os.stat(directory).st_uid
    except OSError:
        return
    if owner not in (0, os.geteuid()):
        raise KernelError(
            f"state directory {shown(directory)} is of uid {owner}, who could make this command remove other files",
            f"run it as that user: sudo -u '#{owner}' gpushare ...",
        )


def open_own(path: str) -> int:
    """Open the lock file, creating it if needed. Raises KernelError if another user made it or can open it, OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    status, uid = os.fstat(fd), os.geteuid()
    if not stat.S_ISREG(status.st_mode) or status.st_uid != uid or status.st_mode & 0o077 or status.st_nlink > 1:
        os.close(fd)
        raise KernelError(f"{shown(path)} is not a file of uid {uid} alone with mode 600", f"rm {path}")
    return fd


def take(fd: int, path: str, wait_s: float = 0.0) -> None:
    """Take an exclusive lock. Raises KernelError if another process keeps it, OSError."""
    wait_s = wait_s or WAIT_S
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        fcntl.flock(fd, fcntl.LOCK_EX)
        return
    until, pause_s = time.monotonic() + wait_s, 0.001
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise KernelError(
                    f"{shown(path)}: another process has held this lock for {wait_s:.0f} s", f"find it: fuser -v {path}"
                ) from None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)


def is_locked(path: str, start: int = 0, length: int = 0) -> bool:
    """Return whether a process has locked the file of a tenant; with `length`, whether it has locked these bytes. A
    mapping keeps the lock of its open file. Never waits."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return error.errno == errno.EAGAIN  # a file lease: a process has the file open
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start & _MAX_OFFSET, length, 0)
        return bool(struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        os.close(fd)
