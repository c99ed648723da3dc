"""Samples for `gpushare top`: all containers and devices at one moment, with changes since the previous sample.

Samples are read from leases, usage files and node.json, not from the driver.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Optional

from ..allocation import limit_update, placement
from ..config import node
from ..core.errors import GpushareError
from ..core.model import Node
from ..state import leases, shm_abi
from ..state.names import Names
from . import containers, devices, facts
from .options import Paths

_KEPT = 60  # samples
_MOST_PERCENT = 100.0 * shm_abi.MAX_SLOTS  # cap of `throttled_percent`, since containers can write their usage files


class Line(NamedTuple):
    """A container on one of its devices (`use` None: its lease lists no device or cannot be read)."""

    container: facts.Container
    use: Optional[facts.Use]
    throttled_percent: Optional[float]  # of the time since the previous sample, summed over threads
    compute_history: tuple[float, ...] = ()  # percent of device time in the last samples, the newest last


class Sample(NamedTuple):
    """All containers and devices at one moment. `devices` are JSON values; empty if this host's driver cannot be read,
    for which `note` gives the reason."""

    taken: float  # unix seconds
    lines: tuple[Line, ...]
    devices: tuple[dict[str, Any], ...]
    note: str
    device_history: dict[str, tuple[float, ...]] = {}  # uuid -> as compute_history

    def plain(self) -> dict[str, Any]:
        """As JSON values: the objects of `gpushare list` and `gpushare devices`, with measured values added."""
        found: dict[str, dict[str, Any]] = {}
        for line in self.lines:
            one = found.setdefault(line.container.id, containers.plain(line.container))
            if line.use is not None:
                percent = line.throttled_percent
                share = next(share for share in one["shares"] if share["slot"] == line.use.share.slot)
                share["compute_throttled_percent"] = None if percent is None else round(percent, 1)
        return {
            "time": round(self.taken, 3),
            "note": self.note or None,
            "devices": list(self.devices),
            "containers": list(found.values()),
        }


class _History:
    """The last values of each key. A key without a new value is forgotten."""

    def __init__(self) -> None:
        self._values: dict[Any, tuple[float, ...]] = {}

    def add(self, values: dict[Any, float]) -> dict[Any, tuple[float, ...]]:
        self._values = {key: (*self._values.get(key, ()), value)[-_KEPT:] for key, value in values.items()}
        return self._values


class Sampler:
    """Takes samples, each compared with the previous one."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._host: Optional[Node] = None
        self._note = ""
        self._names = Names()
        self._history, self._device_history = _History(), _History()
        self._before: dict[tuple[str, float, int], tuple[int, int]] = {}
        try:
            self._host = facts.host(paths)
        except GpushareError as error:
            self._note = str(error)

    def take(self) -> Sample:
        """Raises GpushareError when the state directory cannot be read."""
        seen = leases.view(self._paths.state_dir)
        found = facts.containers_of(self._paths.state_dir, seen, names=self._names)
        self._names.keep(one.lease for one in found if one.lease)
        now, lines = {}, []
        history = self._history.add(
            {
                (one.id, use.share.slot): use.compute.recent_percent
                for one in found
                for use in one.uses
                if use.compute is not None
            }
        )
        for one in found:
            if not one.uses:
                lines.append(Line(one, None, None))
            for use in one.uses:
                key = (one.id, one.lease.created if one.lease else 0.0, use.share.slot)
                if use.compute is not None:
                    now[key] = time.monotonic_ns(), use.compute.waited_ns
                past = history.get((one.id, use.share.slot), ())
                lines.append(Line(one, use, self._throttled(key, now.get(key)), past))
        self._before = now
        devices = self._devices(seen, found)
        past_of = self._device_history.add({one["uuid"]: one["compute_used_percent"] for one in devices})
        return Sample(time.time(), tuple(lines), devices, self._note, past_of)

    def _throttled(self, key: tuple[str, float, int], now: Optional[tuple[int, int]]) -> Optional[float]:
        """Throttled time in percent of the time since the previous sample; for a container's first sample, since its
        start, as vmstat(8) does."""
        if now is None:
            return None
        if key in self._before:
            then_ns, waited_ns = self._before[key]
        else:
            then_ns, waited_ns = now[0] - int(max(1.0, time.time() - key[1]) * 1e9), 0
        return min(_MOST_PERCENT, max(0.0, 100 * (now[1] - waited_ns) / max(1, now[0] - then_ns)))

    def _devices(self, seen: leases.View, found: list[facts.Container]) -> tuple[dict[str, Any], ...]:
        """The devices and their usage. Reads node.json again to show changes; while it is stale, uses the last node."""
        fresh = node.read_node(self._paths.config, self._paths.state_dir)
        if fresh is not None:
            self._host, self._note = fresh, ""
        if self._host is None:
            return ()
        live = limit_update.settled(self._paths.state_dir, seen.live, keep=False)
        ledger = placement.ledger_of(live, self._host.config.policy, seen.blocked(self._host))
        uses = [use for one in found if one.state not in facts.GONE for use in one.uses]
        return tuple(
            {**one, **_used([use for use in uses if use.share.device.uuid == one["uuid"]])}
            for one in devices.listed(self._host, ledger)
        )


def _used(uses: list[facts.Use]) -> dict[str, Any]:
    """The usage that all containers on one device report."""
    compute = sum(use.compute.recent_percent for use in uses if use.compute)
    return {
        "memory_used_bytes": sum(use.used_bytes for use in uses),
        "compute_used_percent": round(min(100.0, compute), 1),
    }
