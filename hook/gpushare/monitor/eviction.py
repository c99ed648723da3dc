"""Take borrowed memory back by ending the container that borrowed most (docs/lending.md). Not on the start path.

    Agent(state_dir, log, library).tick()  one round: end a borrower if another container waits for its own request
    Agent.close()                          stop lending on all devices

The shim states in the usage file what a process waits for. The container can write anything there, so a statement
counts only if

* the driver's figure for the container and the awaited memory together fit in the container's request, which it may
  use at any time,
* the driver does not have that much free memory, and
* the container took the memory that was freed for it before; otherwise it is believed after growing pauses. Without a
  figure of the driver, the agent cannot tell whether it did.

The borrower to end is the one that has most above its request by its own report or by the driver's figure. All else
follows from the leases, the limits files and living processes: an agent that is killed at any point loses nothing,
and the next one continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 600.0  # until a container is believed again that did not take freed memory
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
        """Whether it may wait for memory within its request; used_bytes includes that memory."""
        request = self.share.memory_limit_bytes
        return request is not None and 0 < self.wanted_bytes <= self.used_bytes <= request


class Ending(NamedTuple):
    """A container that was killed. Its memory is free when these processes have ended."""

    id: str
    processes: tuple[procs.Process, ...]
    since_s: float


class Figure(NamedTuple):
    """The memory of a container's processes on a device, from the driver; `slack_bytes` as in overuse.py."""

    used_bytes: int
    slack_bytes: int


class Freed(NamedTuple):
    """Memory that was freed for a container that waited: by the end of `borrower`, and of others since its demand was
    last met. `used_bytes`: its figure before, if there was one."""

    borrower: str
    size_bytes: int
    wanted_bytes: int
    used_bytes: Optional[int]
    at_s: float
    pause_s: float

    @property
    def is_enough(self) -> bool:
        return self.size_bytes >= self.wanted_bytes


class Agent:
    """Remembers when it may lend again. `library`: NVML's, which may change. `say` gets a line for each borrower that
    it ends. `suspend` takes the memory of a borrower without ending it, and returns whether it could."""

    def __init__(
        self,
        state_dir: str,
        sink: str,
        library: str = "",
        say: Callable[[str], None] = lambda line: None,
        suspend: Callable[[Lease], bool] = lambda lease: False,
    ) -> None:
        self._state_dir, self._sink, self.library, self._say, self._suspend = state_dir, sink, library, say, suspend
        self._free_bytes: dict[str, int] = {}  # device uuid -> free memory, by the driver's last answer
        self._figures: dict[tuple[str, str], Figure] = {}  # (id, device uuid), by the same answer
        self._leases: tuple[Lease, ...] = ()
        self._asked_s = 0.0  # when that was
        self._freed: dict[tuple[str, str], Freed] = {}  # (id of the container that waited, device uuid)
        self._needed_s: dict[str, float] = {}  # device uuid -> when a container last waited there
        self._ending: dict[str, Ending] = {}  # device uuid -> the container that was killed last
        self._stuck: set[str] = set()  # containers that did not end in time
        self._borrowed: dict[tuple[str, str], int] = {}  # (id, device uuid) -> bytes borrowed, this round's readings
        self._recent: dict[tuple[str, str], int] = {}  # the same, of this round and the previous one
        self._suspends = False

    def tick(self, seen: Optional[leases.View] = None) -> None:
        """End a borrower on each device where a container waits for its request; lend where none does. Do nothing while
        this agent suspends a borrower. `seen`: the leases, if they are read already. Raise GpushareError if the state
        directory cannot be read."""
        if self._suspends:
            return
        live = (seen or leases.view(self._state_dir)).live
        held = self._held(live)
        self._leases = tuple(dict.fromkeys(one.lease for one in held))
        now = time.monotonic()
        self._freed = {key: one for key, one in self._freed.items() if now < one.at_s + LONGEST_PAUSE_S}
        lenders = {one.share.device.uuid for one in held if one.share.lending == constants.EVICT}
        borrowed = {(one.lease.id, one.share.device.uuid): one.borrowed_bytes for one in held if one.borrowed_bytes}
        self._recent, self._borrowed = {**self._borrowed, **borrowed}, borrowed
        self._stuck &= {one.lease.id for one in held}
        for one in held:
            if one.share.device.uuid in lenders and self._needs(one, now):
                self._needed_s[one.share.device.uuid] = now
        self._needed_s = {uuid: at for uuid, at in self._needed_s.items() if now < at + HOLD_S}
        limit_update.lend(self._state_dir, lenders - self._needed_s.keys(), live)
        for uuid, at in self._needed_s.items():
            if at == now:
                self._take_back(uuid, now)

    def close(self) -> None:
        limit_update.lend(self._state_dir, (), leases.view(self._state_dir).live)

    def _held(self, live: Sequence[Lease]) -> list[Held]:
        """Return the shares of containers that have a part of a device that is lent."""
        found = []
        lent = {share.device.uuid for one in live for share in one.shares if share.lending == constants.EVICT}
        for lease in live:
            if lease.state != "held" or lent.isdisjoint(share.device.uuid for share in lease.shares):
                continue
            usage = self._usage(lease)
            for share in lease.shares:
                if not share.phase:
                    used, wanted = usage.used_bytes(share.slot), usage.wanted_bytes(share.slot)
                    found.append(Held(lease, share, used, wanted))
                elif not share.counts and usage.calls and _is_free(share, live):
                    found.append(Held(lease, share, share.suspended_bytes, share.suspended_bytes))
        return found

    def _usage(self, lease: Lease) -> Usage:
        try:
            return storage.read_usage(self._state_dir, lease.id, len(lease.shares))
        except shm_abi.RegionError:
            return _NO_USAGE  # starting, ending, or the container damaged it: then the driver's numbers count

    def _needs(self, one: Held, now: float) -> bool:
        """Whether a container waits for memory that it may use and that the driver does not have."""
        if not one.waits or self._has_room(one, now):
            return False
        figure = self._figures.get(_key(one))
        request = one.share.memory_limit_bytes or 0
        if figure is not None and figure.used_bytes + one.wanted_bytes > request + figure.slack_bytes:
            return False
        freed = self._freed.get(_key(one))
        return freed is None or not freed.is_enough or self._took(freed, figure) or now >= freed.at_s + freed.pause_s

    @staticmethod
    def _took(freed: Freed, figure: Optional[Figure]) -> bool:
        """Whether the container uses what was freed for it; False if the driver cannot tell."""
        if figure is None or freed.used_bytes is None:
            return False
        return figure.used_bytes + SPARE_BYTES >= freed.used_bytes + freed.wanted_bytes

    def _has_room(self, waiting: Held, now: float) -> bool:
        """Whether the driver has the memory already: the container takes it soon, or waits for nothing. False if NVML
        does not answer. An answer that denies room counts for one round only."""
        uuid, needed_bytes = waiting.share.device.uuid, waiting.wanted_bytes + SPARE_BYTES
        old = now >= self._asked_s + ASK_AGAIN_S
        if now > self._asked_s and (old or self._free_bytes.get(uuid, 0) < needed_bytes):
            self._asked_s = now
            gpus = nvml_usage.read(self.library, NVML_S) or {}
            self._free_bytes = {
                found: gpu.memory_bytes - gpu.used_bytes
                for found, gpu in gpus.items()
                if gpu.memory_bytes is not None and gpu.used_bytes is not None
            }
            self._figures = self._figures_of(gpus)
        return self._free_bytes.get(uuid, 0) >= needed_bytes

    def _figures_of(self, gpus: Mapping[str, nvml_usage.Gpu]) -> dict[tuple[str, str], Figure]:
        """Return what each container has on each device that the driver reports completely."""
        known = {uuid: gpu for uuid, gpu in gpus.items() if all(one.used_bytes is not None for one in gpu.processes)}
        if not any(gpu.processes for gpu in known.values()):
            return {}  # some drivers list no processes
        found = overuse.judge(self._leases, known, overuse.Owners(self._leases)).findings
        return {(one.id, one.uuid): Figure(one.physical_bytes, one.slack_bytes) for one in found}

    def _take_back(self, uuid: str, now: float) -> None:
        ending = self._ending.get(uuid)
        if ending and any(procs.alive(one.pid, one.start) for one in ending.processes):
            if now < ending.since_s + ENDING_S:
                return
            self._stuck.add(ending.id)
            self._freed = {key: one for key, one in self._freed.items() if one.borrower != ending.id}
        live = leases.view(self._state_dir).live  # after lending has stopped
        held = [one for one in self._held(live) if one.share.device.uuid == uuid]
        waiting = max((one for one in held if self._needs(one, now)), key=lambda one: one.wanted_bytes, default=None)
        most = self._borrower(uuid, held) if waiting is not None else None
        if most is None or waiting is None or self._ends_without(uuid, held, most, waiting.wanted_bytes, now):
            return
        self._suspends = True
        try:
            suspended = self._suspend(most.lease)
        finally:
            self._suspends = False
        if suspended:
            self._note(most, waiting, now)
            return
        is_news = most.lease.id not in self._stuck
        if is_news:
            self._tell(most, waiting)
        stopped = self._kill(most.lease)
        self._ending[uuid] = Ending(most.lease.id, stopped.processes, now)
        if stopped.processes:
            self._note(most, waiting, now)
        else:
            self._stuck.add(most.lease.id)  # until its lease has ended, too
        if is_news and not stopped.by_us:
            self._correct(most)

    def _note(self, most: Held, waiting: Held, now: float) -> None:
        """Remember what was freed for a container. It is believed again at once while that is too little."""
        before, figure = self._freed.get(_key(waiting)), self._figures.get(_key(waiting))
        size, pause_s = most.borrowed_bytes, FIRST_PAUSE_S
        if before is not None and not before.is_enough:
            size, pause_s = size + before.size_bytes, before.pause_s
        elif before is not None and not self._took(before, figure):
            pause_s = min(2 * before.pause_s, LONGEST_PAUSE_S)
        used = None if figure is None else figure.used_bytes
        self._freed[_key(waiting)] = Freed(most.lease.id, size, waiting.wanted_bytes, used, now, pause_s)

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
            able = [self._counted(one) for one in held if (one.lease.id in self._stuck) is stuck]
            most = max(able, key=lambda one: one.borrowed_bytes, default=None)
            if most is not None and most.borrowed_bytes:
                return most
        return None

    def _counted(self, one: Held) -> Held:
        """Return it with the driver's figure, if that is more than the container reports."""
        figure = self._figures.get(_key(one))
        if figure is None:
            return one
        return one._replace(used_bytes=max(one.used_bytes, figure.used_bytes - figure.slack_bytes))

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


def _is_free(share: Share, live: Sequence[Lease]) -> bool:
    """Whether the request of a suspended share is granted to no other, so that at most borrowers have the memory."""
    beside = [
        one.device.memory_bytes if one.memory_limit_bytes is None else one.memory_limit_bytes
        for lease in live
        for one in lease.shares
        if one.counts and one.device.uuid == share.device.uuid
    ]
    return sum(beside) + (share.memory_limit_bytes or 0) <= share.device.memory_bytes


def _key(one: Held) -> tuple[str, str]:
    return one.lease.id, one.share.device.uuid


def _is_ending(lease: Lease) -> bool:
    """Whether the container's first process closes its files, so no signal is needed."""
    return procs.alive(lease.init_pid, lease.init_start) and procs.is_exiting(lease.init_pid)
