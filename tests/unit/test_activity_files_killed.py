"""Activity files after a start or release was killed, after files were lost, and after an upgrade."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from gpushare.state import activity_files, leaseend, leases
from gpushare.system import procs

from tests.support import rootfs
from tests.unit import activityhost
from tests.unit.activityhost import UUID, files, index, reserve
from tests.unit.together import at_once

state = activityhost.state


# Killed starts, lost files, earlier versions


def test_index_matches_leases_after_killed_start(state: str) -> None:
    """A start or release that is killed between two steps leaves no number or file in use."""
    reserve(state, "c1")
    activity_files.take(state, UUID, 5, {})
    activity_files.settle(state, UUID, {0: 30, 5: 40, 127: 50})
    activity_files.take(state, UUID, 127, {})
    assert reserve(state, "c2").shares[0].page == 1
    assert index(state)[0] == {0, 1} and files(state) == {"index", "0", "1"}


def test_sweep_frees_number_of_dead_reservation(state: str) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            reserve(state, "dead")
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert index(state)[0] == {0}
    assert leaseend.sweep(state) == ["dead"]
    assert index(state)[0] == frozenset() and files(state) == {"index"}


def killed_at(call: int, work: Callable[[], object]) -> bool:
    """Run `work` in a process that kills itself before this system call; return False if it ended first."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    left = call

    def count(_frame: object, event: str, called: object) -> None:
        nonlocal left
        if event == "c_call" and getattr(called, "__module__", "") in ("posix", "fcntl"):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.setprofile(count)
        work()
    finally:
        sys.setprofile(None)
        os._exit(0)


def consistent(state: str) -> None:
    """Require that the index, the files and the leases agree."""
    held = {lease.shares[0].page for lease in leases.view(state).live}
    assert index(state)[0] == held
    assert files(state) == {"index", *map(str, held)}
    for number in held:
        status = os.stat(activity_files.path(state, UUID, number))
        assert (status.st_size, stat.S_IMODE(status.st_mode)) == (activity_files.PAGE_SIZE, 0o666)


def test_start_killed_at_any_call_leaks_no_number(state: str) -> None:
    reserve(state, "c1")
    for call in range(200):
        if not killed_at(call, lambda: reserve(state, "dead")):
            break
        lease = reserve(state, "next")
        assert lease.shares[0].page == 1, f"call {call}"
        consistent(state)
        leases.undo(state, "next")
        consistent(state)
    assert 30 < call < 199


def test_undo_finishes_release_killed_at_any_call(state: str) -> None:
    reserve(state, "c1")

    def release() -> None:
        with leases.locked(state):
            leases.drop(state, "c2", shares)

    for call in range(200):
        shares = reserve(state, "c2").shares
        if not killed_at(call, release):
            break
        leases.undo(state, "c2")
        consistent(state)
    assert 5 < call < 199


def test_first_start_on_device_killed_at_any_call_does_not_block_next(state: str) -> None:
    for call in range(200):
        again = killed_at(call, lambda: activity_files.prepare(state, UUID))
        reserve(state, "next")
        assert rootfs.mount_points().count(activity_files.directory(state, UUID)) == 1, f"call {call}"
        consistent(state)
        leases.undo(state, "next")
        rootfs.unmount_below(Path(state, "devices"))
        if not again:
            break
    assert 5 < call < 199


def test_concurrent_first_starts_mount_once(state: str) -> None:
    parent = procs.myself()

    def start(number: int) -> None:
        lease = reserve(state, f"c{number}")
        leases.hold(state, lease, procs.Process(os.getppid(), parent.start, "R"), "/")

    assert at_once(*(partial(start, number) for number in range(8))) == [0] * 8
    assert rootfs.mount_points().count(activity_files.directory(state, UUID)) == 1
    assert index(state)[0] == frozenset(range(8))
    assert sorted(lease.shares[0].page for lease in leases.view(state).live) == list(range(8))


def test_lost_devices_folder_is_made_again(state: str) -> None:
    lease = reserve(state, "old")
    rootfs.unmount_below(Path(state, "devices"))
    os.rmdir(activity_files.directory(state, UUID))
    os.rmdir(Path(state, "devices"))
    assert leases.find(state, "old") == lease
    assert reserve(state, "new").shares[0].page == 1
    leases.undo(state, "old")
    assert index(state)[0] == {1}


def test_release_works_without_devices_directory(state: str) -> None:
    reserve(state, "c1")
    rootfs.unmount_below(Path(state, "devices"))
    leases.undo(state, "c1")
    assert leases.view(state) == leases.View((), (), (), ())
    assert reserve(state, "c2").shares[0].page == 0
