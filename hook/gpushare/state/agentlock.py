"""The lock that `gpushare agent` holds while it runs: <state>/agent.

take(state_dir)    -> descriptor of the lock; raises CapacityError if another agent holds it
is_held(state_dir) -> whether an agent runs
"""

from __future__ import annotations

import fcntl
import os

from ..core.errors import CapacityError, KernelError, of_file
from ..system import filelock

FILE = "agent"
_WAIT_S = 0.5  # `is_held` of another process holds it for a moment


def take(state_dir: str) -> int:
    """Take the lock for the life of this process. Raise CapacityError or KernelError."""
    path = os.path.join(state_dir, FILE)
    try:
        fd = filelock.open_own(path)
    except OSError as error:
        raise of_file(error, path) from error
    try:
        filelock.take(fd, path, _WAIT_S)
    except KernelError:
        os.close(fd)
        raise CapacityError(f"{path}: another gpushare agent runs", "stop it first") from None
    return fd


def is_held(state_dir: str) -> bool:
    """Return whether an agent holds the lock; False if that cannot be known."""
    try:
        fd = os.open(os.path.join(state_dir, FILE), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
