"""Measure what a container used, from the simulated device's ledger."""

from __future__ import annotations

import select
import time
from pathlib import Path
from typing import NamedTuple

from simulator.ledger import Group, Ledger


def taken(driver_root: Path, pid_namespace: int, minor: int = 0) -> Group:
    """Current and peak bytes of all processes of one pid namespace; zeros if it never used the device."""
    with Ledger(str(driver_root / "dev" / f"nvidia{minor}")) as ledger:
        found = [group for group in ledger.groups() if group.pidns == pid_namespace]
    return found[0] if found else Group(pid_namespace, 0, 0, 0, 0, 0, 0)


def peak_bytes(driver_root: Path, pid_namespace: int) -> int:
    """The container's peak memory on the first device, contexts included."""
    return taken(driver_root, pid_namespace).peak_bytes


class TimeShares(NamedTuple):
    """Percent of a device's time."""

    of: dict[int, float]  # by pid namespace; namespaces that never used the device are missing
    device: float  # including switches between contexts


def time_shares(device: str, watched: select.poll, seconds: float = 1.0) -> TimeShares:
    """Measure each namespace's share for `seconds`; fail at once on an event of a watched descriptor."""
    with Ledger(device) as ledger:
        begin, before = time.monotonic_ns(), ledger.snapshot()
        ended = watched.poll(seconds * 1000)
        after, end = ledger.snapshot(), time.monotonic_ns()
    assert not ended, "a tenant has ended"
    was = {group.pidns: group.busy_ns for group in before.groups}
    to_percent = 100 / (end - begin)
    return TimeShares(
        {group.pidns: to_percent * (group.busy_ns - was.get(group.pidns, 0)) for group in after.groups},
        to_percent * (after.busy_ns - before.busy_ns),
    )
