"""Take borrowed memory back by ending the container that borrowed most (docs/lending.md). Not on the start path.

    Agent(state_dir, log, library).tick()  one round: end a borrower if another container waits for its own request
    Agent.close()                          stop lending on all devices

The shim states in the usage file what a process waits for. The container can write anything there, so a statement
counts only within the container's request, which it may use at any time, and while the driver does not have that much
free memory. All else follows from the leases, the limits files and living processes: an agent that is killed at any
point loses nothing, and the next one continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Optional

from ..allocation import limit_update
from ..core import constants
from ..core.errors import GpushareError
from ..core.model import Lease, Share
from ..core.quantity import human
from ..gpu import nvml_usage
from ..gpu.selectors import device_name
from ..state import audit_log, leases, log, shm_abi, storage
from ..state.usage_reader import Usage
from ..system import procs
from . import overuse

HOLD_S = 10.0  # without lending after the last need: the waiting container allocates its request in several steps
NVML_S = 2.0  # for an answer of the driver
ASK_AGAIN_S = 0.5
SPARE_BYTES = 64 << 20  # free memory that an allocation may not get, such as the rest of a block
ENDING_S = 5.0  # until another borrower is ended although processes of this one still live
_NO_USAGE = Usage(0, 0, (), (), (), ())


class Held(NamedTuple):
    """A share and what its container reports about it."""

    lease: Lease
    share: Share
    used_bytes: int
    wanted_bytes: int

    @property
    def borrowed_bytes(self) -> int:
        lent = self.share.lending == constants.EVICT
        return max(0, self.used_bytes - (self.share.memory_limit_bytes or 0)) if lent else 0

    @property
    def waits(self) -> bool:
        """Whether it waits for memory within its request; used_bytes includes that memory."""
        request = self.share.memory_limit_bytes
        return request is not None and self.used_bytes <= request and 0 < self.wanted_bytes <= request


class Ending(NamedTuple):
    """A container that was killed. Its memory is free when these processes have ended."""

    id: str
    processes: tuple[procs.Process, ...]
    since_s: float


class Agent:
    """Remembers when it may lend again. `say` gets a line for each borrower that it ends."""

    def __init__(self, state_dir: str, sink: str, library: str = "", say: Callable[[str], None] = lambda line: None):
        self._state_dir, self._sink, self._library, self._say = state_dir, sink, library, say
        self._free_bytes: dict[str, int] = {}  # device uuid -> free memory, by the driver's last answer
        self._asked_s = 0.0  # when that was
        self._needed_s: dict[str, float] = {}  # device uuid -> when a container last waited there
        self._ending: dict[str, Ending] = {}  # device uuid -> the container that was killed last
        self._stuck: set[str] = set()  # containers that did not end in time
        self._borrowed: dict[tuple[str, str], int] = {}  # (id, device uuid) -> bytes borrowed, this round's readings
        self._recent: dict[tuple[str, str], int] = {}  # the same, of this round and the previous one

    def tick(self) -> None:
        """End a borrower on each device where a container waits for its request; lend where none does. Raise
        GpushareError if the state directory cannot be read."""
        held = self._held()
        now = time.monotonic()
        lenders = {one.share.device.uuid for one in held if one.share.lending == constants.EVICT}
        borrowed = {(one.lease.id, one.share.device.uuid): one.borrowed_bytes for one in held if one.borrowed_bytes}
        self._recent, self._borrowed = {**self._borrowed, **borrowed}, borrowed
        self._stuck &= {one.lease.id for one in held}
        for one in held:
            if one.waits and one.share.device.uuid in lenders and not self._has_room(one, now):
                self._needed_s[one.share.device.uuid] = now
        self._needed_s = {uuid: at for uuid, at in self._needed_s.items() if now < at + HOLD_S}
        self._lend(lenders - self._needed_s.keys())
        for uuid, at in self._needed_s.items():
            if at == now:
                self._take_back(uuid, now)

    def close(self) -> None:
        self._lend(frozenset())

    def _held(self) -> list[Held]:
        found = []
        for lease in leases.view(self._state_dir).live:
            if lease.state == "held":
                usage = self._usage(lease)
                for share in lease.shares:
                    used, wanted = usage.used_bytes(share.slot), usage.wanted_bytes(share.slot)
                    found.append(Held(lease, share, used, wanted))
        return found

    def _usage(self, lease: Lease) -> Usage:
        try:
            return storage.read_usage(self._state_dir, lease.id, len(lease.shares))
        except shm_abi.RegionError:
            return _NO_USAGE  # starting, ending, or the container damaged it: then the driver's numbers count

    def _has_room(self, waiting: Held, now: float) -> bool:
        """Whether the driver has the memory already: the container takes it soon, or waits for nothing. False if NVML
        does not answer. An answer that denies room counts for one round only."""
        uuid, needed_bytes = waiting.share.device.uuid, waiting.wanted_bytes + SPARE_BYTES
        old = now >= self._asked_s + ASK_AGAIN_S
        if now > self._asked_s and (old or self._free_bytes.get(uuid, 0) < needed_bytes):
            self._asked_s = now
            self._free_bytes = {
                found: gpu.memory_bytes - gpu.used_bytes
                for found, gpu in (nvml_usage.read(self._library, NVML_S) or {}).items()
                if gpu.memory_bytes is not None and gpu.used_bytes is not None
            }
        return self._free_bytes.get(uuid, 0) >= needed_bytes

    def _lend(self, uuids: Iterable[str]) -> None:
        """Let exactly these devices be lent: there the limits of lent shares are in force, elsewhere their requests."""
        limit_update.lend(self._state_dir, frozenset(uuids))

    def _take_back(self, uuid: str, now: float) -> None:
        ending = self._ending.get(uuid)
        if ending and any(procs.alive(one.pid, one.start) for one in ending.processes):
            if now < ending.since_s + ENDING_S:
                return
            self._stuck.add(ending.id)
        held = [one for one in self._held() if one.share.device.uuid == uuid]  # after lending has stopped
        waiting = max((one for one in held if one.waits), key=lambda one: one.wanted_bytes, default=None)
        most = self._borrower(uuid, held) if waiting is not None else None
        if most is None or waiting is None or self._ends_without(uuid, held, most, waiting.wanted_bytes, now):
            return
        is_news = most.lease.id not in self._stuck
        if is_news:
            self._tell(most, waiting)
        stopped = self._kill(most.lease)
        self._ending[uuid] = Ending(most.lease.id, stopped.processes, now)
        if not stopped.processes:
            self._stuck.add(most.lease.id)  # until its lease has ended, too
        if is_news and not stopped.by_us:
            self._correct(most)

    def _ends_without(self, uuid: str, held: list[Held], most: Held, wanted_bytes: int, now: float) -> bool:
        """Whether borrowers that end by themselves free the memory: enough of it, or that of the container to end. Then
        wait for such a container as for one that was killed."""
        borrowed = {container_id: size for (container_id, at), size in self._recent.items() if at == uuid}
        borrowed[most.lease.id] = most.borrowed_bytes
        ending = [
            one.lease
            for one in held
            if one.lease.id in borrowed and one.lease.id not in self._stuck and _is_ending(one.lease)
        ]
        live = {lease.id for lease in leases.view(self._state_dir).live}  # now: the use of `held` was read later
        left = borrowed.keys() - live | {lease.id for lease in ending}
        if sum(borrowed[container_id] for container_id in left) < wanted_bytes and most.lease.id not in left:
            return False
        if ending:
            lease = max(ending, key=lambda one: borrowed[one.id])
            self._ending[uuid] = Ending(lease.id, (procs.Process(lease.init_pid, lease.init_start, ""),), now)
        return True

    def _borrower(self, uuid: str, held: list[Held]) -> Optional[Held]:
        """Return the container to end: the one furthest above its request. One that did not end comes last."""
        for stuck in (False, True):
            able = [one for one in held if (one.lease.id in self._stuck) is stuck]
            most = max(able, key=lambda one: one.borrowed_bytes, default=None)
            if most is not None and not most.borrowed_bytes:
                most = self._by_driver(uuid, able)
            if most is not None:
                return most
        return None

    def _by_driver(self, uuid: str, held: list[Held]) -> Optional[Held]:
        """Return the borrower with the most memory above its request by the driver's numbers, if its own are wrong."""
        gpus = nvml_usage.read(self._library, NVML_S)
        if gpus is None:
            return None
        holders = [one.lease for one in held]
        found = {
            one.id: one for one in overuse.judge(holders, gpus, overuse.Owners(holders)).findings if one.uuid == uuid
        }
        counted = [
            one._replace(used_bytes=max(0, found[one.lease.id].physical_bytes - found[one.lease.id].slack_bytes))
            for one in held
            if one.lease.id in found
        ]
        most = max(counted, key=lambda one: one.borrowed_bytes, default=None)
        return most if most is not None and most.borrowed_bytes else None

    def _tell(self, most: Held, waiting: Held) -> None:
        """Write why a container is killed, before the kill: an agent that is killed in between writes it again, and
        never kills in silence."""
        lease, share = most.lease, most.share
        error = GpushareError(
            f"container {constants.short(lease.id)} was killed: it had borrowed {human(most.borrowed_bytes)} above its "
            f"request of {human(share.memory_limit_bytes or 0)} on device {device_name(share.device)}, and "
            f"{constants.short(waiting.lease.id)} needs its own request",
            "request more memory for it, or set policy.lending to movable",
        )
        line, _ = log.line_of(error)
        self._say(line)
        log.record(self._state_dir, lease.id, line, error)
        audit_log.evicted(self._sink, lease, share, most.used_bytes, waiting.lease.id)

    def _correct(self, most: Held) -> None:
        """Write that a container was not killed after _tell."""
        self._say(f"gpushare: container {constants.short(most.lease.id)} was not killed: no process of it ran any more")
        log.forget(self._state_dir, most.lease.id)
        audit_log.ended(self._sink, most.lease, most.share.device.uuid)

    def _kill(self, lease: Lease) -> overuse.Stopped:
        pids = procs.pids_by_container_pid(lease.cgroup).values() if lease.cgroup else ()
        return overuse.stop(lease, pids, overuse.Owners([lease]))


def _is_ending(lease: Lease) -> bool:
    """Whether the container's first process closes its files, so no signal is needed."""
    return procs.alive(lease.init_pid, lease.init_start) and procs.is_exiting(lease.init_pid)
