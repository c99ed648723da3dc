"""Compute limits inside MIG devices: each is a percentage of its own device, whose time no other device uses."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from pathlib import Path

from simulator.ledger import Ledger
from tests.support import driverhost
from tests.support.busy import build, words
from tests.support.host import Node
from tests.support.runc import Container
from tests.support.spec import Mount

POINTS, TRIES = 5, 8


def percents(watched: list[tuple[Container, Path]]) -> list[float]:
    """Return each container's percentage of its device in one second. Fail at once when a container ends."""
    ledgers = [Ledger(str(device)) for _, device in watched]
    pidfds = [os.pidfd_open(one.pid) for one, _ in watched]
    poll = select.poll()
    for fd in pidfds:
        poll.register(fd, select.POLLIN)

    spaces = [os.stat(f"/proc/{one.pid}/ns/pid").st_ino for one, _ in watched]

    def busy() -> list[int]:
        return [
            sum(group.busy_ns for group in ledger.groups() if group.pidns == space)
            for ledger, space in zip(ledgers, spaces)
        ]

    begin, before = time.monotonic_ns(), busy()
    ended = poll.poll(1000)
    after, end = busy(), time.monotonic_ns()
    for fd in pidfds:
        os.close(fd)
    for ledger in ledgers:
        ledger.close()
    assert not ended, "a container has ended"
    return [100 * (now - was) / (end - begin) for was, now in zip(before, after)]


def test_mig_devices_have_separate_compute_time(container: Callable[..., Container], node: Node, simhost: Path) -> None:
    """70 % of one MIG device, and 45 and 25 % of another: together more than the whole GPU has."""
    watched, limits = [], (70, 45, 25)
    parts = driverhost.divide(simhost)
    for number, percent in zip((0, 1, 1), limits):
        env = {"GPUSHARE_DEVICES": f"0:{number}", "GPUSHARE_MEMORY": "1Gi", "GPUSHARE_COMPUTE": f"{percent}%"}
        command = ["/opt/busy", *words(seconds=1000, kernel=200)]
        one = container(command, env=env, mounts=[Mount(build(), "/opt/busy")], **node.way("hook")).start()
        watched.append((one, parts[number]))
    found = []
    for _ in range(TRIES):
        found.append(percents(watched))
        assert all(had < limit + POINTS for had, limit in zip(found[-1], limits)), found
        if all(had > limit - POINTS for had, limit in zip(found[-1], limits)):
            return
    raise AssertionError(found)
