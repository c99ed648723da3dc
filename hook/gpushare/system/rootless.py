"""Who has no rights over this host, and where such a process keeps its state (start path).

    is_rootless() -> bool     an ordinary user, also as "root" of a user namespace of his own (rootless podman)
    give_away(file, owner)    makes a uid without processes the owner of a file
    require_mounts()          raises when he is not root even of such a namespace: then nothing can be mounted
    state_dir()   -> str      where state is when nobody names a directory

Rootless is cooperative: the state is the user's own files, in a plain directory, so nobody counts what other users
hold; there is no device cgroup; whoever started a program could also have started it without us.
"""

from __future__ import annotations

import errno
import os
from typing import Union

from ..core import constants
from ..core.errors import KernelError
from . import syscalls

_RUN = os.path.dirname(constants.STATE_DIR)
_WHOLE_MAP = ["0", "0", "4294967295"]  # uid_map of the initial user namespace; user_namespaces(7)
COOPERATIVE = "rootless, so cooperative only: no device cgroup, and what other users hold is not counted"


def is_rootless() -> bool:
    """One access(2) for root. Who may write to /run is root of this host or of a whole machine-like container; root
    on a host with a read-only /run gets an error that says so."""
    if os.access(_RUN, os.W_OK):
        return False
    return os.geteuid() != 0 or _uid_map() != _WHOLE_MAP


def give_away(file: Union[int, str], owner: int) -> None:
    """Makes a uid that has no process the owner of a file or descriptor, where this process may. Raises OSError."""
    if not is_rootless():
        try:
            os.chown(file, owner, owner)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a host in a user namespace, which does not have that uid
                raise


def require_mounts() -> None:
    """For a container: rootless podman calls hooks and runtimes in its user namespace, a bare runc calls them outside
    of the container's. Raises KernelError."""
    if os.geteuid() != 0 and is_rootless():
        raise KernelError(
            f"user {os.geteuid()} has no rights over the mounts of containers that he starts this way",
            "use rootless podman or `gpushare run`, or be root",
        )


def _uid_map() -> list[str]:
    """The first line of this process's map: inside, outside, count. Rootless podman has its user there."""
    try:
        return syscalls.lines_of("/proc/self/uid_map")[0].split()
    except (OSError, IndexError):
        return _WHOLE_MAP


def state_dir() -> str:
    """/run/gpushare; for a user `gpushare` in the runtime directory of his session. Only looked up here: whether it can
    be used is found out by `storage.prepare`, since a container that asks for nothing needs none."""
    if not is_rootless():
        return constants.STATE_DIR
    inside, outside, count = (int(word) for word in _uid_map())
    uid = os.geteuid()
    real_uid = uid - inside + outside if inside <= uid < inside + count else uid
    named = os.environ.get("XDG_RUNTIME_DIR", "")
    base = named if _is_own_directory(named) else f"/run/user/{real_uid}"
    return f"{base.rstrip('/')}/gpushare"


def _is_own_directory(path: str) -> bool:
    """Whether nobody else can write there."""
    try:
        status = os.stat(path)
    except OSError:
        return False
    return path.startswith("/") and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def hint() -> str:
    """What to do when the state directory cannot be used."""
    return "set XDG_RUNTIME_DIR to a directory of yours, or run as root" if is_rootless() else "run as root"
