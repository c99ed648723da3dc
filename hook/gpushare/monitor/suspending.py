"""Suspend idle containers for others that need their memory, and resume containers that call CUDA (docs/suspend.md).
Not on the start path.

    Suspender(site, state_dir, node, sink, say).tick()      one round
    Suspender.take_back(lease)                              suspend a container that borrowed memory

A suspended container that calls CUDA states that in its usage file. It can write anything there, and gains no more than
its turn: containers are resumed in the order in which they asked, and only a container that has made no call for
policy.suspend.idle, and has run for policy.suspend.least, is suspended for another one. A running container can ask
there to be suspended itself. All else follows from leases, limits files and the driver: an agent that is killed at any
point loses nothing, and the next one continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Optional

from ..allocation import admission, suspension
from ..core import constants
from ..core.errors import CapacityError, GpushareError, PolicyError
from ..core.model import Lease, Node, Policy
from ..core.quantity import human
from ..state import accounts, audit_log, leases, shm_abi, storage
from ..state import ledger as books
from ..state.usage_reader import Usage

WORK_S = 2.0  # for the work of a container to end; one that works longer is not idle
OWN_WORK_S = 0.2  # the same if the container asked to be suspended
ASKS_S = 1.0  # between two readings of what running containers ask for
AGAIN_S = 10.0  # until a container is tried again that could not be suspended, or resumed although there is room
_REST = 10  # how many times as long as a failed try took: a container can stop its process in the middle of it
ROOM_S = 1.0  # until it is tried again whether borrowers have given memory back
_SOON = (CapacityError, PolicyError)  # errors that cost no time


class Suspender:
    """Remembers which container asked first. `site` and `node` may change. `say` gets a line for each container."""

    def __init__(
        self,
        site: suspension.Site,
        state_dir: str,
        node: Node,
        sink: str,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.site, self.node, self._state_dir, self._sink, self._say = site, node, state_dir, sink, say
        self._asked_s: dict[str, float] = {}  # id -> when its first call was seen
        self._read_s = 0.0  # when it was read what running containers ask for
        self._not_before_s: dict[str, float] = {}  # id -> when to try to suspend it again
        self._retry_s: dict[str, float] = {}  # id -> when to try to resume it again
        self._said: dict[str, str] = {}

    @property
    def _policy(self) -> Policy:
        return self.node.config.policy

    def tick(self, seen: Optional[leases.View] = None) -> None:
        """Complete changes that were killed. Suspend containers that ask for that. Then resume containers that called,
        as far as there is room or idle containers make room. `seen`: the leases, if they are read already. Raise
        GpushareError if the state directory cannot be read."""
        found = (seen or leases.view(self._state_dir)).live
        live = [one for one in found if one.state == "held" and one.shares]
        now = time.monotonic()
        self._forget({one.id for one in live}, now)
        suspended = [one for one in live if one.shares[0].phase == constants.SUSPENDED]
        for lease in live:
            killed = lease.shares[0].phase in (constants.SUSPENDING, constants.RESUMING)
            if killed and not self._resume(lease):
                self._retry_s[lease.id] = now + ROOM_S
        self._suspend_asking(live, now)
        self._resume_in_order(suspended, now)

    def _forget(self, ids: set[str], now: float) -> None:
        """Forget containers that are gone, and pauses that are over."""
        self._retry_s = {name: at for name, at in self._retry_s.items() if now < at}
        for memory in (self._not_before_s, self._said):
            for gone in memory.keys() - ids:
                del memory[gone]

    def _suspend_asking(self, live: Sequence[Lease], now: float) -> None:
        """Suspend running containers that ask for that, if policy lets the agent suspend. One that does not let itself
        be suspended is tried once in policy.suspend.least: it must not keep the agent busy."""
        if now < self._read_s + ASKS_S or not (
            self._policy.suspend_idle_s or self._policy.lending == constants.SUSPEND
        ):
            return
        self._read_s = now
        for lease in live:
            if self._may_suspend(lease) and (usage := self._usage(lease)) and usage.asks:
                self._suspend(lease, "it asked for that", OWN_WORK_S, self._policy.suspend_least_s)

    def _resume_in_order(self, suspended: Sequence[Lease], now: float) -> None:
        """Resume the containers that have called the driver, in the order of these calls."""
        asking = {one.id for one in suspended if (usage := self._usage(one)) and usage.calls}
        self._asked_s = {name: self._asked_s.get(name, now) for name in asking}
        full: set[str] = set()  # devices that an earlier one waits for
        for lease in sorted((one for one in suspended if one.id in asking), key=lambda one: self._asked_s[one.id]):
            uuids = {share.device.uuid for share in lease.shares}
            if uuids & full or self._resume(lease) or (self._make_room(lease) and self._resume(lease)):
                continue
            if self._fits(lease, set(), leases.view(self._state_dir)):  # borrowers have it, or it had borrowed
                self._retry_s[lease.id] = time.monotonic() + ROOM_S
            else:
                full |= uuids

    def take_back(self, lease: Lease) -> bool:
        """Suspend a container that has borrowed memory. Return whether that was possible, or happens already. The
        request of the other container comes first: so one that has not run for policy.suspend.least since it was
        resumed is suspended, too, and then stays so for that time."""
        is_early = not self._ran_enough(lease)
        if not self._suspend(lease, "another container needs its request"):
            return False
        if is_early:
            self._retry_s[lease.id] = time.monotonic() + self._policy.suspend_least_s
        return True

    def _usage(self, lease: Lease) -> Optional[Usage]:
        try:
            return storage.read_usage(self._state_dir, lease.id, len(lease.shares))
        except shm_abi.RegionError:
            return None

    def _resume(self, lease: Lease) -> bool:
        """Return False if there is no room. A container that cannot be resumed although there is, since it is paused
        for example, keeps no other one waiting."""
        if lease.id in self._retry_s:
            return True
        began = time.monotonic()
        try:
            done = self.site.resume(lease.id, 0, lease.shares[0].phase)
        except CapacityError:
            return False
        except suspension.Taken:
            return True
        except GpushareError as error:
            self._retry_s[lease.id] = _again_s(began)
            self._tell_once(lease, f"cannot be resumed: {error}")
            return True
        if not done.changed:
            return True
        self._asked_s.pop(lease.id, None)
        self._tell(lease, f"was resumed after {done.seconds:.1f} s ({human(done.size_bytes)})")
        return True

    def _make_room(self, waiting: Lease) -> bool:
        """Suspend the containers that were idle for longest, if that makes room for `waiting`."""
        chosen: list[Lease] = []
        seen = leases.view(self._state_dir)
        for one in self._idle(waiting, seen):
            chosen.append(one)
            if self._fits(waiting, {lease.id for lease in chosen}, seen):
                break
        else:
            return False
        for one in chosen[:-1]:  # a later one may have made it needless
            if self._fits(waiting, {lease.id for lease in chosen} - {one.id}, seen):
                chosen.remove(one)
        done = [self._suspend(one, f"{constants.short(waiting.id)} needs its memory") for one in chosen]
        return all(done)

    def _fits(self, waiting: Lease, gone: set[str], seen: leases.View) -> bool:
        others = (one for one in seen.live if one.id != waiting.id and one.id not in gone)
        ledger = books.ledger_of(others, self._policy, seen.blocked(self.node))
        try:
            for share in waiting.shares:
                admission.regain(share, self.node, ledger)
        except GpushareError:
            return False
        return True

    def _idle(self, waiting: Lease, seen: leases.View) -> Sequence[Lease]:
        """Return the containers that may be suspended for `waiting`, the longest idle first."""
        if not self._policy.suspend_idle_s:
            return ()
        uuids, now, found = {share.device.uuid for share in waiting.shares}, time.monotonic(), []
        for lease in seen.live:
            if lease.state != "held" or not any(share.device.uuid in uuids for share in lease.shares):
                continue
            usage = self._usage(lease)
            called_s = (usage.called_ns if usage else 0) / 1e9
            idle_s = min(now - called_s, _age_s(accounts.began_ns(lease))) if called_s <= now else 0.0
            is_idle = idle_s >= self._policy.suspend_idle_s
            if is_idle and self._may_suspend(lease) and not suspension.refusal(lease, usage):
                found.append((idle_s, lease))
        return [lease for _, lease in sorted(found, key=lambda one: -one[0])]

    def _may_suspend(self, lease: Lease) -> bool:
        is_due = time.monotonic() >= self._not_before_s.get(lease.id, 0.0)
        return is_due and not lease.shares[0].phase and self._ran_enough(lease)

    def _ran_enough(self, lease: Lease) -> bool:
        """Whether it was never suspended, or its limits, and so its phase, are the same since policy.suspend.least."""
        return not lease.shares[0].suspended_ns or _age_s(lease.counted_ns) >= self._policy.suspend_least_s

    def _suspend(self, lease: Lease, why: str, work_s: float = WORK_S, pause_s: float = 0.0) -> bool:
        began = time.monotonic()
        try:
            done = self.site.suspend(lease.id, work_s)
        except suspension.Taken:
            return True
        except GpushareError as error:
            least_s = max(AGAIN_S, pause_s, 0.0 if isinstance(error, _SOON) else self._policy.suspend_idle_s)
            self._not_before_s[lease.id] = _again_s(began, least_s)
            self._tell_once(lease, f"was not suspended: {error}")
            return False
        if done.changed:
            self._tell(lease, f"was suspended after {done.seconds:.1f} s ({human(done.size_bytes)}): {why}")
        return True

    def _tell(self, lease: Lease, what: str) -> None:
        self._said.pop(lease.id, None)
        self._say(f"gpushare: container {constants.short(lease.id)} {what}")
        now = leases.find(self._state_dir, lease.id)
        if now is not None:
            audit_log.changed(self._sink, now, "agent")

    def _tell_once(self, lease: Lease, what: str) -> None:
        if self._said.get(lease.id) != what:
            self._said[lease.id] = what
            self._say(f"gpushare: container {constants.short(lease.id)} {what}")


def _again_s(began: float, least_s: float = AGAIN_S) -> float:
    """Return when to try again what began then and failed."""
    now = time.monotonic()
    return now + max(least_s, _REST * (now - began))


def _age_s(since_ns: int) -> float:
    return (accounts.now_ns() - since_ns) / 1e9
