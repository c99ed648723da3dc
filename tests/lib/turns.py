"""Workers of one test run (pytest-xdist), and which tests may run beside each other.

    group_of(nodeid)    tests of one group run one after the other, in one worker
    scheduler(...)      which group a worker takes next: those that take long come first, so that all end together
    Turns().enter(...)  before each test: those that are `alone` wait until nothing else runs, and then others wait

Every worker has a mount namespace, a TMPDIR and a process id of its own, and names what it makes after them. What is
still of the whole machine decides the groups: nodes in /dev, and what an engine keeps in /run and /etc. Tests that
measure real time get both processors.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from .host import BUILD

# Judged by a real clock: shares of a device, reaction times
CLOCK = (
    "tests/gpu/test_gpu_check.py",
    "tests/shim/test_compute",
    "tests/sim/test_classic.py",
    "tests/sim/test_scheduling.py",
    "tests/e2e/test_compute.py",
    "tests/e2e/test_compute_limits.py",
    "tests/e2e/test_live_limits.py::test_a_container_without_a_compute_limit",
    "tests/e2e/test_live_limits.py::test_a_pause_holds",
    "tests/e2e/test_live_limits.py::test_a_program_without_a_container",
    "tests/e2e/test_live_limits.py::test_changes_and_a_pause",
    "tests/e2e/test_live_limits.py::test_compute_follows",
)
# Tests with a real driver (fixture `userland`), whose NVML makes a node in /dev, and those that watch the host
DRIVER = (
    "tests/attacks/",
    "tests/e2e/test_images.py",
    "tests/e2e/test_mps_daemon.py",
    "tests/shim/test_loader.py",
    "tests/shim/test_nvml.py",
    "tests/shim/test_real_driver.py",
    "tests/shim/test_symbols.py",
    "tests/sim/test_exports.py",
    "tests/unit/test_driverfiles.py",
)
# Every podman of this machine has its locks in one file of /dev/shm, and starts anew there where its own store is new
PODMAN = (
    "tests/e2e/test_configure_engines.py",
    "tests/e2e/test_engines.py",
    "tests/e2e/test_podman.py",
    "tests/e2e/test_rootless_podman.py",
)
# One daemon serves many tests
CONTAINERD = ("tests/e2e/test_containerd",)
DOCKER = ("tests/e2e/test_docker",)
GROUPS = {"clock": CLOCK, "driver": DRIVER, "podman": PODMAN, "containerd": CONTAINERD, "docker": DOCKER}

# Groups and files in the order in which they are begun; all others come after them, those with more tests first.
# Whatever is alone begins: nothing else runs yet that it would have to wait for.
FIRST = (
    "clock",
    "podman",
    "docker",
    "driver",
    "containerd",
    "tests/e2e/test_placement.py",
    "tests/e2e/test_stress.py",
    "tests/e2e/test_soak.py",
    "tests/e2e/test_adopt.py",
    "tests/e2e/test_release.py",
    "tests/e2e/test_lifecycle.py",
    "tests/e2e/test_runtime_bad_input.py",
    "tests/unit/test_livelimits.py",
    "tests/fuzz/test_fuzz.py",
    "tests/throttle/test_matrix.py",
    "tests/throttle/test_law.py",
    "tests/shim/test_races.py",
    "tests/shim/test_sanitized.py",
    "tests/shim/test_live.py",
    "tests/e2e/test_lies.py",
    "tests/e2e/test_adopt_mask.py",
)


def is_alone(nodeid: str) -> bool:
    return nodeid.startswith(CLOCK)


def group_of(nodeid: str) -> str:
    """A name of GROUPS, else the test's file."""
    return next((name for name, rows in GROUPS.items() if nodeid.startswith(rows)), nodeid.partition("::")[0])


def rank(nodeid: str) -> int:
    """The smaller, the earlier its group begins."""
    group = group_of(nodeid)
    return FIRST.index(group) if group in FIRST else len(FIRST)


def scheduler(config: pytest.Config, log: Any) -> Any:
    """Of pytest-xdist, in the controlling process: a whole group at a time to a worker that has nothing to do."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            first = min(self.workqueue, key=lambda group: rank(next(iter(self.workqueue[group]))))
            self.workqueue.move_to_end(first, last=False)
            super()._assign_work_unit(node)

        def _reschedule(self, node: Any) -> None:
            """A worker that stands in for one that crashed gets work when it has said what it can run."""
            if node in self.registered_collections:
                super()._reschedule(node)

    return Scheduling(config, log)


class Turns:
    """Of one worker; nothing at all where there is one only. Whoever waits to be alone keeps the door: those who would
    go on beside the present ones wait behind him, so he comes in when these have ended."""

    def __init__(self, folder: Path = BUILD) -> None:
        self._folder = folder
        self._fds: list[int] = []

    def enter(self, alone: bool) -> None:
        """Before a test. Whoever is inside stays inside: see `leave`."""
        if "PYTEST_XDIST_WORKER" not in os.environ or self._fds:
            return
        for name in ("door", "room"):
            self._fds.append(os.open(self._folder / f".tests-{name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        door, room = self._fds
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)

    def leave(self, alone: bool, alone_next: bool) -> None:
        """After a test. One that is alone hands the empty room on to the next one that wants it."""
        if alone and alone_next:
            return
        for fd in self._fds:
            fcntl.flock(fd, fcntl.LOCK_UN)  # also for a process that a test has forked and left
            os.close(fd)
        self._fds.clear()
