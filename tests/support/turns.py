"""Workers of one test run (pytest-xdist), and which tests may run beside each other.

    group_of(nodeid)    tests of one group run one after the other, in one worker
    scheduler(...)      which group a worker takes next: those that take long come first, so that all end together
    Turns().enter(...)  before each test: who is in the company of whom

Every worker has a mount namespace, a TMPDIR and a process id of its own, and names what it makes after them. What is
still of the whole machine decides the groups: nodes in /dev, and what an engine keeps in /run and /etc.

Tests that are judged by a real clock begin, while nothing else runs: first, one at a time, those that measure what a
call costs, and then the others, side by side. These sleep for most of their time (a simulated device needs no
processor), so they do not take from each other what they measure; a test that starts containers would.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from . import kills
from .host import BUILD

# Costs of a call
ALONE = ("tests/shim/test_compute_cost.py",)
# Judged by a real clock: shares of a device, reaction times. Each file is a group; those that take long come first.
CLOCK = (
    "tests/shim/test_compute_attacks.py",
    "tests/shim/test_compute.py",
    "tests/hardware/test_gpu_check.py",
    "tests/shim/test_compute_life.py",
    "tests/shim/test_compute_streams.py",
    "tests/shim/test_compute_hangs.py",
    "tests/integration/test_compute.py",
    "tests/simulator/test_scheduling.py",
    "tests/simulator/test_classic.py",
    "tests/conformance/test_conformance.py",
    "tests/integration/test_compute_limits.py",
    "tests/shim/test_compute_turns.py",
    "tests/integration/test_backends.py::test_compute_limit_holds",
    "tests/integration/test_live_limits.py::test_container_without_compute_limit",
    "tests/integration/test_live_limits.py::test_pause_blocks",
    "tests/integration/test_live_limits.py::test_gpushare_run_can",
    "tests/integration/test_live_limits.py::test_changes_and_pause",
    "tests/integration/test_live_limits.py::test_changed_compute_limit",
)
# Tests with a real driver (fixture `userland`), whose NVML makes a node in /dev, and those that watch the host
DRIVER = (
    "tests/security/",
    "tests/integration/test_images.py",
    "tests/integration/test_mps_daemon.py",
    "tests/integration/test_systemd.py",
    "tests/hardware/test_offered.py",
    "tests/shim/test_loader.py",
    "tests/shim/test_nvml.py",
    "tests/shim/test_real_driver.py",
    "tests/shim/test_symbols.py",
    "tests/simulator/test_exports.py",
    "tests/unit/test_driverfiles.py",
)
# Every podman of this machine has its locks in one file of /dev/shm, and starts anew there where its own store is new
PODMAN = (
    "tests/integration/test_configure_engines.py",
    "tests/integration/test_engines.py",
    "tests/integration/test_podman",
    "tests/integration/test_rootless_podman.py",
)
# One daemon serves many tests. These and the playground have their state in /run/gpushare, each in a view of its own,
# but whoever makes it anew takes every container on this machine that names it for one of before.
CONTAINERD = ("tests/integration/test_containerd", "tests/docs/test_tour.py")
DOCKER = ("tests/integration/test_docker",)
GROUPS = {"alone": ALONE, "driver": DRIVER, "podman": PODMAN, "containerd": CONTAINERD, "docker": DOCKER}

# Groups and files in the order in which they are begun; all others come after them, those with more tests first.
FIRST = (
    "podman",
    "docker",
    "driver",
    "containerd",
    "tests/integration/test_placement.py",
    "tests/integration/test_stress.py",
    "tests/integration/test_soak.py",
    "tests/integration/test_adopt.py",
    "tests/integration/test_release.py",
    "tests/integration/test_lifecycle.py",
    "tests/integration/test_runtime_bad_input.py",
    "tests/unit/test_limit_update_killed.py",
    "tests/fuzz/test_fuzz.py",
    "tests/limiter/test_matrix.py",
    "tests/limiter/test_law.py",
    "tests/shim/test_races.py",
    "tests/shim/test_sanitized.py",
    "tests/shim/test_live.py",
    "tests/integration/test_lies.py",
    "tests/integration/test_adopt_mask.py",
)


# Which tests may be in one another's company
ONE, CALM, ANY = "one at a time", "side by side with others that a clock judges", "with any others but those"


def company_of(nodeid: str) -> str:
    return ONE if nodeid.startswith(ALONE) else CALM if nodeid.startswith(CLOCK) else ANY


def group_of(nodeid: str) -> str:
    """A name of GROUPS, else the test's file; the test itself in a run that takes it in parts."""
    if kills.PARTS:
        return nodeid
    if nodeid.startswith(CLOCK):
        return "clock " + nodeid.partition("::")[0]
    return next((name for name, rows in GROUPS.items() if nodeid.startswith(rows)), nodeid.partition("::")[0])


def rank(nodeid: str) -> int:
    """The smaller, the earlier its group begins. Who is alone comes first: nothing runs yet that it has to wait for."""
    if nodeid.startswith(ALONE):
        return 0
    clock = next((place for place, row in enumerate(CLOCK, 1) if nodeid.startswith(row)), 0)
    group = group_of(nodeid)
    return clock or len(CLOCK) + 1 + (FIRST.index(group) if group in FIRST else len(FIRST))


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


SEATS = 8  # as many workers as may be calm at once, at most


class Turns:
    """Of one worker; nothing at all where there is one only. Each worker has a seat: a calm test takes its own, one
    that is alone takes all, and any other test shares all with its like. Whoever waits for a seat keeps the door: those
    who would go on beside the present ones wait behind him, so he comes in when these have ended."""

    def __init__(self, folder: Path = BUILD) -> None:
        self._folder = folder
        self._fds: list[int] = []

    def enter(self, company: str, worker: str | None) -> None:
        """Before a test. `worker` is its name, None when there is only one. Whoever is inside stays inside: see
        `leave`."""
        if worker is None or self._fds:
            return
        waiting = [self._open(name) for name in (("alone", "door") if company == ONE else ("door",))]
        for fd in waiting:
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            mine = int(worker[2:]) % SEATS
            for seat in (mine,) if company == CALM else range(SEATS):
                self._fds.append(self._open(f"seat-{seat}"))
                fcntl.flock(self._fds[-1], fcntl.LOCK_SH if company == ANY else fcntl.LOCK_EX)
        finally:
            for fd in waiting:
                fcntl.flock(fd, fcntl.LOCK_UN)  # also for a process that was forked meanwhile
                os.close(fd)

    def _is_wanted_alone(self) -> bool:
        fd = self._open("alone")
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def _open(self, name: str) -> int:
        return os.open(self._folder / f".tests-{name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def leave(self, company: str, next_one: str | None) -> None:
        """After a test. One that a clock judges hands its seats on to the next one that wants the same, unless somebody
        waits to be alone, who waits for one test and not for all of them."""
        if company != ANY and next_one == company and (company == ONE or not self._is_wanted_alone()):
            return
        for fd in self._fds:
            fcntl.flock(fd, fcntl.LOCK_UN)  # also for a process that a test has forked and left
            os.close(fd)
        self._fds.clear()
