"""The lock that `gpushare agent` or `gpushare nri` holds while it runs: <state>/agent, <state>/nri.

take(state_dir, name)    -> descriptor of the lock; raises CapacityError if another such program holds it
is_held(state_dir, name) -> whether such a program runs
kept(fd, state_dir, name) -> the lock, taken again after the state directory was lost
"""

from __future__ import annotations

import fcntl
import os

from ..core.errors import CapacityError, KernelError, of_file
from ..system import filelock
from . import storage

FILE = "agent"
_WAIT_S = 0.5  # `is_held` of another process holds it for a moment


def take(state_dir: str, name: str = FILE) -> int:
    """Take the lock for the life of this process. Raise CapacityError or KernelError."""
    path = os.path.join(state_dir, name)
    try:
        fd = filelock.open_own(path)
    except OSError as error:
        raise of_file(error, path) from error
    try:
        filelock.take(fd, path, _WAIT_S)
    except KernelError:
        os.close(fd)
        raise CapacityError(f"{path}: another gpushare {name} runs", "stop it first") from None
    return fd


def kept(fd: int, state_dir: str, name: str = FILE) -> int:
    """Return the lock at its path: `fd`, or a new one if the state directory was lost and made again. Raise as take."""
    try:
        if os.path.samestat(os.fstat(fd), os.stat(os.path.join(state_dir, name))):
            return fd
    except FileNotFoundError:
        if not storage.is_ready(state_dir):
            return fd
    new = take(state_dir, name)
    os.close(fd)
    return new


def is_held(state_dir: str, name: str = FILE) -> bool:
    """Return whether a program holds the lock; False if that cannot be known."""
    try:
        fd = os.open(os.path.join(state_dir, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
