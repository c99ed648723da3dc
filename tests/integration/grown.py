"""A container that runs programs/grower.c, and the device's accounting while its limits change."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simulator.ledger import Client, Group, Ledger
from tests.support.host import Node
from tests.support.runc import Container

GIB = 1 << 30
PROCESSES = 4
POINTS = 5
TRIES = 8


class Grown:
    """A container that runs the program, and the device's accounting of it."""

    def __init__(self, container: Container, node: Node, device: Path) -> None:
        self.container, self.node, self.device = container, node, device
        self.pidns = os.stat(f"/proc/{container.pid}/ns/pid").st_ino

    def group(self) -> Group:
        with Ledger(str(self.device)) as ledger:
            return next(group for group in ledger.groups() if group.pidns == self.pidns)

    def clients(self) -> list[Client]:
        with Ledger(str(self.device)) as ledger:
            return [client for client in ledger.clients() if client.pidns == self.pidns and client.alive]

    def said(self) -> dict[str, Any]:
        """The container's only share, as `list` reports it."""
        rows = json.loads(self.node.cli("list", "--format", "json").stdout)
        share: dict[str, Any] = next(row for row in rows if row["id"] == self.container.id)["shares"][0]
        return share

    def set(self, *options: str) -> dict[str, Any]:
        """Run `limit set` and return the only share, before and after."""
        done = self.node.cli("limit", "set", self.container.id, *options, "--format", "json")
        assert done.returncode == 0, done.stderr
        share: dict[str, Any] = json.loads(done.stdout)["shares"][0]
        return share

    def wait(self, seconds: float) -> None:
        """Wait; fail if the program ends."""
        pidfd = os.pidfd_open(self.container.pid)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        ended = poll.poll(1000 * seconds)
        os.close(pidfd)
        assert not ended, self.container.stderr

    def until(self, true: Callable[[], bool], seconds: float = 20) -> None:
        """Poll every 10 ms until the condition holds."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, (self.group(), self.said())
            self.wait(0.01)

    def percent(self, seconds: float) -> float:
        """Return its percentage of the device's time during the next `seconds`."""
        begin, before = time.monotonic_ns(), self.group().busy_ns
        self.wait(seconds)
        return 100 * (self.group().busy_ns - before) / (time.monotonic_ns() - begin)

    def quiet(self) -> int:
        """Return its device time once it is constant: an admitted launch may not have reached the device yet."""
        seen = [-1, self.group().busy_ns]
        while seen[-1] != seen[-2]:
            assert len(seen) < 30, seen
            self.wait(0.3)
            seen.append(self.group().busy_ns)
        return seen[-1]

    def holds(self, percent: float) -> None:
        """Assert that it never exceeds the percentage, and reaches it as soon as the machine allows."""
        seen = []
        for _ in range(TRIES):
            seen.append(self.percent(1.0))
            assert seen[-1] < percent + POINTS, (percent, seen)
            if seen[-1] > percent - POINTS:
                return
        raise AssertionError(f"{seen} instead of {percent}")
