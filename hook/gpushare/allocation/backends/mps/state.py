"""The MPS daemon of a device, from its files: its state, and what a container gets of it.

    directory(state_dir, uuid)       -> str       mps/<uuid>: pipe/ and log/ of the daemon, shm/, share/, ready
    state(uuid, state_dir)           -> MpsState  running, or why not; reads files and /proc only
    unsupported(site)                -> why not   why this daemon cannot serve a container; None: it can
    ops(shares, config)              -> ops       operations of a plan
    require_offered(before, after, folder)          refuse a changed limit above the daemon's
    grant_of(shares, state_dir, uid) -> Grant     its fields in the limits file

`shares` are the shares whose compute limit MPS enforces: __init__.py of the parent selects them.
`ready` is written last and by rename, so a daemon appears only after its limits are set. share/ has hard links to the
files of pipe/ that clients need. It lacks control_privileged, which can stop the daemon, and the lock file, which could
block the next daemon. Containers mount share/, so a program that starts later finds the new daemon.

Runs on the start path.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from ....core import constants
from ....core.errors import CapacityError, DeviceError
from ....core.model import Config, Request, Share
from ....core.ops import Mount, Op
from ....gpu import driverroot
from ....system import procs

if TYPE_CHECKING:
    from ..base import Site

NAME = "mps"  # the backend
FOLDER = "mps"  # of the state directory
READY = "ready"
VERSION = 1  # of the ready file
ANY_UID = 0xFFFFFFFF  # (uid_t)-1, which no user has
SHM_OWN, SHM_HOST = "own", "host"
_DATA = ("nosuid", "nodev", "noexec")
_NUMBERS = ("pid", "start", "thread_percent", "memory_bytes", "clients", "uid")
_TEXTS = ("boot_id", "driver_version", "build", "shm")


class MpsState(NamedTuple):
    """The control daemon of a device. `problem`: why no container can use it now, with `hint`; "": containers can."""

    problem: str = ""
    hint: str = ""
    pid: int = 0
    start: int = 0  # as in procs
    driver_version: str = ""  # loaded when it was started
    build: str = ""  # of its program, see build_of
    thread_percent: int = 0  # maximum of each client
    memory_bytes: int = 0  # maximum that a client process can pin
    clients: int = 0  # maximum number of client processes
    uid: int = 0  # user that it serves, as the host numbers; ANY_UID: all users
    shm: str = ""  # SHM_OWN: /dev/shm of the daemon and its containers is shm/; SHM_HOST: the host's
    was_running: bool = False  # it was ready, and died or is from an earlier boot

    @property
    def token(self) -> int:
        """An identity of the daemon in 64 bits, for the limits file. A pid has 22 bits at most."""
        return self.start << 22 | self.pid


class Grant(NamedTuple):
    """The fields of MPS in a limits file. `device`: the slot that it enforces, plus one; 0: none. `uid`: the user that
    it serves, as the container numbers."""

    device: int = 0
    token: int = 0
    uid: int = 0


def directory(state_dir: str, uuid: str) -> str:
    return f"{state_dir}/{FOLDER}/{uuid}"


def build_of(path: str) -> str:
    """Return an identity of the program file, which an upgrade under a running daemon changes."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    return f"{status.st_dev:x}:{status.st_ino:x}:{status.st_mtime_ns:x}"


def parse(text: str) -> Optional[dict[str, Any]]:
    """Parse a ready file; None if it is invalid."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("version") != VERSION:
        return None
    numbers = all(type(found.get(key)) is int and 0 <= found[key] < 1 << 63 for key in _NUMBERS)
    return found if numbers and all(type(found.get(key)) is str for key in _TEXTS) else None


def state(uuid: str, state_dir: str) -> MpsState:
    """Return the daemon of `uuid`. Never raise: an unreadable file grants nothing."""
    start_it = f"`gpushare mps start --device {uuid}`"
    text = driverroot.short_read(f"{directory(state_dir, uuid)}/{READY}", 8192)
    if text is None:
        return MpsState("its control daemon is not running on this device", start_it)
    found = parse(text)
    if found is None:
        return MpsState("its ready file is damaged", f"`gpushare mps stop --device {uuid}`, then start")
    known = {key: found[key] for key in MpsState._fields if key in found}
    if found["boot_id"] != procs.boot_id() or not procs.alive(found["pid"], found["start"]):
        dead = f"its control daemon (pid {found['pid']}) has died"
        return MpsState(**{**known, "problem": dead, "hint": start_it, "was_running": True})
    return MpsState(**known)


def unsupported(site: Site) -> Optional[str]:
    """Return why the daemon of this device cannot serve the container; None if it can."""
    uuid, request = site.device.uuid, site.request
    if _several(request, len(site.node.inventory.devices)):
        return "a program connects to the daemon of one GPU, and this container asks for several"
    found = state(uuid, site.node.config.state_dir)
    if found.problem:
        return found.problem
    driver = site.node.inventory.driver_version
    if found.driver_version != driver:
        return f"it was started with driver {found.driver_version}, and {driver} is loaded"
    percent = max((asked for _, asked in request.compute), default=0)
    if percent > found.thread_percent:
        return f"it was started for at most {found.thread_percent}% of compute"
    if found.uid not in (request.uid, ANY_UID):
        return f"it serves one user at a time, uid {found.uid}, and this container runs as uid {request.uid}"
    if found.shm == SHM_HOST and not _is_shm_of(found.pid, request.shm):
        return "it was started with --shm host, and the container's /dev/shm is not the host's (--ipc=host)"
    containers = len(site.ledger.holders.get(uuid, ()))  # `Backend.alone`: they all use it
    if containers >= found.clients:
        return f"it serves {found.clients} processes at most, and {containers} containers use it"
    return None


def _several(request: Request, gpus: int) -> bool:
    chosen = request.selection
    return {"all": gpus, "any": chosen.count, "list": len(chosen.names)}.get(chosen.kind, 1) > 1


def _is_shm_of(pid: int, path: str) -> bool:
    """Whether the container's /dev/shm is the daemon's."""
    try:
        return bool(path) and os.path.samestat(os.stat(path), os.stat(f"/proc/{pid}/root/dev/shm"))
    except OSError:
        return False


def ops(shares: tuple[Share, ...], config: Config) -> tuple[Op, ...]:
    """Mount the pipe directory read-only, which does not prevent connections, and the daemon's /dev/shm over the
    container's: client and server open a file in it by name, and glibc has no other place for it."""
    found: list[Op] = []
    for share in shares:
        uuid, own = share.device.uuid, directory(config.state_dir, share.device.uuid)
        found.append(Mount(f"{own}/share", f"{constants.MPS_DIR}/{uuid}", "dir", ("ro", *_DATA), "where MPS listens"))
        if state(uuid, config.state_dir).shm != SHM_HOST:
            found.append(Mount(f"{own}/shm", "/dev/shm", "dir", _DATA, "memory that MPS and its clients share"))
    return tuple(found)


def require_offered(before: Sequence[Share], after: Sequence[Share], folder: str) -> None:
    """Raise CapacityError for a larger percentage than the daemon gives, since it would keep its own. `folder`:
    containers/<id>."""
    state_dir = os.path.dirname(os.path.dirname(folder))
    for old, new in zip(before, after):
        most = state(new.device.uuid, state_dir).thread_percent
        if most and (new.compute_percent or 0) > max(most, old.compute_percent or 0):
            raise CapacityError(
                f"MPS was started for at most {most}% of compute on {new.device.uuid}", f"ask for at most {most}%"
            )


def grant_of(shares: Sequence[Share], state_dir: str, uid: int) -> Grant:
    """Return the fields for the limits file. It is written after admission, so raise DeviceError if the daemon died
    meanwhile."""
    for share in shares:
        found = state(share.device.uuid, state_dir)
        if found.problem:
            raise DeviceError(f"MPS: {found.problem}", found.hint)
        return Grant(share.slot + 1, found.token, ANY_UID if found.uid == ANY_UID else uid)
    return Grant()
