"""Compare the memory that the driver counts for processes with the limits of their containers. This finds programs that
bypass the shim. Not on the start path.

    judge(leases, gpus, owner)  -> Comparison  has no side effects
    Owners(leases)              -> owner    by cgroup, else by pid namespace
    Watch().follow(...)                     reports once, and stops the container if configured

A container can write any value into its usage file, but it cannot change the driver's numbers. The driver takes memory
for streams and graphs that no call can refuse, and some drivers give the shim no count. So a container is over its
limit if the driver counts more than the limit plus `slack_bytes` for its processes. Leases and the driver's numbers
are not read at the same moment, so `Watch` acts only if two consecutive comparisons find a container over its limit.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Callable, NamedTuple, Optional

from ..core.model import Device, Lease
from ..gpu.nvml_usage import Gpu
from ..state import audit_log
from ..system import cgroup, procs

REPORT, STOP = "report", "stop"
_MIB = 1 << 20
Owner = Callable[[int], Optional[str]]  # pid on this host -> id of the container


class Finding(NamedTuple):
    """A container's usage of one device, from the driver. `slot` None: the container has no share of this device."""

    id: str
    uuid: str
    slot: Optional[int]
    physical_bytes: int
    limit_bytes: Optional[int]  # None: no limit
    slack_bytes: int
    pids: tuple[int, ...]

    @property
    def over_bytes(self) -> int:
        """Bytes beyond the limit and the slack; 0 if the limit is kept."""
        if self.limit_bytes is None:
            return 0
        return max(0, self.physical_bytes - self.limit_bytes - self.slack_bytes)


class Comparison(NamedTuple):
    """The use of all containers beside their limits. `unshared_bytes`: by uuid, the memory of processes that are in no
    container with a share."""

    findings: tuple[Finding, ...]
    unshared_bytes: dict[str, int]


def slack_bytes(device: Device, processes: int) -> int:
    """The memory by which an honest container may exceed its limit: what the driver takes without a reservation, and
    the error of models where the shim has no count of the driver's."""
    return processes * max(64 * _MIB, device.context_bytes // 4)


def judge(leases: Iterable[Lease], gpus: Mapping[str, Gpu], owner: Owner) -> Comparison:
    """A finding for each container on each device where it has a share or a process. `leases`: of running
    containers."""
    held = {lease.id: lease for lease in leases}
    unshared_bytes = dict.fromkeys(gpus, 0)
    used: dict[tuple[str, str], dict[int, int]] = {
        (lease.id, share.device.uuid): {}
        for lease in held.values()
        for share in lease.shares
        if share.device.uuid in gpus
    }
    for uuid, gpu in gpus.items():
        for process in gpu.processes:
            container_id = owner(process.pid)
            if container_id in held:
                used.setdefault((str(container_id), uuid), {})[process.pid] = process.used_bytes or 0
            else:
                unshared_bytes[uuid] += process.used_bytes or 0
    return Comparison(tuple(_finding(held[key[0]], key[1], pids) for key, pids in used.items()), unshared_bytes)


def _finding(lease: Lease, uuid: str, used: Mapping[int, int]) -> Finding:
    share = next((share for share in lease.shares if share.device.uuid == uuid), None)
    physical, pids = sum(used.values()), tuple(sorted(used))
    if share is None:
        return Finding(lease.id, uuid, None, physical, 0, 0, pids)
    limit = share.memory_limit_bytes
    if limit is not None:  # in its migration slice an oversubscribed share has all its memory on the device
        limit = max(limit, share.draining_bytes, share.virtual_bytes)
    return Finding(lease.id, uuid, share.slot, physical, limit, slack_bytes(share.device, len(pids)), pids)


class Owners:
    """Finds the container of a process: by its cgroup if only one container uses that, else by its pid namespace.
    Programs that an unprivileged user starts with `gpushare run` share the user's cgroup, so only a pid namespace of
    their own identifies them."""

    def __init__(self, leases: Sequence[Lease]) -> None:
        own_cgroup = procs.cgroup_of(os.getpid())
        paths = [lease.cgroup.rstrip("/") for lease in leases]
        sharing = Counter(paths)
        self._cgroups = {
            path: lease.id
            for lease, path in zip(leases, paths)
            if path and sharing[path] == 1 and not f"{own_cgroup}/".startswith(f"{path}/")
        }
        inits = [procs.living(lease.init_pid, lease.init_start) for lease in leases]
        namespaces = [_pid_namespace(pid) for pid in inits]
        own_namespace, living = _pid_namespace(os.getpid()), Counter(namespaces)
        self._namespaces = {
            namespace: lease.id
            for lease, namespace in zip(leases, namespaces)
            if namespace and namespace != own_namespace and living[namespace] == 1
        }
        self._inits = {pid: lease.id for pid, lease in zip(inits, leases) if pid}

    def __call__(self, pid: int) -> Optional[str]:
        path = procs.cgroup_of(pid)
        while path and path != "/":
            if path in self._cgroups:
                return self._cgroups[path]
            path = path.rpartition("/")[0]
        return self._inits.get(pid) or self._namespaces.get(_pid_namespace(pid))


def _pid_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:  # the process has ended
        return ""


class Watch:
    """Remembers earlier comparisons."""

    def __init__(self) -> None:
        self._over: set[tuple[str, str]] = set()  # (container id, device uuid) that was over at the previous comparison
        self._reported: set[tuple[str, str]] = set()
        self.exceeded: dict[str, int] = {}  # container id -> how often it was found over a limit

    def follow(self, leases: Sequence[Lease], comparison: Comparison, log: str, action: str) -> None:
        """Log each container and device that is over its limit for the second time in a row; with `action` STOP, also
        stop the container."""
        by_id = {lease.id: lease for lease in leases}
        over = {(one.id, one.uuid): one for one in comparison.findings if one.over_bytes}
        confirmed = [one for key, one in over.items() if key in self._over]
        self._reported &= over.keys()
        for one in confirmed:
            lease = by_id[one.id]
            if (one.id, one.uuid) not in self._reported:
                self.exceeded[one.id] = self.exceeded.get(one.id, 0) + 1
                self._reported.add((one.id, one.uuid))
                limit = one.limit_bytes or 0
                audit_log.exceeded(log, lease, one.uuid, one.physical_bytes, limit, action)
            if action == STOP:
                stop(lease, one.pids, Owners(leases))  # again, because pids may have been reused
        self._over = set(over)
        self.exceeded = {key: count for key, count in self.exceeded.items() if key in by_id}


class Stopped(NamedTuple):
    """The processes of a container that got SIGKILL, which may live for some time. `by_us`: one of them ran until then,
    so the container did not end by itself."""

    processes: tuple[procs.Process, ...]
    by_us: bool


def stop(lease: Lease, pids: Iterable[int], owner: Owner) -> Stopped:
    """Kill the container's first process, which ends its pid namespace, and the processes that use the device, which
    would survive in the host's pid namespace. Kill only processes that still belong to the container, and do not wait
    until they have ended."""
    # The owner comes after the start time: a process that has got the pid by then gets no signal
    living = [process for process in map(procs.find, pids) if process is not None]
    found = {process.pid: process for process in living if owner(process.pid) == lease.id}
    if procs.alive(lease.init_pid, lease.init_start):
        found = {lease.init_pid: procs.Process(lease.init_pid, lease.init_start, ""), **found}
    by_us = False
    for process in found.values():
        by_us = not procs.is_exiting(process.pid) or by_us  # directly before the signal
        procs.wait(process, 0, signal.SIGKILL)
    for pid in found:
        cgroup.thaw(pid)
    return Stopped(tuple(found.values()), by_us)
