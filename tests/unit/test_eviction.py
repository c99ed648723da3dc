"""The agent that takes borrowed memory back: whom it ends, when it lends, and that it can be killed at any point."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from gpushare.allocation import limit_update
from gpushare.core.errors import RequestError
from gpushare.core.model import Lease, Share
from gpushare.gpu import nvml_usage
from gpushare.monitor import eviction, overuse
from gpushare.state import agentlock, leases, leftover, log, shm_abi, storage
from gpushare.system import procs

from tests.support.host import TREE
from tests.support.processes import slow_to_exit
from tests.support.rootfs import run
from tests.unit import limithost, pure
from tests.unit.limithost import GIB

state = limithost.state
Start = Callable[..., subprocess.Popen[bytes]]


def report(state: str, container_id: str, used_bytes: int, wanted_bytes: int = 0, slot: int = 0) -> None:
    """Write what a process of the container reports."""
    path = Path(storage.container_dir(state, container_id), "rw", "usage")
    at = shm_abi.offset("gs_usage", "slot") + slot * shm_abi.SLOT_SIZE
    packed = bytearray(shm_abi.packer("gs_slot").pack(7, 7, 1, 1, 1, used_bytes, *[0] * (shm_abi.MAX_DEVICES - 1)))
    wants = shm_abi.offset("gs_slot", "wants")
    packed[wants : wants + 8] = wanted_bytes.to_bytes(8, "little")
    with path.open("r+b") as file:
        file.seek(at)
        file.write(packed)


def lent(request_bytes: int, limit_bytes: int = 0) -> tuple[Share]:
    changes: dict[str, Any] = {"virtual_bytes": limit_bytes, "lending": "evict"} if limit_bytes else {}
    return (pure.share(0, 0, request_bytes)._replace(**changes),)


class Clock:
    """time.monotonic, which the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now_s = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: self._now_s)

    def pass_s(self, seconds: float) -> None:
        self._now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def start(state: str) -> Iterator[Start]:
    """start(id, request, limit) -> the init of a "container"; a limit above the request is lent."""
    running = []

    def make(container_id: str, request_bytes: int, limit_bytes: int = 0) -> subprocess.Popen[bytes]:
        init = subprocess.Popen(["sleep", "inf"])
        running.append(init)
        limithost.hold(state, init.pid, *lent(request_bytes, limit_bytes), container_id=container_id)
        return init

    yield make
    for init in running:
        init.kill()
        init.wait()


def is_lent(state: str, container_id: str) -> bool:
    return bool(limithost.limits(state, container_id).devices[0].flags & shm_abi.DEVICE_LENDING)


def test_agent_ends_the_borrower_furthest_above_its_request(
    state: str, start: Start, tmp_path: Path, clock: Clock
) -> None:
    """It lends while no container waits; then it stops lending, and says why it ends which container, everywhere."""
    most, less, plain = start("most", GIB, 12 * GIB), start("less", 4 * GIB, 12 * GIB), start("plain", 6 * GIB)
    said: list[str] = []
    agent = eviction.Agent(state, str(tmp_path / "log"), say=said.append)
    agent.tick()
    assert is_lent(state, "most") and is_lent(state, "less") and not is_lent(state, "plain")
    report(state, "most", 6 * GIB)
    report(state, "less", 8 * GIB)
    report(state, "plain", 6 * GIB)
    agent.tick()
    assert said == [] and is_lent(state, "most")
    report(state, "plain", 6 * GIB, 2 * GIB)
    agent.tick()
    assert most.wait(5) == -signal.SIGKILL
    assert less.poll() is None is plain.poll()
    assert not is_lent(state, "less")
    line = (
        "container most was killed: it had borrowed 5 GiB above its request of 1 GiB on device 0, and plain needs "
        "its own request; request more memory for it, or set policy.lending to movable"
    )
    assert said == [f"gpushare: {line}"] and log.read(state, "most") == line
    written = (tmp_path / "log").read_text()
    assert "decision=evicted id=most " in written and f"devices={pure.UUIDS[0]} " in written
    assert f"used={6 * GIB} memory={GIB} limit={12 * GIB} needed_by=plain way=agent" in written
    for _ in range(2):
        agent.tick()
        assert less.poll() is None, "the memory of the first is free, and the waiting container may get it"
    clock.pass_s(eviction.FIRST_PAUSE_S)
    agent.tick()
    assert less.wait(5) == -signal.SIGKILL and plain.poll() is None
    agent.tick()
    assert len(said) == 2


@pytest.mark.parametrize(
    ("used", "wanted", "why"),
    [
        (7 * GIB, GIB, "above its request"),
        (GIB, 7 * GIB, "more than its request"),
        (6 * GIB, 0, "waits for nothing"),
        (0, 6 * GIB, "more than it counts with it"),
        (6 * GIB, (3 << 56) | GIB, "elsewhere"),
    ],
)
def test_statement_beyond_the_request_ends_no_container(
    state: str, start: Start, used: int, wanted: int, why: str
) -> None:
    borrower = start("borrower", GIB, 12 * GIB)
    start("other", 6 * GIB)
    report(state, "borrower", 10 * GIB)
    report(state, "other", used, wanted)
    eviction.Agent(state, "none").tick()
    assert borrower.poll() is None and is_lent(state, "borrower")


@pytest.mark.parametrize(("free", "ended"), [(2 * GIB, False), (GIB, True), (None, True)])
def test_driver_tells_whether_the_memory_is_free(
    state: str, start: Start, monkeypatch: pytest.MonkeyPatch, free: Any, ended: bool
) -> None:
    """A container that claims to wait although the memory is free ends no borrower."""
    gpu = nvml_usage.Gpu(16 * GIB, 16 * GIB - free if free else None, None, None, None, ())
    monkeypatch.setattr(nvml_usage, "read", lambda *_: {pure.UUIDS[0]: gpu})
    borrower = start("borrower", GIB, 12 * GIB)
    start("other", 6 * GIB)
    report(state, "borrower", 10 * GIB)
    report(state, "other", GIB, GIB)
    agent = eviction.Agent(state, "none", "libnvidia-ml.so")
    agent.tick()
    agent.tick()
    assert is_lent(state, "borrower") is not ended
    assert (borrower.wait(5) if ended else borrower.poll()) == (-signal.SIGKILL if ended else None)


def test_small_need_that_fits_hides_no_larger_one(state: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that claims to wait for a little, again and again, does not keep another from its request."""
    gpu = nvml_usage.Gpu(16 * GIB, 15 * GIB, None, None, None, ())
    asked: list[str] = []
    monkeypatch.setattr(nvml_usage, "read", lambda library, *_: asked.append(library) or {pure.UUIDS[0]: gpu})
    borrower = start("borrower", GIB, 12 * GIB)
    start("a", 2 * GIB)
    start("b", 6 * GIB)
    report(state, "borrower", 10 * GIB)
    report(state, "a", GIB, 2 << 20)
    agent = eviction.Agent(state, "none", "libnvidia-ml.so")
    now = time.monotonic()
    with monkeypatch.context() as stopped:
        stopped.setattr(time, "monotonic", lambda: now)  # later rounds ask the driver again
        for _ in range(3):
            agent.tick()
    assert borrower.poll() is None and len(asked) == 1, "the driver is not asked in each round"
    report(state, "b", 6 * GIB, 3 * GIB)
    agent.tick()
    assert borrower.wait(5) == -signal.SIGKILL and len(asked) == 2


def test_next_borrower_is_ended_if_one_does_not_end(
    state: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process in an uninterruptible call of the driver. It is killed again when no other borrower is left."""
    stuck, other = start("stuck", GIB, 12 * GIB), start("other", GIB, 12 * GIB)
    start("waiting", 6 * GIB)
    report(state, "stuck", 6 * GIB)
    report(state, "other", 4 * GIB)
    report(state, "waiting", 6 * GIB, 2 * GIB)
    kill, sent = procs.wait, []

    def wait(process: procs.Process, milliseconds: int, send: int = 0) -> None:
        sent.append(process.pid)
        if process.pid != stuck.pid:
            kill(process, milliseconds, send)

    monkeypatch.setattr(procs, "wait", wait)
    said: list[str] = []
    agent = eviction.Agent(state, "none", say=said.append)
    now = time.monotonic()
    agent.tick()
    agent.tick()
    assert sent == [stuck.pid] and other.poll() is None
    for later, ended in ((1, [stuck, other]), (2, [stuck, other, stuck])):
        monkeypatch.setattr(time, "monotonic", lambda later=later: now + later * (eviction.ENDING_S + 1))
        agent.tick()
        agent.tick()
        assert sent == [one.pid for one in ended]
        other.wait(5)
    assert len(said) == 2, "each is reported once"


class Ended:
    """A borrower of 5 GiB that ends by itself, another of 1 GiB, and a container that waits for `wanted_bytes`."""

    def __init__(self, state: str, start: Start, log_file: Path, wanted_bytes: int = 2 * GIB) -> None:
        self.borrower, self.other = start("borrower", GIB, 12 * GIB), start("other", GIB, 12 * GIB)
        start("waiting", 6 * GIB)
        report(state, "borrower", 6 * GIB)
        report(state, "other", 2 * GIB)
        self.said: list[str] = []
        self.log_file = log_file
        self.agent = eviction.Agent(state, str(log_file), say=self.said.append)
        self.agent.tick()
        report(state, "waiting", 6 * GIB, wanted_bytes)

    def end(self) -> None:
        self.borrower.kill()
        self.borrower.wait()

    def decisions(self) -> list[str]:
        lines = self.log_file.read_text().splitlines() if self.log_file.exists() else []
        return [line.partition("decision=")[2].partition(" dialect=")[0] for line in lines]


@pytest.mark.parametrize(
    "when", ["before the round", "after the first reading", "after the last reading", "after the line"]
)
def test_end_by_itself_is_not_an_eviction(
    state: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """No borrower is killed for memory that is free already."""
    one = Ended(state, start, tmp_path / "log")
    held, tell, readings = one.agent._held, one.agent._tell, []

    def read(live: Sequence[Lease]) -> list[eviction.Held]:
        found = held(live)
        readings.append(found)
        if when.endswith(("first reading", "last reading")[min(len(readings), 2) - 1]):
            one.end()
        return found

    def told(most: eviction.Held, waiting: eviction.Held) -> None:
        tell(most, waiting)
        one.end()

    if "before" in when:
        one.end()
    monkeypatch.setattr(one.agent, "_held", read)
    if "line" in when:
        monkeypatch.setattr(one.agent, "_tell", told)
    one.agent.tick()
    assert one.borrower.poll() is not None and one.other.poll() is None
    assert log.read(state, "borrower") == ""
    lines = ["evicted id=borrower", "ended id=borrower"] if "line" in when else []
    assert one.decisions() == lines and len(one.said) == len(lines)
    assert one.said[1:] == ["gpushare: container borrower was not killed: no process of it ran any more"][: len(lines)]
    report(state, "waiting", 6 * GIB)
    one.agent.tick()
    assert one.other.poll() is None


def test_end_by_itself_that_frees_too_little_is_not_waited_for(state: str, start: Start, tmp_path: Path) -> None:
    one = Ended(state, start, tmp_path / "log", wanted_bytes=6 * GIB)
    one.end()
    one.agent.tick()
    assert one.other.wait(5) == -signal.SIGKILL and one.decisions() == ["evicted id=other"]


def test_borrower_that_exits_is_waited_for_and_not_reported(
    state: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes close their files, which takes time on a device with much memory in use. After some seconds the
    next borrower is ended."""
    one = Ended(state, start, tmp_path / "log")
    with slow_to_exit() as (pid, let_end):
        limithost.hold(state, pid, *lent(GIB, 12 * GIB), container_id="slow")
        report(state, "slow", 9 * GIB)
        report(state, "waiting", 6 * GIB)
        one.agent.tick()
        os.kill(pid, signal.SIGKILL)
        while not procs.is_exiting(pid):
            pass
        report(state, "slow", 0)  # its usage ends before its memory
        report(state, "waiting", 6 * GIB, 2 * GIB)
        one.agent.tick()
        one.agent.tick()
        assert one.borrower.poll() is None and one.decisions() == []
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + eviction.ENDING_S + 1)
        one.agent.tick()
        assert one.borrower.wait(5) == -signal.SIGKILL
        assert one.decisions() == ["evicted id=borrower"]
        let_end()


def test_borrower_without_a_process_to_kill_is_reported_once(
    state: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose processes are in another cgroup than its lease has. The next borrower is ended."""
    one = Ended(state, start, tmp_path / "log")
    monkeypatch.setattr(leftover, "lives", lambda _, lease: lease.id == "borrower")
    one.end()
    for _ in range(3):
        one.agent.tick()
    assert one.other.wait(5) == -signal.SIGKILL
    assert one.decisions().count("evicted id=borrower") == 1
    assert "evicted id=other" in one.decisions()


class Driver:
    """The driver's figures: processes of containers on a full device, until `free_bytes` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **used_bytes: tuple[subprocess.Popen[bytes], Any]) -> None:
        self.used_bytes, self.free_bytes = used_bytes, 0
        monkeypatch.setattr(nvml_usage, "read", lambda *_: {pure.UUIDS[0]: self.gpu()})

    def gpu(self) -> nvml_usage.Gpu:
        rows = tuple(nvml_usage.Process(init.pid, size) for init, size in self.used_bytes.values())
        return nvml_usage.Gpu(16 * GIB, 16 * GIB - self.free_bytes, None, None, None, rows)


@pytest.mark.parametrize(("driver_bytes", "ended"), [(6 * GIB, False), (5 * GIB, False), (4 * GIB, True), (0, True)])
def test_wait_for_more_than_the_driver_leaves_of_the_request_ends_no_container(
    state: str, start: Start, monkeypatch: pytest.MonkeyPatch, driver_bytes: int, ended: bool
) -> None:
    """A container that has its whole request cannot wait for memory, whatever it writes into its usage file."""
    borrower, other = start("borrower", GIB, 12 * GIB), start("other", 6 * GIB)
    Driver(monkeypatch, borrower=(borrower, 10 * GIB), other=(other, driver_bytes))
    report(state, "borrower", 10 * GIB)
    report(state, "other", 2 * GIB, 2 * GIB)
    eviction.Agent(state, "none", "libnvidia-ml.so").tick()
    assert (borrower.wait(5) if ended else borrower.poll()) == (-signal.SIGKILL if ended else None)
    assert ended or is_lent(state, "borrower")


@pytest.mark.parametrize("figure", [None, GIB])
def test_container_that_does_not_take_freed_memory_is_believed_after_growing_pauses(
    state: str, start: Start, monkeypatch: pytest.MonkeyPatch, clock: Clock, figure: Any
) -> None:
    """Without the driver's figure for processes, and with it. Each kill frees more than the container waits for."""
    start("borrower", GIB, 12 * GIB)
    report(state, "borrower", 10 * GIB)
    false = start("false", 6 * GIB)
    report(state, "false", 6 * GIB, 4 * GIB)
    Driver(monkeypatch, false=(false, figure))
    kills: list[float] = []

    def kill(*_: object) -> overuse.Stopped:
        kills.append(time.monotonic())
        return overuse.Stopped((procs.Process(false.pid, 1, ""),), True)  # no living process has these numbers

    agent = eviction.Agent(state, "none", "libnvidia-ml.so")
    monkeypatch.setattr(agent, "_kill", kill)
    for _ in range(70):
        agent.tick()
        clock.pass_s(0.5)
    pauses = [round(later - earlier) for earlier, later in zip(kills, kills[1:])]
    assert pauses == [1, 2, 4, 8, 16]


def test_container_that_takes_freed_memory_is_believed_at_once(
    state: str, start: Start, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    other = start("other", 6 * GIB)
    driver = Driver(monkeypatch, other=(other, GIB))
    agent = eviction.Agent(state, "none", "libnvidia-ml.so")
    for number in range(4):
        borrower = start(f"borrower{number}", GIB, 12 * GIB)
        report(state, f"borrower{number}", 10 * GIB)
        report(state, "other", (number + 2) * GIB, GIB)
        clock.pass_s(eviction.ASK_AGAIN_S)
        agent.tick()
        assert borrower.wait(5) == -signal.SIGKILL
        driver.used_bytes["other"] = (other, (number + 2) * GIB)
        report(state, "other", (number + 2) * GIB)
        for _ in range(2):
            agent.tick()


def test_two_borrowers_are_ended_for_one_need_without_a_pause(state: str, start: Start, clock: Clock) -> None:
    """The first one's memory is too little."""
    borrowers = [start(name, GIB, 12 * GIB) for name in ("a", "b")]
    start("other", 6 * GIB)
    report(state, "a", 4 * GIB)
    report(state, "b", 3 * GIB)
    report(state, "other", 6 * GIB, 5 * GIB)
    agent = eviction.Agent(state, "none")
    for borrower in borrowers:
        agent.tick()
        assert borrower.wait(5) == -signal.SIGKILL
        agent.tick()  # waits for its end


def test_borrower_that_reports_less_than_the_driver_counts_comes_first(
    state: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A false report does not cost an honest borrower its memory."""
    false, honest = start("false", GIB, 12 * GIB), start("honest", GIB, 12 * GIB)
    other = start("other", 6 * GIB)
    Driver(monkeypatch, false=(false, 9 * GIB), honest=(honest, 4 * GIB), other=(other, 2 * GIB))
    report(state, "false", GIB)
    report(state, "honest", 4 * GIB)
    report(state, "other", 4 * GIB, 2 * GIB)
    eviction.Agent(state, "none", "libnvidia-ml.so").tick()
    assert false.wait(5) == -signal.SIGKILL and honest.poll() is None


def test_borrower_that_reports_no_use_is_found_by_the_driver(
    state: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    false, honest = start("false", GIB, 12 * GIB), start("honest", GIB, 12 * GIB)
    start("other", 6 * GIB)
    used = (nvml_usage.Process(false.pid, 9 * GIB), nvml_usage.Process(honest.pid, GIB))
    gpu = nvml_usage.Gpu(16 * GIB, 16 * GIB, None, None, None, used)
    monkeypatch.setattr(nvml_usage, "read", lambda *_: {pure.UUIDS[0]: gpu})
    report(state, "other", 6 * GIB, GIB)
    eviction.Agent(state, "none", "libnvidia-ml.so").tick()
    assert false.wait(5) == -signal.SIGKILL
    assert honest.poll() is None


@pytest.mark.parametrize("damage", ["header", "empty", "removed"])
def test_borrower_that_damages_its_usage_file_is_found_by_the_driver(
    state: str, start: Start, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """The file is the container's own, so it can write anything there after it has borrowed."""
    borrower = start("borrower", GIB, 12 * GIB)
    start("other", 6 * GIB)
    gpu = nvml_usage.Gpu(16 * GIB, 16 * GIB, None, None, None, (nvml_usage.Process(borrower.pid, 9 * GIB),))
    monkeypatch.setattr(nvml_usage, "read", lambda *_: {pure.UUIDS[0]: gpu})
    path = Path(storage.container_dir(state, "borrower"), "rw", "usage")
    if damage == "header":
        with path.open("r+b") as file:
            file.write(bytes(8))
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    report(state, "other", 6 * GIB, GIB)
    eviction.Agent(state, "none", "libnvidia-ml.so").tick()
    assert borrower.wait(5) == -signal.SIGKILL


def test_largest_need_decides_what_is_enough(state: str, start: Start, tmp_path: Path) -> None:
    """A container that claims to wait for a little does not keep another from its request when a borrower ends."""
    one = Ended(state, start, tmp_path / "log", wanted_bytes=6 * GIB)
    start("a", GIB)
    report(state, "a", GIB, 2 << 20)
    one.end()
    one.agent.tick()
    assert one.other.wait(5) == -signal.SIGKILL
    assert "needed_by=waiting " in one.log_file.read_text()


def test_full_disk_stops_no_eviction(state: str, start: Start, tmp_path: Path) -> None:
    """Neither the log nor the reason for `gpushare inspect` can be written."""
    places = [tmp_path / "log", Path(state, "errors")]
    for place in places:
        place.mkdir(exist_ok=True)
        run("mount", "-t", "tmpfs", "-o", "size=4k", "full", place)
        (place / "filler").write_bytes(bytes(4096))
    try:
        borrower = start("borrower", GIB, 12 * GIB)
        start("other", 6 * GIB)
        report(state, "borrower", 10 * GIB)
        report(state, "other", 6 * GIB, GIB)
        said: list[str] = []
        eviction.Agent(state, str(places[0] / "decisions"), say=said.append).tick()
        assert borrower.wait(5) == -signal.SIGKILL and len(said) == 1
        assert log.read(state, "borrower") == ""
    finally:
        for place in places:
            run("umount", place)


def test_lending_starts_again_some_time_after_the_last_need(
    state: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("borrower", GIB, 12 * GIB)
    start("other", 6 * GIB)
    agent = eviction.Agent(state, "none")
    report(state, "other", 6 * GIB, GIB)
    agent.tick()
    report(state, "other", 6 * GIB)
    now = time.monotonic()
    for later, lent in ((eviction.HOLD_S / 2, False), (eviction.HOLD_S + 1, True)):
        monkeypatch.setattr(time, "monotonic", lambda later=later: now + later)
        agent.tick()
        assert is_lent(state, "borrower") is lent
    agent.close()
    assert not is_lent(state, "borrower")


def test_container_with_a_damaged_limits_file_stops_no_lending_of_others(state: str, start: Start) -> None:
    start("a", GIB, 2 * GIB)
    start("borrower", GIB, 12 * GIB)
    path = Path(storage.container_dir(state, "a"), "share", "limits")
    other = lent(GIB, 2 * GIB)[0]
    path.write_bytes(shm_abi.pack_limits((other._replace(device=other.device._replace(uuid=pure.UUIDS[1])),), 1))
    agent = eviction.Agent(state, "none")
    agent.tick()
    assert is_lent(state, "borrower")
    agent.close()
    assert not is_lent(state, "borrower")


def test_next_start_stops_lending_of_an_agent_that_was_killed(state: str, start: Start) -> None:
    start("borrower", 4 * GIB, 12 * GIB)
    lock = agentlock.take(state)
    eviction.Agent(state, "none").tick()
    limithost.reserve(state, GIB, "c2")
    assert is_lent(state, "borrower")
    os.close(lock)
    limithost.reserve(state, GIB, "c3")
    assert not is_lent(state, "borrower")


def test_agent_holds_its_lock_after_the_state_directory_was_lost(state: str, tmp_path: Path) -> None:
    """Starts that follow lend again."""
    (tmp_path / "config.yaml").write_text("version: 1\npolicy: {lending: evict}\n")
    words = ["--config", str(tmp_path / "config.yaml"), "--state", state, "agent"]
    code = f"import sys; sys.path.insert(0, {str(TREE / 'hook')!r}); from gpushare.cli import main; sys.exit(main())"
    with subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE) as agent:
        try:
            assert agent.stdout is not None and agent.stdout.readline().startswith(b"lending")
            Path(state, agentlock.FILE).unlink()
            end = time.monotonic() + 20
            while not agentlock.is_held(state):
                assert time.monotonic() < end
        finally:
            agent.terminate()
    assert agent.returncode == 0


def test_live_change_keeps_lending(state: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start("borrower", 4 * GIB, 12 * GIB)
    eviction.Agent(state, "none").tick()
    report(state, "borrower", 11 * GIB)

    def decide(lease: Lease, live: tuple[Lease, ...], seen: leases.View) -> tuple[Share, ...]:
        return (lease.shares[0]._replace(memory_limit_bytes=2 * GIB, virtual_bytes=8 * GIB),)

    changed = limit_update.change(state, "borrower", decide)
    (limit,) = limithost.limits(state, "borrower").devices
    assert is_lent(state, "borrower") and (limit.memory_limit_bytes, limit.virtual_bytes) == (2 * GIB, 8 * GIB)
    assert changed.after.shares[0].draining_bytes == 0  # what is borrowed can be taken back


def test_limits_change_while_memory_is_taken_back(state: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process changes the limits of all containers, again and again, while the agent ends the borrowers."""
    borrowers = {f"b{n}": start(f"b{n}", GIB, 12 * GIB) for n in range(4)}
    waiting = start("waiting", 6 * GIB)
    for name in borrowers:
        report(state, name, 11 * GIB)
    stop, tell_stop = os.pipe()
    pid = os.fork()
    if pid == 0:
        code, dice = 1, random.Random(1)
        try:
            while not select.select([stop], [], [], 0)[0]:
                _change_limits(state, dice, *borrowers, "waiting")
            code = 0
        finally:
            os._exit(code)
    agent = eviction.Agent(state, "none")
    end = time.monotonic() + 60
    for _ in range(20):
        agent.tick()  # lends
    report(state, "waiting", 5 * GIB, GIB)
    while any(init.poll() is None for init in borrowers.values()) and time.monotonic() < end:
        agent.tick()
    os.write(tell_stop, b".")
    assert os.waitpid(pid, 0)[1] == 0
    assert [init.wait(5) for init in borrowers.values()] == [-signal.SIGKILL] * 4
    assert waiting.poll() is None and limit_update.unfinished(state) is None
    (lease,) = leases.view(state).live
    (limit,) = limithost.limits(state, "waiting").devices
    assert lease.id == "waiting" and limit.memory_limit_bytes == lease.shares[0].memory_limit_bytes


def _change_limits(state: str, dice: random.Random, *names: str) -> None:
    """Change each container once, unless it has ended."""
    for name in names:
        request = dice.choice((5, 6)) if name == "waiting" else dice.choice((1, 2))
        sizes: dict[str, Any] = {"memory_limit_bytes": request * GIB}
        if name != "waiting":
            sizes["virtual_bytes"] = dice.randint(request, 12) * GIB
        with suppress(RequestError):
            limit_update.change(state, name, lambda lease, *_, sizes=sizes: (lease.shares[0]._replace(**sizes),))


def test_agent_killed_200_times_loses_nothing(state: str, start: Start) -> None:
    """Each agent is killed at a random moment of its first rounds. At all times the leases are whole and count the
    requests, and each limits file has both. In the end the borrowers are gone, and no other container is."""
    borrowers = [start(f"b{n}", GIB, 12 * GIB) for n in range(4)]
    waiting = start("waiting", 6 * GIB)
    for n in range(4):
        report(state, f"b{n}", (2 + n) * GIB)
    moments = random.Random(1)
    for killed in range(200):
        if killed == 150:
            report(state, "waiting", 6 * GIB, GIB)  # before that the agents lend, and stop lending
        pid = os.fork()
        if pid == 0:
            agent = eviction.Agent(state, "none")
            while True:
                agent.tick()
                agent.close()
        time.sleep(moments.random() / 100)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for init in borrowers:
            init.poll()
        seen = leases.view(state)
        assert not seen.damaged and all(lease.shares[0].memory_limit_bytes in (GIB, 6 * GIB) for lease in seen.live)
        for lease in seen.live:
            (limit,) = limithost.limits(state, lease.id).devices
            assert limit.memory_limit_bytes == lease.shares[0].memory_limit_bytes
    agent = eviction.Agent(state, "none")
    end = time.monotonic() + 10
    while any(init.poll() is None for init in borrowers) and time.monotonic() < end:
        agent.tick()
    assert [init.wait(5) for init in borrowers] == [-signal.SIGKILL] * 4
    assert waiting.poll() is None
    assert [lease.id for lease in leases.view(state).live] == ["waiting"]
