"""A borrower ends by itself while `gpushare agent` takes memory back: no other borrower is killed for memory that is
free, and the log does not contain an eviction that did not happen."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from gpushare.state import log
from gpushare.system import procs

from tests.support.host import Node
from tests.support.kills import Kills
from tests.support.lending import Strace, children, killed, start_agent
from tests.support.tenant import Tenant

from .test_agent_killed import ASK, DEVICE_BYTES, GIB, REQUEST, check_ledger, lends, until, wants

BORROW = ASK.with_name("borrow.py")
ASKED_BYTES = 2 * GIB
BESIDE_BYTES = REQUEST + (GIB >> 1)  # of the other borrower
RECLAIM_S = 10  # docs/lending.md
POINTS = 24
IN_MAKE_TEST = 8  # every 8th of them
Make = Callable[..., Tenant]


@pytest.fixture
def node(make_node: Callable[..., Node], make_host: Callable[..., Path]) -> Node:
    return make_node(make_host(memory_bytes=DEVICE_BYTES), policy={"lending": "evict"})


@contextmanager
def stage(node: Node, directory: Path) -> Iterator[tuple[Tenant, Tenant, Make]]:
    """(waiting, beside, borrower): one container that asks for its request, one that has borrowed a little, and a
    function that starts one which borrows all that is left. The agent that let them borrow is killed then."""
    with ExitStack() as stack:

        def make(name: str, memory: str, program: Path, ask_bytes: int = 0) -> Tenant:
            env = {"GPUSHARE_MEMORY": memory, "ASK": str(ask_bytes)}
            one = Tenant(directory, name, env, node, program=program)
            stack.callback(one.close)
            one.container.start()
            one.expect("seen")
            return one

        def borrow(name: str, memory: str, program: Path, ask_bytes: int = 0) -> Tenant:
            with killed(start_agent(node)):
                one = make(name, memory, program, ask_bytes)
                until(lambda: lends(node, one), "the agent does not lend")
                one.go()
                one.expect("full")
            return one

        waiting = make("waiting", "4Gi", ASK, ASKED_BYTES)
        beside = borrow("beside", "4Gi..5Gi", ASK, BESIDE_BYTES)
        yield waiting, beside, lambda name: borrow(name, "4Gi..12Gi", BORROW)


def told(node: Node, container_id: str) -> list[str]:
    lines = [line for line in node.decisions() if line.get("id") == container_id]
    return [line["decision"] for line in lines if line["decision"] in ("evicted", "ended")]


def has_ended(agent: subprocess.Popen[bytes], pid: int) -> bool:
    """It may be stopped only now, if it ended the borrower before that point."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    return agent.poll() is not None


@pytest.mark.parametrize("how", ["exits", "killed"])
def test_borrower_that_ends_by_itself_was_not_evicted(node: Node, tmp_path: Path, kills: Kills, how: str) -> None:
    """The agent is stopped at points from its first search to the end of the borrower, and goes on when the borrower
    has ended by itself."""
    strace = Strace(node.config, node.state, tmp_path / "calls")
    with stage(node, tmp_path / "tenants") as (waiting, beside, borrower):

        def ask() -> None:
            waiting.go()
            until(lambda: wants(node, waiting) > 0, "no need was stated")

        def served() -> None:
            began = time.monotonic()
            waiting.expect("full")
            assert time.monotonic() - began < RECLAIM_S
            waiting.go()
            waiting.expect("freed")

        one = borrower("recorded")
        ask()
        strace.record(served)
        assert one.container.wait() == 128 + signal.SIGKILL and told(node, one.container.id) == ["evicted"]
        one.container.delete()
        early: list[bool] = []  # whether the agent had not killed the borrower yet
        for part in kills.some(0, POINTS, IN_MAKE_TEST, kind=how):
            one = borrower(f"point{part}")
            ask()
            with killed(strace.start_to_be_stopped(part, POINTS)) as agent:
                until(lambda one=one: strace.is_stopped() or procs.find(one.container.pid) is None, "it is not stopped")
                by_agent = strace.has_killed()  # other load moves the point
                early.append(not by_agent)
                if how == "exits":
                    one.go()
                elif not by_agent:
                    os.kill(one.container.pid, signal.SIGKILL)
                code = one.container.wait()
                (pid,) = children(agent.pid)
                os.kill(pid, signal.SIGCONT)
                served()
                os.kill(pid, signal.SIGTERM)
                until(lambda agent=agent, pid=pid: has_ended(agent, pid), "the agent does not end")
                assert agent.wait() == 0
            assert code == (0 if how == "exits" and not by_agent else 128 + signal.SIGKILL), f"point {part}"
            claims = told(node, one.container.id)
            kills.left += bool(claims)
            assert claims == ["evicted"] if by_agent else claims in ([], ["evicted", "ended"]), f"point {part}"
            assert bool(log.read(str(node.state), one.container.id)) is by_agent
            assert told(node, beside.container.id) == [], f"point {part}"
            one.container.delete()
            check_ledger(node, {waiting.container.id: REQUEST, beside.container.id: REQUEST})
            assert node.leases() == sorted([waiting.container.id, beside.container.id])
    assert any(early) or not early  # a run that is resumed may have no points left
    kills.some_left_something()
