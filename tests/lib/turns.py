"""Two workers of one test run (pytest-xdist), and which tests may run beside each other.

    group_of(item)      tests of one group run one after the other, in one worker
    Turn(alone)         around each test: those that are `alone` wait until nothing else runs, and then others wait

What starts containers has things of the machine in common (nodes in /dev, cgroups, what an engine leaves), so it is one
group; beside it there is room for what only needs a processor. Tests that measure real time get both.
"""

from __future__ import annotations

import fcntl
import os
from types import TracebackType

import pytest

from .host import BUILD, TREE

MACHINE = ("tests/attacks/", "tests/e2e/")
# Judged by a clock: shares of a device, reaction times, what is there again at the end
CLOCK = (
    "tests/shim/test_compute",
    "tests/sim/test_classic.py",
    "tests/sim/test_scheduling.py",
    "tests/throttle/test_reaction.py",
    "tests/e2e/test_compute",
    "tests/e2e/test_soak.py",
)


def path_of(item: pytest.Item) -> str:
    return str(item.path.relative_to(TREE))


def group_of(item: pytest.Item) -> str:
    """A real driver's NVML makes nodes in /dev, wherever its test is."""
    if path_of(item).startswith(MACHINE) or "userland" in getattr(item, "fixturenames", ()):
        return "machine"
    return "clock" if is_alone(item) else "processor"


def is_alone(item: pytest.Item) -> bool:
    return path_of(item).startswith(CLOCK)


class Turn:
    """Of one worker; nothing at all where there is one only. Whoever waits to be alone keeps the door: those who would
    go on beside the present ones wait behind him, so he comes in when these have ended."""

    def __init__(self, alone: bool) -> None:
        self._how = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        self._fds: list[int] = []

    def __enter__(self) -> None:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            return
        for name in ("door", "room"):
            self._fds.append(os.open(BUILD / f".tests-{name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        door, room = self._fds
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, self._how)
        fcntl.flock(door, fcntl.LOCK_UN)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for fd in self._fds:
            fcntl.flock(fd, fcntl.LOCK_UN)  # also for a process that a test has forked and left
            os.close(fd)
        self._fds.clear()
