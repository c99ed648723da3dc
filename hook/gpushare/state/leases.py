"""Leases: which container holds which part of which device (start path).

    reservation.reserve(...)  -> "reserved", owned by the process of a start
    hold(...)                 -> "held", owned by the container's init
    leaseend.release(...)     removed with its directory; idempotent, needs no pid

A lease is dead when its owner is (pid *and* start time), or when it is of another boot. A dead lease does not count;
the next start or prune replaces or removes it. An unreadable lease blocks its devices (all devices if even these are
unknown) until an administrator frees it with `gpushare prune --assume-free`.

The lock is one flock, held for reads, renames and arithmetic only: never across a subprocess, NVML or a mount.
"""

import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple, Optional, Union

from ..core import constants
from ..core.errors import KernelError, of_file
from ..core.model import Lease, Node, Share
from ..core.quoting import shown
from ..system import filelock, procs
from . import accounts, activity_files, leasefile, leftover, migration, shm_abi, storage
from .accounts import Closed

_MAX_BYTES = 1 << 20
_USUAL_BYTES = 16 << 10
Ended = Callable[[Closed], None]  # called without the lock for each released lease


class Damaged(NamedTuple):
    """An unreadable lease. `uuids` None: not even its devices are known."""

    id: str
    reason: str
    uuids: Optional[frozenset[str]]


class View(NamedTuple):
    """All leases at one moment."""

    live: tuple[Lease, ...]
    dead: tuple[tuple[Lease, str], ...]  # with the reason, for people
    damaged: tuple[Damaged, ...]
    partial: tuple[str, ...]  # ids of directories without a lease: a start was killed in between

    def blocked(self, node: Node) -> frozenset[str]:
        """Return the uuids of devices in unknown use."""
        everything = frozenset(device.uuid for device in (*node.inventory.devices, *node.inventory.mig))
        return frozenset().union(*(everything if d.uuids is None else d.uuids for d in self.damaged))


class locked:
    """Hold the lease lock. The kernel releases it if the process dies. Never created here: it marks a complete
    state."""

    def __init__(self, state_dir: str) -> None:
        self._path = os.path.join(state_dir, "lock")
        self._fd = -1

    def __enter__(self) -> None:
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise of_file(error, self._path) from error
        try:
            filelock.take(self._fd, self._path)
        except BaseException:
            os.close(self._fd)
            raise

    def __exit__(self, kind: Optional[type], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        os.close(self._fd)


def why_dead(state_dir: str, lease: Lease, boot_id: str) -> str:
    """Return why this lease is dead; "" while it is alive. A container in the host's pid namespace, or a pod's, can
    outlive its init."""
    if lease.boot_id != boot_id:
        return "of another boot"
    if lease.state == "reserved":
        dead = not procs.alive(lease.creator_pid, lease.creator_start)
        return f"its start (pid {lease.creator_pid}) was killed" if dead else ""
    if procs.alive(lease.init_pid, lease.init_start) or _outlived(state_dir, lease):
        return ""
    return (
        f"its program (pid {lease.init_pid}) has ended" if ends(lease) else f"its init (pid {lease.init_pid}) is gone"
    )


def _outlived(state_dir: str, lease: Lease) -> bool:
    if lease.first:
        return False
    return leftover.lives(state_dir, lease)


def ends(lease: Lease) -> bool:
    """Return whether a dead lease is normal: no engine reports the end of a program that `gpushare run` started."""
    return lease.dialect == constants.RUN_DIALECT and lease.state == "held"


def _read_file(state_dir: str, container_id: str, name: str) -> bytes:
    fd = os.open(
        os.path.join(storage.container_dir(state_dir, container_id), name),
        os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK,
    )
    try:
        data = os.read(fd, _USUAL_BYTES)  # allocating a megabyte would take longer than everything else here
        return data if len(data) < _USUAL_BYTES else data + os.read(fd, _MAX_BYTES)
    finally:
        os.close(fd)


def _read(state_dir: str, container_id: str) -> Lease:
    """Parse lease.json. Raise OSError or ValueError."""
    data = _read_file(state_dir, container_id, storage.LEASE)
    if b'"cgroup_id":' not in data:
        data = migration.lease_json(data, lambda: _read_file(state_dir, container_id, migration.HELD))
    return leasefile.from_json(data, container_id)


def _damaged(state_dir: str, container_id: str, reason: str) -> Damaged:
    """Return a damaged lease, with the devices of its limits file, which is complete or absent."""
    path = os.path.join(storage.container_dir(state_dir, container_id), "share", "limits")
    try:
        uuids: Optional[frozenset[str]] = frozenset(limit.uuid for limit in storage.read_limits(path).devices)
    except shm_abi.RegionError:
        uuids = None
    return Damaged(container_id, reason, uuids)


def judged(state_dir: str, container_id: str) -> Union[Lease, Damaged, None]:
    """Return the lease of one container; None if a start was killed before it wrote one. A start writes its lease
    first, so files without a lease mean that the lease was lost."""
    try:
        return _read(state_dir, container_id)
    except FileNotFoundError:
        share = os.path.join(storage.container_dir(state_dir, container_id), "share")
        return _damaged(state_dir, container_id, f"{storage.LEASE} is missing") if os.path.lexists(share) else None
    except (OSError, ValueError) as error:
        return _damaged(state_dir, container_id, f"{storage.LEASE} is damaged: {error}")


def view(state_dir: str) -> View:
    """Return every lease with its state. Without the lock the result may be outdated, which is fine for display."""
    boot_id = procs.boot_id()
    live: list[Lease] = []
    dead: list[tuple[Lease, str]] = []
    damaged: list[Damaged] = []
    partial: list[str] = []
    try:
        ids = sorted(os.listdir(os.path.join(state_dir, "containers")))
    except FileNotFoundError:
        ids = []
    except OSError as error:
        raise of_file(error, state_dir) from error
    for container_id in ids:
        lease = judged(state_dir, container_id)
        if lease is None:
            if os.path.isdir(storage.container_dir(state_dir, container_id)):
                partial.append(container_id)
        elif isinstance(lease, Damaged):
            damaged.append(lease)
        elif reason := why_dead(state_dir, lease, boot_id):
            dead.append((lease, reason))
        else:
            live.append(lease)
    return View(tuple(live), tuple(dead), tuple(damaged), tuple(partial))


def _write(state_dir: str, lease: Lease) -> None:
    storage.write_lease(state_dir, lease.id, leasefile.to_json(lease))


def drop(state_dir: str, container_id: str, shares: Sequence[Share]) -> bool:
    """Remove a lease, its activity files first: a process that is killed in between leaves a dead lease that still
    names them. Return False if there is none. The caller holds the lock."""
    for share in shares:
        try:
            activity_files.free(state_dir, share.device.uuid, share.page)
        except KernelError:
            pass  # the next start on that device settles it; even a lost directory must not keep a lease
    return storage.discard(state_dir, container_id)


def discard_dead(state_dir: str, seen: View) -> tuple[list[Closed], list[str]]:
    """Discard dead and partial leases; return these leases and ids. The caller holds the lock."""
    final = [accounts.closed(state_dir, lease, known=False) for lease, _ in seen.dead]
    dead = [one for one in final if drop(state_dir, one.lease.id, one.lease.shares)]
    return dead, [name for name in seen.partial if drop(state_dir, name, ())]


def rewrite(state_dir: str, lease: Lease) -> None:
    """Replace the lease.json of a container. The caller holds the lock. Raise KernelError."""
    _write(state_dir, lease)


def of_init(lease: Lease, pid: int) -> Lease:
    """Return `lease` with the data that tells whether a process outlives this init."""
    if procs.is_first(pid):
        return lease._replace(first=True, cgroup_id=0)
    directory, number = leftover.own_cgroup(pid)
    return lease._replace(cgroup_dir=directory, cgroup_id=number)


def hold(state_dir: str, lease: Lease, init: procs.Process, cgroup: str) -> Lease:
    """Pass the reserved `lease` to the container. Raise KernelError if it was removed meanwhile, or if the container's
    init has died, since nothing would release the lease then."""
    held = lease._replace(state="held", init_pid=init.pid, init_start=init.start, cgroup=cgroup)
    held = of_init(held, init.pid)
    with locked(state_dir):
        if find(state_dir, lease.id) != lease:
            raise KernelError(
                f"the lease of {shown(lease.id)} was removed during its start", "start the container again"
            )
        if not procs.alive(init.pid, init.start):
            raise KernelError(f"the container's init (pid {init.pid}) died during its start")
        _write(state_dir, held)
    return held


def find(state_dir: str, container_id: str) -> Optional[Lease]:
    """Return the lease of one container, alive or dead; None if there is no readable one."""
    try:
        return _read(state_dir, container_id)
    except (OSError, ValueError):
        return None


def is_held_by(state_dir: str, container_id: str, init: procs.Process) -> bool:
    """Return whether this container has its lease already."""
    lease = find(state_dir, container_id)
    return lease is not None and lease.state == "held" and (lease.init_pid, lease.init_start) == (init.pid, init.start)


def undo(state_dir: str, container_id: str) -> None:
    """Remove the lease that this process reserved or held under this id, and no other lease."""
    me = procs.myself()
    with locked(state_dir):
        lease = find(state_dir, container_id)
        if lease is not None and (lease.creator_pid, lease.creator_start) == (me.pid, me.start):
            drop(state_dir, container_id, lease.shares)
