"""Workers of one test run (pytest-xdist), and which tests may run beside each other.

    group_of(nodeid)    tests of one group run one after the other, in one worker
    scheduler(...)      which group a worker runs next: the longest come first, so that all workers end together
    Seats().enter(...)  before each test: wait until it may run beside the running ones

Every worker has its own mount namespace, TMPDIR and process id, and uses them in names. The resources that are still
shared decide the groups: nodes in /dev, and files of engines in /run and /etc.

Tests that are judged by a real clock run first, while nothing else runs: one at a time the tests that measure the cost
of a call, then the others in parallel. These mostly sleep (a simulated device needs no processor), so they do not
disturb each other; a test that starts containers would.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from . import kills
from .host import BUILD

# Tests that measure the cost of a call, or how often threads meet that use all processors
ALONE = ("tests/shim/test_compute_cost.py", "tests/shim/test_races.py::test_allocation_waits")
# Judged by a real clock: shares of a device, reaction times. Each file is a group; the longest come first.
CLOCK = (
    "tests/shim/test_compute_attacks.py",
    "tests/shim/test_compute.py",
    "tests/hardware/test_gpu_check.py",
    "tests/shim/test_compute_life.py",
    "tests/shim/test_compute_streams.py",
    "tests/shim/test_compute_hangs.py",
    "tests/integration/test_compute.py",
    "tests/simulator/test_scheduling.py",
    "tests/conformance/test_conformance.py",
    "tests/shim/test_compute_turns.py",
    "tests/integration/test_backends.py::test_compute_limit_holds",
    "tests/integration/test_live_limits.py::test_gpushare_run_can",
    "tests/integration/test_live_limits.py::test_changes_and_pause",
)
# Tests with a real driver (fixture `userland`), whose NVML creates a node in /dev, and tests that watch the host
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
    "tests/unit/test_driverchoice.py",
    "tests/unit/test_driverfiles.py",
)
# All podmans of this machine have their locks in one file of /dev/shm, and recreate it for new storage
PODMAN = (
    "tests/integration/test_crio.py",  # podman loads its image
    "tests/integration/test_engines.py",
    "tests/integration/test_podman",
    "tests/integration/test_rootless_docker.py",  # the same user
    "tests/integration/test_rootless_podman.py",
)
# One daemon serves many tests. These and the playground have separate views of /run/gpushare.
CONTAINERD = (
    "tests/integration/test_containerd",
    "tests/integration/test_node_life.py",
    "tests/integration/test_systemd_cgroups.py",
    "tests/integration/test_systemd_engines.py",
    "tests/docs/test_tour.py",
)
DOCKER = ("tests/integration/test_docker", "tests/integration/test_swarm.py")
GROUPS = {"alone": ALONE, "driver": DRIVER, "podman": PODMAN, "containerd": CONTAINERD, "docker": DOCKER}

# Groups and files in starting order; all others come after them, those with more tests first.
FIRST = (
    "podman",
    "docker",
    "driver",
    "containerd",
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
    "tests/integration/test_adopt_mask.py",
)


# Groups of tests that may run in parallel
EXCLUSIVE, TIMED, ORDINARY = "one at a time", "beside other timed tests", "beside other ordinary tests"


def kind_of(nodeid: str) -> str:
    return EXCLUSIVE if nodeid.startswith(ALONE) else TIMED if nodeid.startswith(CLOCK) else ORDINARY


def group_of(nodeid: str) -> str:
    """Return the test's group: a name of GROUPS, otherwise its file; in a run in parts, the test itself."""
    if kills.PARTS:
        return nodeid
    if nodeid.startswith(CLOCK):
        return "clock " + nodeid.partition("::")[0]
    return next((name for name, rows in GROUPS.items() if nodeid.startswith(rows)), nodeid.partition("::")[0])


def rank(nodeid: str) -> int:
    """Return the place of a group in the start order, smallest first. Exclusive tests come first, because then they
    need not wait for others."""
    if nodeid.startswith(ALONE):
        return 0
    clock = next((place for place, row in enumerate(CLOCK, 1) if nodeid.startswith(row)), 0)
    group = group_of(nodeid)
    return clock or len(CLOCK) + 1 + (FIRST.index(group) if group in FIRST else len(FIRST))


def scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a pytest-xdist scheduler for the controlling process, which gives a whole group to each idle worker."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            first = min(self.workqueue, key=lambda group: rank(next(iter(self.workqueue[group]))))
            self.workqueue.move_to_end(first, last=False)
            super()._assign_work_unit(node)

        def remove_node(self, node: Any) -> Any:
            """Give back the tests of a worker that ended, without the one that ended it, such as one that took too
            long: it would end the next worker as well, and so on. Groups that are done are not given back either."""
            work = self.assigned_work[node]
            left = {group: {name: False for name, done in unit.items() if not done} for group, unit in work.items()}
            ended_by = next((name for unit in left.values() for name in unit), None)
            for unit in left.values():
                unit.pop(ended_by, None)
            self.assigned_work[node] = {group: unit for group, unit in left.items() if unit}
            super().remove_node(node)
            return ended_by

        def _reschedule(self, node: Any) -> None:
            """Give work to a worker that replaces a crashed one, once it has reported its tests. A worker runs its last
            test only when it knows that no other follows."""
            if node in self.registered_collections:
                super()._reschedule(node)
                while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                    super()._reschedule(node)
                if not self.workqueue and not node.shutting_down:
                    node.shutdown()

    return Scheduling(config, log)


SEATS = 8  # maximum number of workers with timed tests


class Seats:
    """The seats of one worker; a single worker needs none. A timed test takes its worker's seat, an exclusive test all
    seats, and an ordinary test shares all seats with other ordinary tests. A worker that waits for a seat keeps the
    door lock: later workers wait behind it even if they could join the running tests, so it gets its seat when these
    tests end."""

    def __init__(self, folder: Path = BUILD) -> None:
        self._folder = folder
        self._fds: list[int] = []
        self._kind = ORDINARY  # of the test that has the seats

    def enter(self, kind: str, worker: str | None) -> None:
        """Wait before a test until it may run. `worker` is its name, None for a single worker. A worker with seats
        keeps them: see `leave`."""
        if worker is None or self._fds:
            return
        waiting = [self._open(name) for name in (("alone", "door") if kind == EXCLUSIVE else ("door",))]
        for fd in waiting:
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            mine = int(worker[2:]) % SEATS
            for seat in (mine,) if kind == TIMED else range(SEATS):
                self._fds.append(self._open(f"seat-{seat}"))
                fcntl.flock(self._fds[-1], fcntl.LOCK_SH if kind == ORDINARY else fcntl.LOCK_EX)
            self._kind = kind
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

    def leave(self, next_one: str | None = None) -> None:
        """Free the seats after a test. A timed test passes its seats on to the next timed test of its worker, unless an
        exclusive test waits; that one waits for one test only."""
        kind = self._kind
        if kind != ORDINARY and next_one == kind and (kind == EXCLUSIVE or not self._is_wanted_alone()):
            return
        for fd in self._fds:
            fcntl.flock(fd, fcntl.LOCK_UN)  # also for a process that a test has forked and left
            os.close(fd)
        self._fds.clear()
