"""Suspend and resume without a driver: whom the agent resumes, and what is known before a process is lost."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

import click
import pytest
from gpushare.allocation import suspension
from gpushare.cli import agent as agent_command
from gpushare.cli.options import Paths
from gpushare.core import constants
from gpushare.core.errors import CapacityError, DeviceError, GpushareError
from gpushare.core.model import Node, Share
from gpushare.gpu import checkpoint, nvml, nvml_usage
from gpushare.monitor import eviction, suspending
from gpushare.state import accounts, agentlock, leases, shm_abi, storage, usage_reader
from gpushare.system import cgroup, procs

from tests.unit import limithost, pure
from tests.unit.limithost import GIB, UUID
from tests.unit.test_eviction import report

state = limithost.state
SIZE = 16 * GIB


class Driver:
    """The states of processes, and what each one has on the device."""

    def __init__(self) -> None:
        self.state: dict[int, int] = {}
        self.size: dict[int, int] = {}
        self.lost: list[int] = []
        self.reads = 0
        self.taken_bytes = 0  # by others
        self.before: dict[str, Callable[[], object]] = {}  # name of a call -> what happens before it
        self.after: dict[str, Callable[[], object]] = {}

    def used_bytes(self) -> int:
        return self.taken_bytes + sum(self.size[pid] for pid, at in self.state.items() if at < checkpoint.CHECKPOINTED)

    def read(self, *_: object) -> dict[str, nvml_usage.Gpu]:
        self.reads += 1
        found = [nvml_usage.Process(pid, self.size[pid]) for pid, at in self.state.items() if at < 2]
        return {UUID: nvml_usage.Gpu(SIZE, self.used_bytes(), 0, 0, 0, tuple(found))}

    def states(self, pids: Any) -> dict[int, int]:
        return {pid: self.state[pid] for pid in pids if pid in self.state}

    def _move(self, name: str, pid: int, to: int) -> None:
        self.before.get(name, lambda: None)()
        self.state[pid] = to
        self.after.get(name, lambda: None)()

    def lock(self, pid: int, seconds: float) -> None:
        self._move("lock", pid, checkpoint.LOCKED)

    def checkpoint(self, pid: int, size_bytes: int = 0) -> None:
        self._move("checkpoint", pid, checkpoint.CHECKPOINTED)

    def restore(self, pid: int, size_bytes: int = 0) -> None:
        if self.used_bytes() + self.size[pid] > SIZE:
            self.lost.append(pid)
        self._move("restore", pid, checkpoint.LOCKED)

    def unlock(self, pid: int) -> None:
        self._move("unlock", pid, checkpoint.RUNNING)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(checkpoint, "Driver", lambda *_: found)
    monkeypatch.setattr(nvml_usage, "read", found.read)
    monkeypatch.setattr(procs, "host_memory", lambda: (1 << 40, 1 << 40))
    monkeypatch.setattr(cgroup, "memory_room", lambda pid: None)
    monkeypatch.setattr(cgroup, "first_frozen", lambda pids: 0)
    return found


@pytest.fixture
def start(state: str, driver: Driver) -> Iterator[Callable[..., int]]:
    """start(id, limit, used, phase, lends) -> the pid of a "container" that uses CUDA; `lends`: up to how much."""
    running = []

    def make(container_id: str, limit: Optional[int], used: int = GIB, phase: str = "", lends: int = 0) -> int:
        init = subprocess.Popen(["sleep", "inf"])
        running.append(init)
        share = pure.share(0, 0, limit)._replace(phase=phase, suspended_bytes=used if phase == "suspended" else 0)
        share = share._replace(virtual_bytes=lends, lending=constants.EVICT if lends else "")
        limithost.hold(state, init.pid, share, container_id=container_id)
        report(state, container_id, used)
        does(state, container_id, usage_reader.DOES_WAIT)
        at = checkpoint.CHECKPOINTED if phase else checkpoint.RUNNING
        driver.state[init.pid], driver.size[init.pid] = at, used
        return init.pid

    yield make
    for init in running:
        init.kill()
        init.wait()


def does(state: str, container_id: str, what: int) -> None:
    with Path(storage.container_dir(state, container_id), "rw", "usage").open("r+b") as file:
        file.seek(shm_abi.offset("gs_usage", "does"))
        file.write(bytes([what]))


def share_of(state: str, container_id: str) -> Share:
    lease = leases.find(state, container_id)
    assert lease is not None
    return lease.shares[0]


def phase(state: str, container_id: str) -> str:
    return share_of(state, container_id).phase


IDLE = {"suspend_idle_s": 1, "suspend_least_s": 0}


def agent(state: str, said: list[str], node: Node) -> suspending.Suspender:
    return suspending.Suspender(suspension.Site(state, node), state, node, "none", said.append)


def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each running container have been idle for long."""
    find = leases.view

    def older(state: str) -> leases.View:
        seen = find(state)
        return seen._replace(live=tuple(one._replace(created=0.0) for one in seen.live))

    monkeypatch.setattr(leases, "view", older)


def test_container_that_cannot_go_on_keeps_no_other_one_waiting(
    state: str, start: Callable[..., int], driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant can stop a process of its own that waits: nothing is suspended for it, and the next one is resumed."""
    stopped = start("stopped", 4 * GIB, phase="suspended")
    start("next", 4 * GIB, phase="suspended")
    start("idle", 4 * GIB)
    monkeypatch.setattr(cgroup, "first_frozen", lambda pids: stopped if stopped in pids else 0)
    idle(monkeypatch)
    for name in ("stopped", "next"):
        report(state, name, GIB, 1)
    said: list[str] = []
    one = agent(state, said, pure.node(1, **IDLE))
    one._asked_s = {"stopped": 0.0}
    for _ in range(3):
        one.tick()
    assert [phase(state, name) for name in ("stopped", "next", "idle")] == ["suspended", "", ""]
    assert [line.partition(": ")[2].partition(" ")[0] for line in said] == ["container", "container"], said


LEAST = {**IDLE, "suspend_least_s": 60}


def resumed_now(state: str, container_id: str) -> None:
    """Let a container that was started long ago have been resumed now, by a command or by an earlier agent."""
    lease = leases.find(state, container_id)
    assert lease is not None
    shares = (lease.shares[0]._replace(suspended_ns=1),)
    leases.rewrite(state, lease._replace(shares=shares, began_ns=1, counted_ns=accounts.now_ns()))


def test_resumed_container_runs_for_the_least_time(state: str, start: Callable[..., int], driver: Driver) -> None:
    """Also if a command resumed it, or an earlier agent."""
    start("waiting", 14 * GIB, phase="suspended")
    start("resumed", 14 * GIB)
    resumed_now(state, "resumed")
    report(state, "waiting", GIB, 1)
    agent(state, [], pure.node(1, **LEAST)).tick()
    assert phase(state, "resumed") == ""
    agent(state, [], pure.node(1, **IDLE)).tick()
    assert phase(state, "resumed") == "suspended"


@pytest.mark.parametrize("early", [True, False])
def test_borrower_that_ran_for_too_short_stays_suspended_for_the_least_time(
    state: str, start: Callable[..., int], driver: Driver, early: bool
) -> None:
    """It would have its memory moved at each call, back and forth. The request of the other one comes first."""
    start("borrower", 4 * GIB)
    if early:
        resumed_now(state, "borrower")
    one = agent(state, [], pure.node(1, **LEAST))
    assert one.take_back(leases.view(state).live[0]) and phase(state, "borrower") == "suspended"
    report(state, "borrower", GIB, 1)
    one.tick()
    assert phase(state, "borrower") == ("suspended" if early else "")


def ask(state: str, container_id: str) -> None:
    with Path(storage.container_dir(state, container_id), "rw", "usage").open("r+b") as file:
        file.seek(shm_abi.offset("gs_usage", "asks"))
        file.write(b"1")


@pytest.mark.parametrize("policy", [{}, LEAST])
def test_container_that_asks_and_cannot_be_suspended_is_tried_once(
    state: str, start: Callable[..., int], driver: Driver, monkeypatch: pytest.MonkeyPatch, policy: dict[str, int]
) -> None:
    """In policy.suspend.least, and only if the agent may suspend."""
    now, tries = [1000.0], []

    def lock(pid: int, seconds: float) -> None:
        tries.append(now[0])
        raise checkpoint.Busy("its work did not end")

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(driver, "lock", lock)
    start("one", 4 * GIB)
    ask(state, "one")
    one = agent(state, [], pure.node(1, **policy))
    for now[0] in range(1000, 1100, 2):
        one.tick()
    assert tries == ([1000, 1060] if policy else [])


@pytest.mark.parametrize("early", [True, False])
def test_container_that_asks_is_suspended_and_no_other_one(
    state: str, start: Callable[..., int], driver: Driver, early: bool
) -> None:
    """Not before it ran for the least time: it could keep the agent busy for ever."""
    start("one", 4 * GIB)
    start("other", 4 * GIB)
    if early:
        resumed_now(state, "one")
    ask(state, "one")
    said: list[str] = []
    agent(state, said, pure.node(1, **LEAST)).tick()
    assert [phase(state, name) for name in ("one", "other")] == ["" if early else "suspended", ""]
    assert [line.rpartition(": ")[2] for line in said] == ([] if early else ["it asked for that"])


def test_only_containers_that_make_room_are_suspended(
    state: str, start: Callable[..., int], driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The small one was idle for longest, and is not needed."""
    start("waiting", 12 * GIB, phase="suspended")
    start("small", GIB)
    start("large", 12 * GIB)
    report(state, "waiting", GIB, 1)
    find = leases.view
    ages = {"small": 0.0, "large": 1000.0}
    monkeypatch.setattr(
        leases,
        "view",
        lambda at: (seen := find(at))._replace(
            live=tuple(one._replace(created=ages.get(one.id, one.created)) for one in seen.live)
        ),
    )
    agent(state, [], pure.node(1, **IDLE)).tick()
    assert [phase(state, name) for name in ("waiting", "small", "large")] == ["", "", "suspended"]


def test_borrower_that_another_command_suspends_is_not_killed(
    state: str, start: Callable[..., int], driver: Driver
) -> None:
    start("borrower", 4 * GIB)
    lease = leases.find(state, "borrower")
    one = agent(state, [], pure.node(1, **IDLE))
    held = os.open(storage.container_dir(state, "borrower"), os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert lease is not None and one.take_back(lease)
    finally:
        os.close(held)


@pytest.mark.parametrize(("first_gib", "phases"), [(12, ["", "suspended"]), (16, ["suspended", "suspended"])])
def test_containers_are_resumed_in_the_order_of_their_calls(
    state: str, start: Callable[..., int], driver: Driver, first_gib: int, phases: list[str]
) -> None:
    """Also if a later one would fit earlier: small containers could keep a large one waiting for ever."""
    start("works", GIB)
    start("a", 8 * GIB, phase="suspended")
    start("b", first_gib * GIB, phase="suspended")
    one = agent(state, [], pure.node(1))
    for name in ("b", "a"):
        report(state, name, GIB, 1)
        one.tick()
    assert [phase(state, name) for name in ("b", "a")] == phases


def test_agent_leaves_suspended_what_was_suspended_meanwhile(
    state: str, start: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent found it `suspending`; the command that did so ended before the agent came to it."""
    start("one", 4 * GIB, phase="suspended")
    find = leases.view

    def earlier(state: str) -> leases.View:
        monkeypatch.setattr(leases, "view", find)
        seen = find(state)
        shares = (seen.live[0].shares[0]._replace(phase=constants.SUSPENDING),)
        return seen._replace(live=(seen.live[0]._replace(shares=shares),))

    one = agent(state, [], pure.node(1, **IDLE))
    monkeypatch.setattr(leases, "view", earlier)
    one.tick()
    assert phase(state, "one") == "suspended"


def site(state: str, **policy: Any) -> suspension.Site:
    return suspension.Site(state, pure.node(1, **policy))


def test_container_that_does_what_cannot_be_moved_until_the_lock_is_refused(
    state: str, start: Callable[..., int], driver: Driver
) -> None:
    pid = start("one", 4 * GIB)
    driver.before["lock"] = lambda: does(state, "one", usage_reader.DOES_WAIT | usage_reader.DOES_MANAGE)
    driver.before["checkpoint"] = lambda: driver.lost.append(pid)
    with pytest.raises(GpushareError, match="has allocated managed memory"):
        site(state).suspend("one", 1)
    assert (driver.state[pid], phase(state, "one"), driver.lost) == (checkpoint.RUNNING, "", [])


@pytest.mark.parametrize("phase_before", ["suspended", ""])
def test_process_that_stops_while_it_is_moved_costs_little_of_the_agent_s_time(
    state: str, start: Callable[..., int], driver: Driver, monkeypatch: pytest.MonkeyPatch, phase_before: str
) -> None:
    """It sees the phase in its limits, stops itself, and goes on before the next try: each call lasts 10 s."""
    start("stops", 4 * GIB, phase=phase_before)
    report(state, "stops", GIB, 1)
    tries, now_s = [], [1000.0]

    def states(pids: Any) -> dict[int, int]:
        tries.append(now_s[0])
        now_s[0] += 10
        raise DeviceError("the driver does not answer which processes use CUDA")

    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(driver, "states", states)
    one = agent(state, [], pure.node(1, **IDLE))
    lease = leases.find(state, "stops")
    assert lease is not None
    for _ in range(11):
        if phase_before:
            one.tick()
        elif one._may_suspend(lease):
            one._suspend(lease, "another one needs its memory")
        now_s[0] += 10
    assert tries == [1000, 1110]
    assert phase(state, "stops") == phase_before


@pytest.mark.parametrize(("ends", "locks"), [("before", 1), ("after", 2)])
def test_process_that_gets_the_number_of_an_ended_one_is_not_moved(
    state: str, start: Callable[..., int], driver: Driver, monkeypatch: pytest.MonkeyPatch, ends: str, locks: int
) -> None:
    """One process of the container works, and the other one ends meanwhile. Its number is a neighbour's now."""
    first, other = start("one", 8 * GIB), start("neighbour", GIB)
    own, seen = [first, other], []
    monkeypatch.setattr(suspension, "_pids", lambda lease: list(own))

    def lock() -> None:
        seen.append(1)
        if len(seen) == locks:
            own.remove(other)

    driver.before["lock"] = lock
    driver.before["checkpoint"] = lambda: driver.lost.append(other)
    with pytest.raises(DeviceError, match=f'process {other} of container "one" has ended meanwhile; try again'):
        site(state).suspend("one", 1)
    assert [driver.state[pid] for pid in (first, other)] == [checkpoint.RUNNING] * 2
    assert (len(seen), driver.lost, phase(state, "one")) == (locks, [], "")


def test_first_process_that_has_ended_is_no_longer_the_container_s(state: str, start: Callable[..., int]) -> None:
    """In the pid namespace of the host or of a pod, other processes keep the share, and its number is used again."""
    pid = start("one", GIB)
    lease = leases.find(state, "one")
    assert lease is not None
    lease = lease._replace(cgroup_id=1, cgroup_dir="/")
    assert suspension._pids(lease) == [pid]
    assert suspension._pids(lease._replace(init_start=lease.init_start - 1)) == []


def test_memory_above_a_lowered_limit_is_taken_back_too(state: str, start: Callable[..., int]) -> None:
    """The limit is lowered while 10 GiB are on the host; they come back, whatever the limit is."""
    start("c1", 12 * GIB, 10 * GIB)
    site(state).suspend("c1", 1)
    assert limithost.change(state, limithost.limit_request.parse("2Gi")).after.shares[0].draining_bytes == 10 * GIB
    start("two", 8 * GIB)
    with pytest.raises(GpushareError, match="10 GiB requested, 8 GiB free of 16 GiB"):
        site(state).resume("c1", 0)
    assert phase(state, "c1") == "suspended"


def test_second_command_is_refused_while_the_first_works(state: str, start: Callable[..., int], driver: Driver) -> None:
    start("one", 12 * GIB)
    one, said = site(state), []

    def resume() -> None:
        with pytest.raises(suspension.Taken, match="is being suspended or resumed already"):
            site(state).resume("one", 0)
        said.append("refused")

    driver.before["checkpoint"] = resume
    assert one.suspend("one", 1).changed and said == ["refused"]


@pytest.mark.parametrize("at", ["suspending", "resuming"])
def test_change_that_was_killed_is_completed_only_if_the_driver_has_the_memory(
    state: str, start: Callable[..., int], driver: Driver, at: str
) -> None:
    """Other containers may borrow what a half-done change left free; a restore without room loses the process."""

    class Killed(BaseException):
        pass

    def kill() -> None:
        driver.taken_bytes = 14 * GIB
        raise Killed

    pid = start("one", 12 * GIB, 10 * GIB)
    one = site(state)
    one._undo = lambda *_: None  # type: ignore[method-assign]  # it was killed
    if at == "suspending":
        driver.after["checkpoint"] = kill
        with pytest.raises(Killed):
            one.suspend("one", 1)
    else:
        one.suspend("one", 1)
        driver.before["restore"] = kill
        with pytest.raises(Killed):
            one.resume("one", 0)
    driver.before.clear()
    driver.after.clear()
    assert phase(state, "one") == at
    with pytest.raises(CapacityError, match="8 GiB requested, 4 GiB free of 16 GiB"):
        limithost.reserve(state, 8 * GIB)
    with pytest.raises(GpushareError, match="has less than the 10 GiB free that it used"):
        one.resume("one", 0)
    assert phase(state, "one") == at and not driver.lost
    driver.taken_bytes = 0
    agent(state, [], pure.node(1, **IDLE)).tick()  # as the command does
    assert (driver.state[pid], phase(state, "one"), share_of(state, "one").suspended_bytes) == (0, "", 0)


def test_container_that_used_the_whole_device_gets_it_back(
    state: str, start: Callable[..., int], driver: Driver
) -> None:
    pid = start("one", None, SIZE - 4096)
    site(state).suspend("one", 1)
    site(state).resume("one", 0)
    assert driver.state[pid] == checkpoint.RUNNING and not driver.lost


def test_processes_of_a_container_share_the_room_of_its_cgroup(
    state: str, start: Callable[..., int], driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start("one", 12 * GIB, 3 * GIB)
    other = start("other", 4 * GIB, 3 * GIB)
    monkeypatch.setattr(suspension, "_pids", lambda lease: [first, other])
    monkeypatch.setattr(cgroup, "memory_room", lambda pid: 4 * GIB)
    with pytest.raises(GpushareError, match="needs 6 GiB of host memory, and the memory limit of its cgroup leaves 4"):
        site(state).suspend("one", 1)
    assert driver.state[first] == checkpoint.RUNNING and phase(state, "one") == ""


@pytest.mark.parametrize("answer", [None, {UUID: nvml_usage.Gpu(SIZE, 0, 0, 0, 0, (nvml_usage.Process(0, None),))}])
def test_container_is_refused_if_the_driver_does_not_tell_its_memory(
    state: str, start: Callable[..., int], driver: Driver, monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    """Nothing could be checked: neither the host's memory, nor the device's at a restore."""
    pid = start("one", 4 * GIB)
    if answer:
        answer = {UUID: answer[UUID]._replace(processes=(nvml_usage.Process(pid, None),))}
    monkeypatch.setattr(nvml_usage, "read", lambda *_: answer)
    with pytest.raises(GpushareError, match="the driver does not"):
        site(state).suspend("one", 1)
    assert driver.state[pid] == checkpoint.RUNNING and phase(state, "one") == ""


@pytest.mark.parametrize("at", ["", "suspended"])
def test_container_with_very_many_processes_is_refused(
    state: str, start: Callable[..., int], driver: Driver, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """To ask about each one would keep the agent from all other containers."""
    start("one", 4 * GIB, phase=at)
    monkeypatch.setattr(suspension, "_pids", lambda lease: list(range(1, 5001)))
    monkeypatch.setattr(driver, "states", lambda pids: 1 / 0)
    act = site(state).resume if at else site(state).suspend
    with pytest.raises(GpushareError, match="container .one. has 5000 processes, 4096 at most; end some of them"):
        act("one", 1)
    assert phase(state, "one") == at


def test_programs_of_one_user_in_one_cgroup_are_told_apart(
    state: str, start: Callable[..., int], driver: Driver
) -> None:
    """`gpushare run` without root gives its program no cgroup of its own."""
    mine, other = start("one", 4 * GIB), start("other", 4 * GIB)
    for name in ("one", "other"):
        lease = leases.find(state, name)
        assert lease is not None
        leases.rewrite(state, lease._replace(cgroup=procs.cgroup_of(mine)))
    site(state).suspend("one", 1)
    assert (driver.state[mine], driver.state[other]) == (checkpoint.CHECKPOINTED, checkpoint.RUNNING)


def test_process_that_is_not_found_is_not_left_on_the_device(
    state: str, start: Callable[..., int], driver: Driver
) -> None:
    pid = start("one", 4 * GIB)
    report(state, "one", GIB, slot=1)
    with Path(storage.container_dir(state, "one"), "rw", "usage").open("r+b") as file:
        file.seek(shm_abi.offset("gs_usage", "does"))
        file.write(bytes([usage_reader.DOES_WAIT] * 2))
    with pytest.raises(GpushareError, match="more processes that use CUDA than the 1 "):
        site(state).suspend("one", 1)
    assert driver.state[pid] == checkpoint.RUNNING


@pytest.mark.parametrize(("can", "held"), [(True, True), (False, True), (True, False)])
def test_container_starts_suspended_only_if_the_driver_can_suspend(
    state: str, start: Callable[..., int], monkeypatch: pytest.MonkeyPatch, can: bool, held: bool
) -> None:
    """And if an agent runs. That of a node whose driver cannot runs for lending alone, and would never resume it."""

    def refuse(*_: object) -> None:
        raise DeviceError("driver 535 cannot suspend a process", "")

    start("one", 12 * GIB)
    monkeypatch.setattr(agentlock, "is_held", lambda state: held)
    monkeypatch.setattr(limithost, "HOST", pure.node(1, **IDLE))
    if can and held:
        assert limithost.reserve(state, 12 * GIB).shares[0].phase == "suspended"
        return
    if not can:
        monkeypatch.setattr(checkpoint, "Driver", refuse)
    with pytest.raises(CapacityError, match="12 GiB requested, 4 GiB free of 16 GiB"):
        limithost.reserve(state, 12 * GIB)


@pytest.mark.parametrize("policy", [IDLE, {}])
def test_agent_finds_a_driver_that_was_loaded_after_it_began(
    state: str, start: Callable[..., int], monkeypatch: pytest.MonkeyPatch, policy: dict[str, int]
) -> None:
    """At boot the module may be late; until then containers would start suspended, and stay so. Also without a policy:
    it may have been taken back since a container was suspended, which would wait for ever."""
    start("one", 4 * GIB, phase="suspended")
    reader, writer = os.pipe()

    class Suspender:
        def tick(self, seen: leases.View) -> None:
            os.write(writer, b"end")

    found = iter([(None, "no driver"), (Suspender(), "")])
    config = pure.node(1, **policy).config._replace(state_dir=state)
    monkeypatch.setattr(agent_command.node, "load_config_only", lambda *_: config)
    monkeypatch.setattr(agent_command, "_suspender", lambda *_: next(found))
    monkeypatch.setattr(agent_command, "_AGAIN_S", 0.0)
    monkeypatch.setattr(agent_command.sigterm, "readable", lambda: contextlib.nullcontext(reader))
    context = click.Context(agent_command.agent, obj=Paths("", state))
    with context:
        assert agent_command.agent.callback(0.001) == 0  # type: ignore[misc]


def test_agent_takes_notice_of_a_changed_host(state: str, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver can be upgraded, and a GPU added. The agent keeps the order of the waiting containers."""
    hosts = [pure.node(1, **IDLE), pure.node(1, **IDLE), pure.node(2, **IDLE)]
    monkeypatch.setattr(agent_command.node, "load_node", lambda *_: hosts.pop(0))
    made: list[Any] = []
    monkeypatch.setattr(checkpoint, "Driver", lambda *words: made.append(words) or driver)
    one, meanwhile = None, lambda: None
    for devices, drivers in ((1, 1), (1, 1), (2, 2)):
        before = one
        one, why = agent_command._suspender(Paths("", state), pure.node(1).config, before, meanwhile, "")
        assert one is not None and one is (before or one) and why == ""
        assert (len(one.node.inventory.devices), len(made)) == (devices, drivers)
    assert made[0][2] is meanwhile  # memory that was borrowed is taken back also while a copy lasts


def test_work_goes_on_while_the_driver_copies(tmp_path: Path) -> None:
    done = tmp_path / "done"

    def copy() -> bool:
        while not done.exists():
            time.sleep(0.01)
        return True

    assert nvml.in_child(copy, 60, done.touch)


def test_agent_takes_back_once_while_it_suspends_a_borrower(state: str, start: Callable[..., int]) -> None:
    """It searches for waiting containers during the copy, too, but for this one memory is on its way."""
    start("waiting", 8 * GIB, 7 * GIB)
    for name in ("first", "second"):
        start(name, 2 * GIB, 12 * GIB, lends=14 * GIB)
    report(state, "waiting", 7 * GIB, GIB)
    taken: list[str] = []

    def suspend(lease: Any) -> bool:
        taken.append(lease.id)
        taking.tick()
        return True

    taking = eviction.Agent(state, "none", suspend=suspend)
    taking.tick()
    assert len(taken) == 1


@pytest.mark.parametrize("limit", ["oversubscription.host_memory", "this host has"])
def test_two_suspends_at_once_share_the_host_memory(
    state: str, start: Callable[..., int], driver: Driver, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    for name in ("one", "other"):
        start(name, 4 * GIB, 3 * GIB)
    host = pure.node(1)
    if limit == "this host has":
        monkeypatch.setattr(procs, "host_memory", lambda: (5 * GIB, 5 * GIB))  # the first copy has only begun
    else:
        host = host._replace(config=host.config._replace(host_memory="5Gi"))
    second = suspension.Site(state, host)

    def other() -> None:
        driver.before.clear()
        with pytest.raises(CapacityError, match=limit):
            second.suspend("other", 1)

    driver.before["lock"] = other
    suspension.Site(state, host).suspend("one", 1)
    assert [phase(state, name) for name in ("one", "other")] == ["suspended", ""]


def test_borrower_gives_memory_back_to_a_suspended_container(state: str, start: Callable[..., int]) -> None:
    start("one", 8 * GIB, 7 * GIB, phase="suspended")
    start("borrower", 2 * GIB, 12 * GIB, lends=14 * GIB)
    taken: list[str] = []
    taking = eviction.Agent(state, "none", suspend=lambda lease: not taken.append(lease.id))
    taking.tick()
    assert taken == []
    report(state, "one", 7 * GIB, 1)
    taking.tick()
    assert taken == ["borrower"]


def test_suspended_container_takes_nothing_that_another_one_was_granted(state: str, start: Callable[..., int]) -> None:
    start("one", 8 * GIB, 7 * GIB, phase="suspended")
    start("borrower", 2 * GIB, 12 * GIB, lends=14 * GIB)
    start("other", 8 * GIB)
    report(state, "one", 7 * GIB, 1)
    taken: list[str] = []
    eviction.Agent(state, "none", suspend=lambda lease: not taken.append(lease.id)).tick()
    assert taken == []


def test_nothing_is_lent_while_a_process_is_restored(state: str, start: Callable[..., int], driver: Driver) -> None:
    """A container that borrows just then would take the memory, and the driver would lose the process."""
    start("one", 8 * GIB, 7 * GIB)
    start("borrower", 2 * GIB, lends=14 * GIB)
    taking, lent = eviction.Agent(state, "none"), []

    def look() -> None:
        (limit,) = limithost.limits(state, "borrower").devices
        lent.append(bool(limit.flags & shm_abi.DEVICE_LENDING))

    def tick() -> None:
        taking.tick()
        look()

    tick()
    site(state).suspend("one", 1)
    tick()
    driver.before["restore"], driver.after["restore"] = look, tick
    site(state).resume("one", 0)
    tick()
    assert lent == [True, True, False, False, True]


def test_memory_that_a_suspended_container_had_borrowed_keeps_no_other_one_waiting(
    state: str, start: Callable[..., int], driver: Driver
) -> None:
    """It comes back when all of its memory is free, which may be never; the next one has its request."""
    start("borrower", 2 * GIB, 13 * GIB, phase="suspended", lends=14 * GIB)
    start("works", 8 * GIB, 7 * GIB)
    start("next", 4 * GIB, 3 * GIB, phase="suspended")
    for name in ("borrower", "next"):
        report(state, name, GIB, 1)
    one = agent(state, [], pure.node(1, **IDLE))
    one._asked_s = {"borrower": 0.0}
    one.tick()
    assert [phase(state, name) for name in ("borrower", "works", "next")] == ["suspended", "", ""]
    asked = driver.reads
    for _ in range(5):
        one.tick()
    assert driver.reads == asked  # not in each round
