"""Limit changes that are killed, lack space, or race with a start."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from gpushare.allocation import limit_request, limit_update, placement
from gpushare.core.errors import CapacityError, KernelError
from gpushare.core.model import Lease
from gpushare.state import leaseend, leases, storage

from tests.unit import limithost
from tests.unit.limithost import GIB, HOST, UUID, change, limits, reserve, share, use
from tests.unit.together import at_once

state, init, held = limithost.state, limithost.init, limithost.held


WATCHED = tuple(f"gpushare/{name}.py" for name in ("allocation/limit_update", "state/leases", "state/storage"))


# Killed


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Run `work` in a process that is killed before the `number`th line of gpushare; return False if it ended first."""
    pid = os.fork()
    if pid == 0:
        left = number

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal left
            if not frame.f_code.co_filename.endswith(WATCHED):
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        try:
            sys.settrace(trace)
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def ended(state: str) -> None:
    leaseend.sweep(state)
    with leases.locked(state):
        limit_update.finish(state)


NEXT: dict[str, Callable[[str], object]] = {
    "start": lambda state: reserve(state, GIB),
    "prune": ended,
    "change": lambda state: change(state, limit_request.LimitRequest(priority=1)),
}
CHANGES = {
    "more": (share(4 * GIB, 30), limit_request.parse("6Gi", "60"), (6 * GIB, 60)),
    "less": (share(8 * GIB, 60), limit_request.parse("6Gi", "30"), (6 * GIB, 30)),
    "less than it uses": (share(8 * GIB, 60), limit_request.parse("2Gi", "100", "soft"), (2 * GIB, None)),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("then", NEXT)
def test_killed_change_is_whole_or_undone(held: Callable[..., Lease], state: str, what: str, then: str) -> None:
    """Killed before each line of gpushare. The lease never has less memory than the container may use or uses, and the
    next command makes both agree."""
    before, request, (memory_bytes, percent) = CHANGES[what]
    used = 5 * GIB if "uses" in what else GIB
    first, number, seen = held(before), 0, set()
    use(state, used)
    path = Path(storage.container_dir(state, "c1"), "share", "limits")
    whole = path.read_bytes()
    while True:
        number += 3 if then != "start" else 1
        if not killed_at(number, lambda: change(state, request)):
            break
        lease = leases.find(state, "c1")
        assert lease is not None
        (limit,) = limits(state).devices
        had = limit.memory_limit_bytes, limit.compute_percent
        assert had in ((before.memory_limit_bytes, before.compute_percent), (memory_bytes, percent)), number
        counted = placement.ledger_of([lease], HOST.config.policy).used[UUID]
        assert counted >= max(had[0] or 0, used), number
        NEXT[then](state)
        lease = leases.find(state, "c1")
        assert lease is not None and limit_update.unfinished(state) is None, number
        (limit,) = limits(state).devices
        mine = lease.shares[0]
        assert (limit.memory_limit_bytes, limit.compute_percent or 100) == (
            mine.memory_limit_bytes,
            mine.compute_percent or 100,
        ), number
        seen.add(mine.memory_limit_bytes)
        if then == "start":
            assert leaseend.release(state, "c2") != ""  # it lives: this process
            leases.undo(state, "c2")
        leases.rewrite(state, first)
        path.write_bytes(whole)
    assert number > 100 and seen == {before.memory_limit_bytes, memory_bytes}


def test_unfinished_change_does_not_block_starts(held: Callable[..., Lease], state: str) -> None:
    lease = held(share(4 * GIB))
    Path(state, storage.CHANGING).write_text("c1")
    leases.rewrite(state, lease._replace(shares=(share(2 * GIB, draining_bytes=4 * GIB),)))
    limits_file = Path(storage.container_dir(state, "c1"), "share", "limits")
    data = limits_file.read_bytes()
    limits_file.write_bytes(b"damaged")
    with pytest.raises(CapacityError, match="12 GiB free"):  # memory that the container may use counts
        reserve(state, 13 * GIB)
    reserve(state, 12 * GIB)
    assert limit_update.unfinished(state) == "c1"
    limits_file.write_bytes(data)
    ended(state)
    assert limits(state).devices[0].memory_limit_bytes == 2 * GIB


def test_full_state_directory_changes_no_limit(
    held: Callable[..., Lease], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = held(share(4 * GIB))

    def full(*_: object) -> None:
        raise KernelError("no space")

    monkeypatch.setattr(storage, "write_lease", full)
    with pytest.raises(KernelError):
        change(state, limit_request.LimitRequest("6Gi"))
    assert leases.find(state, "c1") == before and limits(state).devices[0].memory_limit_bytes == 4 * GIB


# Concurrent starts


def test_start_and_change_never_get_same_memory(held: Callable[..., Lease], state: str) -> None:
    """Repeatedly, a start and a change request the same last memory at the same moment."""
    first = held(share(4 * GIB))
    outcomes: set[tuple[int, ...]] = set()

    def each_was_first() -> bool:
        return (75, 0) in outcomes and bool(outcomes & {(0, 75), (0, 0)})

    for turn in range(1000):
        if turn >= 60 and each_was_first():
            break
        codes = at_once(lambda: reserve(state, 8 * GIB), lambda: change(state, limit_request.LimitRequest("10Gi")))
        counted = placement.ledger_of(leases.view(state).live, HOST.config.policy).used.get(UUID, 0)
        assert counted <= 16 * GIB
        outcomes.add(tuple(codes))
        assert codes in ([0, 75], [75, 0], [0, 0]), codes  # both: the start's process exited before the change
        leaseend.sweep(state)
        leases.rewrite(state, first)
    assert each_was_first(), outcomes
