"""What the driver says that processes use, against what their containers may: how a program is caught that goes round
the shim. Not on the start path.

    judge(containers, gpus, owner) -> Look     pure
    Owners(containers)             -> owner    by cgroup, else by pid namespace
    Watch().follow(...)            -> reports once, stops where that is configured

A container's own page is what its processes say; the driver's books are written by nobody in a container. Context sizes
are known only about (`Device.context_bytes`), so a container is over its limit when the driver counts more than the
limit and `slack_bytes` for each of its processes. Two looks in a row must say so before anything is done: leases and
the driver are not read at one moment.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Callable, NamedTuple, Optional

from ..core.model import Device, Lease
from ..gpu.nvml_usage import Gpu
from ..state import audit_log
from ..system import procs

REPORT, STOP = "report", "stop"
_MIB = 1 << 20
Owner = Callable[[int], Optional[str]]  # pid on this host -> id of the container


class Finding(NamedTuple):
    """A container on one device, as the driver sees it. `slot` None: a device that it has no share of."""

    id: str
    uuid: str
    slot: Optional[int]
    physical_bytes: int
    limit_bytes: Optional[int]  # None: no limit
    slack_bytes: int
    pids: tuple[int, ...]

    @property
    def over_bytes(self) -> int:
        """Beyond the limit and the slack; 0: kept."""
        if self.limit_bytes is None:
            return 0
        return max(0, self.physical_bytes - self.limit_bytes - self.slack_bytes)


class Look(NamedTuple):
    """`nobodys_bytes`: by uuid, what processes use that are in no container with a share."""

    findings: tuple[Finding, ...]
    nobodys_bytes: dict[str, int]


def slack_bytes(device: Device, processes: int) -> int:
    """How much the true size of contexts may differ from what the shim charges for them."""
    return processes * max(64 * _MIB, device.context_bytes // 4)


def judge(leases: Iterable[Lease], gpus: Mapping[str, Gpu], owner: Owner) -> Look:
    """Every container on every device where it has a share or a process. `leases`: of containers that run."""
    held = {lease.id: lease for lease in leases}
    nobodys = dict.fromkeys(gpus, 0)
    used: dict[tuple[str, str], dict[int, int]] = {
        (lease.id, share.device.uuid): {}
        for lease in held.values()
        for share in lease.shares
        if share.device.uuid in gpus
    }
    for uuid, gpu in gpus.items():
        for process in gpu.processes:
            whose = owner(process.pid)
            if whose in held:
                used.setdefault((str(whose), uuid), {})[process.pid] = process.used_bytes or 0
            else:
                nobodys[uuid] += process.used_bytes or 0
    return Look(tuple(_finding(held[key[0]], key[1], pids) for key, pids in used.items()), nobodys)


def _finding(lease: Lease, uuid: str, used: Mapping[int, int]) -> Finding:
    share = next((share for share in lease.shares if share.device.uuid == uuid), None)
    physical, pids = sum(used.values()), tuple(sorted(used))
    if share is None:
        return Finding(lease.id, uuid, None, physical, 0, 0, pids)
    limit = share.memory_limit_bytes
    if limit is not None:  # with its turn, an oversubscribed share has on the device what is else on the host
        limit = max(limit, share.draining_bytes, share.virtual_bytes)
    return Finding(lease.id, uuid, share.slot, physical, limit, slack_bytes(share.device, len(pids)), pids)


class Owners:
    """Which container a process of this host is in. A cgroup counts for the container that is alone in it; programs of
    `gpushare run` without rights share their user's, and are told by their pid namespace, if they have one."""

    def __init__(self, leases: Sequence[Lease]) -> None:
        mine = procs.cgroup_of(os.getpid())
        paths = [lease.cgroup.rstrip("/") for lease in leases]
        self._cgroups = {
            path: lease.id
            for lease, path in zip(leases, paths)
            if path and paths.count(path) == 1 and not f"{mine}/".startswith(f"{path}/")
        }
        spaces = [_pid_namespace(lease.init_pid) for lease in leases]
        ours = _pid_namespace(os.getpid())
        self._spaces = {
            space: lease.id
            for lease, space in zip(leases, spaces)
            if space and space != ours and spaces.count(space) == 1
        }
        self._inits = {lease.init_pid: lease.id for lease in leases if lease.init_pid}

    def __call__(self, pid: int) -> Optional[str]:
        path = procs.cgroup_of(pid)
        while path and path != "/":
            if path in self._cgroups:
                return self._cgroups[path]
            path = path.rpartition("/")[0]
        return self._inits.get(pid) or self._spaces.get(_pid_namespace(pid))


def _pid_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:  # gone
        return ""


class Watch:
    """What earlier looks said."""

    def __init__(self) -> None:
        self._over: set[tuple[str, str]] = set()
        self._told: set[tuple[str, str]] = set()
        self.exceeded: dict[str, int] = {}  # by id: how often it was found over a limit

    def follow(self, leases: Sequence[Lease], look: Look, log: str, action: str) -> None:
        """One line for each container and device that is over for the second time in a row, and its end if `action` is
        STOP."""
        by_id = {lease.id: lease for lease in leases}
        over = {(one.id, one.uuid): one for one in look.findings if one.over_bytes}
        confirmed = [one for key, one in over.items() if key in self._over]
        self._told &= over.keys()
        for one in confirmed:
            lease = by_id[one.id]
            if (one.id, one.uuid) not in self._told:
                self.exceeded[one.id] = self.exceeded.get(one.id, 0) + 1
                self._told.add((one.id, one.uuid))
                limit = one.limit_bytes or 0
                audit_log.exceeded(log, lease, one.uuid, one.physical_bytes, limit, action)
            if action == STOP:
                stop(lease, one.pids, Owners(leases))  # who they are now
        self._over = set(over)
        self.exceeded = {key: count for key, count in self.exceeded.items() if key in by_id}


def stop(lease: Lease, pids: Iterable[int], owner: Owner) -> None:
    """SIGKILL for the container's first process, with which its pid namespace ends, and for those that were over: in
    the host's pid namespace they would outlive it. Only processes that still are what they were found to be."""
    found = [procs.find(pid) for pid in pids if owner(pid) == lease.id]
    if procs.alive(lease.init_pid, lease.init_start):
        found.insert(0, procs.find(lease.init_pid))
    for process in found:
        if process is not None:
            procs.kill(process)
