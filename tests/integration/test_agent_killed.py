"""The program `gpushare agent`, killed while it takes memory back from a real container: nothing is lost, and the next
agent completes it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from gpushare.state import leases, shm_abi, storage
from gpushare.system import procs

from simulator.ledger import Ledger
from tests.support.host import Node
from tests.support.judge import taken
from tests.support.kills import Kills
from tests.support.lending import Strace, killed, start_agent
from tests.support.tenant import Tenant

ASK = Path(__file__).parent / "programs" / "ask.py"
GIB = 1 << 30
REQUEST, LIMIT = 4 * GIB, 12 * GIB
DEVICE_BYTES = LIMIT + (GIB >> 1)
ASKED_BYTES = 3 * GIB
POINTS = 24
IN_MAKE_TEST = 12  # every 12th of them
ENDS_S = 60.0  # more than an agent needs on a busy machine


@pytest.fixture
def node(make_node: Callable[..., Node], make_host: Callable[..., Path]) -> Node:
    return make_node(make_host(memory_bytes=DEVICE_BYTES), policy={"lending": "evict"})


@pytest.fixture
def waiting(node: Node, tmp_path: Path) -> Iterator[Tenant]:
    """A container of 4 GiB that asks for memory after each go()."""
    env = {"GPUSHARE_MEMORY": "4Gi", "ASK": str(ASKED_BYTES)}
    one = Tenant(tmp_path / "tenants", "waiting", env, node, program=ASK)
    one.container.start()
    one.expect("seen")
    yield one
    one.close()


@contextmanager
def borrower(node: Node, directory: Path) -> Iterator[Tenant]:
    """A container that has borrowed all of the device, from an agent that was killed then."""
    with ExitStack() as stack:
        agent = stack.enter_context(killed(start_agent(node)))
        one = Tenant(directory, "borrower", {"GPUSHARE_MEMORY": "4Gi..12Gi"}, node)
        stack.callback(one.close)
        one.container.start()
        one.expect("seen")
        until(lambda: lends(node, one), "the agent does not lend")
        one.go()
        assert one.expect("full")["got_bytes"] > LIMIT - GIB
        agent.kill()
        agent.wait()
        yield one


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + ENDS_S
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def wants(node: Node, one: Tenant) -> int:
    return storage.read_usage(str(node.state), one.container.id, 1).wanted_bytes(0)


def lends(node: Node, one: Tenant) -> bool:
    path = Path(storage.container_dir(str(node.state), one.container.id), "share", "limits")
    return bool(storage.read_limits(str(path)).devices[0].flags & shm_abi.DEVICE_LENDING)


def check_ledger(node: Node, requests: dict[str, int]) -> None:
    """Leases and limits files have the requests, whatever was borrowed; no lease is damaged or missing."""
    seen = leases.view(str(node.state))
    assert not seen.damaged
    assert {lease.id: lease.shares[0].memory_limit_bytes for lease in seen.live} == requests
    for container_id in requests:
        path = Path(storage.container_dir(str(node.state), container_id), "share", "limits")
        (limit,) = storage.read_limits(str(path)).devices
        assert limit.memory_limit_bytes == REQUEST
        assert not limit.flags & shm_abi.DEVICE_LENDING or limit.virtual_bytes == LIMIT


def used_bytes(node: Node) -> int:
    with Ledger(str(node.driver_root / "dev" / "nvidia0")) as ledger:
        return ledger.used_bytes


def completed(node: Node, waiting: Tenant, borrowing: Tenant) -> None:
    """The waiting container has its memory, the borrower has ended with a reason, and nothing else is on the device."""
    waiting.expect("full", ENDS_S)
    assert borrowing.container.wait() == 128 + signal.SIGKILL
    check_ledger(node, {waiting.container.id: REQUEST})
    own = taken(node.driver_root, waiting.pid_namespace()).current_bytes
    assert ASKED_BYTES < own <= REQUEST
    until(lambda: used_bytes(node) == own, "the driver has memory of a container that has ended")
    said = {
        line["needed_by"]
        for line in node.decisions()
        if line.get("id") == borrowing.container.id == line["id"] and line["decision"] == "evicted"
    }
    assert said == {waiting.container.id}
    waiting.go()
    waiting.expect("freed")
    until(lambda: wants(node, waiting) == 0, "it states a need that is served")


def test_agent_killed_while_it_takes_memory_back_is_continued_by_the_next(
    node: Node, waiting: Tenant, tmp_path: Path, kills: Kills
) -> None:
    """kill -9 at points from the first search of an agent to the end of the borrower. tests/unit/test_eviction.py has
    more points, without a runtime."""
    strace = Strace(node.config, node.state, tmp_path / "calls")
    with borrower(node, tmp_path / "recorded") as one:
        waiting.go()
        until(lambda: wants(node, waiting) > 0, "no need was stated")
        strace.record(lambda: completed(node, waiting, one))
    for part in kills.some(0, POINTS, IN_MAKE_TEST):
        with borrower(node, tmp_path / str(part)) as one:
            waiting.go()
            until(lambda: wants(node, waiting) > 0, "no need was stated")
            with killed(strace.start_to_be_killed(part, POINTS)) as agent:
                assert agent.wait(ENDS_S) == -signal.SIGKILL, f"point {part}"
            alive = procs.find(one.container.pid) is not None
            kills.left += alive
            if alive:
                check_ledger(node, {waiting.container.id: REQUEST, one.container.id: REQUEST})
            with killed(start_agent(node)):
                completed(node, waiting, one)
        assert node.leases() == [waiting.container.id], f"point {part}"
    kills.some_left_something()
