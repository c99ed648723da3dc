"""The simulator is realistic enough that the common rate limiter of other projects misses its shares on it."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from simulator.ledger import Ledger
from tests.support.busy import Busy

MS = 1_000_000
OWN_PIDNS = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
SETTLED_MS = 1500  # ten ticks of the limiter


def shares(simhost: Path, ledger: Ledger, limits: tuple[int, int], window_ms: int, **options: Any) -> list[list[float]]:
    """Return the share of two containers under the classic limiter in each window, once it has settled.

    One container is in the pid namespace of the test, so NVML reports each container's processes only once.
    """
    first = Busy(simhost, seconds=4, classic=limits[0], **options)
    second = Busy(simhost, OWN_PIDNS, seconds=4, classic=limits[1], **options)
    with first, second:
        for busy in (first, second):
            busy.go()
        said = [first.result(), second.result()]
        start_ns, end_ns = max(s["started_ns"] for s in said), min(s["ended_ns"] for s in said)
        assert all(s["failed"] == "" for s in said)
        histories = [ledger.history(s["pidns"]) for s in said]
    return [h.shares(start_ns + SETTLED_MS * MS, end_ns - 20 * MS, window_ms * MS) for h in histories]


def worst(windows: list[float], limit: float) -> float:
    return max(abs(share - limit) for share in windows)


@pytest.mark.parametrize("kernel", [1000, "bimodal"])
def test_classic_limiter_is_far_off_in_short_windows(kernel: object, simhost: Path, ledger: Ledger) -> None:
    """Right on average if limits add up to 100 % and kernels are short; far off in windows of 100 ms."""
    small, large = shares(simhost, ledger, (30, 70), 100, kernel=kernel)
    assert mean(small) == pytest.approx(0.3, abs=0.04) and mean(large) == pytest.approx(0.7, abs=0.06)
    assert worst(small, 0.3) > 0.05 and worst(large, 0.7) > 0.05


@pytest.mark.parametrize("options", [{"kernel": 20000}, {"processes": 2}], ids=str)
def test_classic_limiter_exceeds_the_smaller_limit(options: dict[str, Any], simhost: Path, ledger: Ledger) -> None:
    """Long kernels are admitted one by one, however long they are, and each process has a bucket of its own."""
    small, large = shares(simhost, ledger, (30, 70), 1000, **options)
    assert mean(small) > 0.4 and mean(large) < 0.6
