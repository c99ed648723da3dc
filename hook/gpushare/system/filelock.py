"""Take file locks with a time limit (start path).

    open_own(path)    open a lock file that no other user can open
    take(fd, path)    take an exclusive flock; raises KernelError after WAIT_S, or `wait_s`

Only the owner can open a lock file: any process that can open a file, even for reading, can lock it for ever.
A container start waits in the kernel without a limit here, since the start has its own deadline (deadline.watch).
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import time

from ..core.errors import KernelError
from ..core.quoting import shown

WAIT_S = 20.0


def require_own(directory: str) -> None:
    """Raise KernelError if another user owns the directory. Raises OSError."""
    uid, owner = os.geteuid(), os.stat(directory).st_uid
    if owner != uid:
        what = f"state directory {shown(directory)} belongs to uid {owner}, not {uid}"
        raise KernelError(what, f"chown {uid} {directory}")


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
