"""Detect rootless operation and find the state directory for it (start path).

    is_rootless() -> bool     an ordinary user, also as "root" of its own user namespace (rootless podman)
    give_away(file, owner)    make a uid without processes the owner of a file
    require_mounts()          raise unless the process may mount: root, or root of such a namespace
    state_dir()   -> str      the default state directory

Rootless is cooperative. The state is the user's own files in a plain directory, so shares of other users are not
counted. There is no device cgroup. The user could also have started the program without gpushare.
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
COOPERATIVE = "rootless, so cooperative only: no device cgroup, and shares of other users are not counted"


def is_rootless() -> bool:
    """Whether this process lacks root rights on this host. A process that may write to /run is root of this host or of
    a whole machine-like container, unless its root is one ordinary user: rootless docker has a writable /run. Root on a
    host with a read-only /run gets an error later that reports it."""
    if os.access(_RUN, os.W_OK) and not _is_one_user(_uid_map()):
        return False
    return os.geteuid() != 0 or _uid_map() != _WHOLE_MAP


def give_away(file: Union[int, str], owner: int) -> None:
    """Make a uid that has no process the owner of a file or descriptor, unless rootless. Raises OSError."""
    if not is_rootless():
        try:
            os.chown(file, owner, owner)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: the host is in a user namespace without that uid
                raise


def require_mounts() -> None:
    """Raise KernelError if this process may not change a container's mounts. Rootless podman calls hooks and runtimes
    in its user namespace, but a bare runc calls them outside of the container's."""
    if os.geteuid() != 0 and is_rootless():
        raise KernelError(
            f"user {os.geteuid()} may not change the mounts of a container that is started this way",
            "use rootless podman or `gpushare run`, or run as root",
        )


def _is_one_user(uid_map: list[str]) -> bool:
    """Whether root of this user namespace is one user of the namespace above, not a range as in a system container."""
    return len(uid_map) == 3 and uid_map[0] == "0" != uid_map[1] and uid_map[2] == "1"


def _uid_map() -> list[str]:
    """The first line of this process's map: inside, outside, count. Rootless podman maps its user there."""
    try:
        return syscalls.lines_of("/proc/self/uid_map")[0].split()
    except (OSError, IndexError):
        return _WHOLE_MAP


def real_uid() -> int:
    """This user's id on the host."""
    inside, outside, count = (int(field) for field in _uid_map())
    uid = os.geteuid()
    return uid - inside + outside if inside <= uid < inside + count else uid


def state_dir() -> str:
    """/run/gpushare; for a user, `gpushare` in the runtime directory of the user's session. `storage.prepare` checks
    later whether it is usable: a container without a request needs no state directory."""
    if not is_rootless():
        return constants.STATE_DIR
    named = os.environ.get("XDG_RUNTIME_DIR", "")
    base = named if _is_own_directory(named) else f"/run/user/{real_uid()}"
    return f"{base.rstrip('/')}/gpushare"


def _is_own_directory(path: str) -> bool:
    """Whether only this user can write there."""
    try:
        status = os.stat(path)
    except OSError:
        return False
    return path.startswith("/") and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def hint() -> str:
    """The hint for a state directory that cannot be used."""
    return "set XDG_RUNTIME_DIR to a directory of yours, or run as root" if is_rootless() else "run as root"
