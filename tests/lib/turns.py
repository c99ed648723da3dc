"""Two workers of one test run (pytest-xdist), and which tests may run beside each other.

    group_of(nodeid)    tests of one group run one after the other, in one worker
    Turn(alone)         around each test: those that are `alone` wait until nothing else runs, and then others wait

What starts containers has things of the machine in common (nodes in /dev, cgroups, what an engine leaves), so it is one
group; beside it there is room for what only needs a processor. Tests that measure real time get both.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from .host import BUILD

MACHINE = (
    "tests/attacks/",
    "tests/e2e/",
    # With a real driver (fixture `userland`), whose NVML makes a node in /dev
    "tests/shim/test_loader.py",
    "tests/shim/test_nvml.py",
    "tests/shim/test_real_driver.py",
    "tests/shim/test_symbols.py",
    "tests/sim/test_exports.py",
    "tests/unit/test_driverfiles.py",
)
# Judged by a clock: shares of a device, reaction times, what is there again at the end
CLOCK = (
    "tests/gpu/",
    "tests/shim/test_compute",
    "tests/sim/test_classic.py",
    "tests/sim/test_scheduling.py",
    "tests/throttle/test_reaction.py",
    "tests/e2e/test_compute",
    "tests/e2e/test_live_limits.py",
    "tests/e2e/test_soak.py",
)


def is_alone(nodeid: str) -> bool:
    return nodeid.startswith(CLOCK)


def group_of(nodeid: str) -> str:
    if nodeid.startswith(MACHINE):
        return "machine"
    return "clock" if is_alone(nodeid) else "processor"


def scheduler(config: pytest.Config, log: Any) -> Any:
    """Of pytest-xdist, in the controlling process: a whole group at a time to a worker that has nothing to do."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Scheduling(config, log)


class Turn:
    """Of one worker; nothing at all where there is one only. Whoever waits to be alone keeps the door: those who would
    go on beside the present ones wait behind him, so he comes in when these have ended."""

    def __init__(self, alone: bool, folder: Path = BUILD) -> None:
        self._how = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        self._folder = folder
        self._fds: list[int] = []

    def __enter__(self) -> None:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            return
        for name in ("door", "room"):
            self._fds.append(os.open(self._folder / f".tests-{name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        door, room = self._fds
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, self._how)
        fcntl.flock(door, fcntl.LOCK_UN)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for fd in self._fds:
            fcntl.flock(fd, fcntl.LOCK_UN)  # also for a process that a test has forked and left
            os.close(fd)
        self._fds.clear()
