"""A request to change limits, and the limits that result."""

from __future__ import annotations

from typing import Any

import pytest
from gpushare.allocation import limit_request
from gpushare.core.errors import CapacityError, PolicyError, RequestError
from gpushare.core.model import Lease, Share

from tests.unit import pure

GIB = 1 << 30


def share(memory_bytes: Any, percent: Any = None, **more: Any) -> Share:
    return pure.share(0, 0, memory_bytes)._replace(compute_percent=percent, **more)


def regrant(before: Share, request: limit_request.LimitRequest, *others: Lease, **policy: Any) -> Share:
    lease = pure.lease(before, container_id="mine")
    (after,) = limit_request.shares(lease, request, pure.node(1, **policy), (lease, *others))
    return after


OTHER = pure.lease(share(10 * GIB, 50), container_id="other")


def test_increase_is_checked_against_other_leases() -> None:
    assert regrant(share(4 * GIB, 30), limit_request.parse("6Gi", "50"), OTHER)[2:4] == (6 * GIB, 50)
    with pytest.raises(CapacityError, match=r"7 GiB requested, 6 GiB free of 16 GiB \(its own 4 GiB included\), held"):
        regrant(share(4 * GIB, 30), limit_request.parse("7Gi"), OTHER)
    with pytest.raises(CapacityError, match=r"11 GiB requested, 6 GiB free of 16 GiB \(its own 6 GiB included\), held"):
        regrant(share(10 * GIB), limit_request.parse("11Gi"), OTHER)  # the device has shrunk since
    with pytest.raises(CapacityError, match="51% of compute requested, 50% free"):
        regrant(share(4 * GIB, 30), limit_request.parse(compute="51"), OTHER)
    assert regrant(share(4 * GIB, 30), limit_request.parse(compute="90", mode="soft"), OTHER).soft
    with pytest.raises(CapacityError, match="60% of compute requested, 50% free"):  # soft ones were not counted
        regrant(share(4 * GIB, 60, soft=True), limit_request.parse(mode="hard"), OTHER)


def test_decrease_is_always_granted() -> None:
    full = pure.lease(share(16 * GIB, 100), container_id="other")
    limits_now = {"max_memory": "1Gi", "max_compute_percent": 5, "require_limits": True}
    assert regrant(share(8 * GIB, 60), limit_request.parse("6Gi", "50"), full, **limits_now)[2:4] == (6 * GIB, 50)
    assert regrant(share(None), limit_request.parse("12Gi"), full).memory_limit_bytes == 12 * GIB


@pytest.mark.parametrize("over_maximum", ["refuse", "clamp"])
def test_increase_above_maximum_is_refused(over_maximum: str) -> None:
    with pytest.raises(PolicyError, match="more than policy.max_memory"):
        regrant(share(2 * GIB), limit_request.parse("5Gi"), max_memory="4Gi", over_maximum=over_maximum)
    with pytest.raises(PolicyError, match="more than policy.max_compute"):
        regrant(
            share(2 * GIB, 30), limit_request.parse(compute="60"), max_compute_percent=50, over_maximum=over_maximum
        )
    with pytest.raises(PolicyError, match="requires one"):
        regrant(share(2 * GIB), limit_request.parse("unlimited"), unlimited="deny")


def test_absolute_relative_and_percent_amounts_are_applied() -> None:
    assert regrant(share(4 * GIB), limit_request.parse("+1Gi")).memory_limit_bytes == 5 * GIB
    assert regrant(share(4 * GIB), limit_request.parse("-512Mi")).memory_limit_bytes == 4 * GIB - (512 << 20)
    assert regrant(share(4 * GIB), limit_request.parse("25%")).memory_limit_bytes == 4 * GIB
    assert regrant(share(4 * GIB), limit_request.parse("unlimited")).memory_limit_bytes is None
    assert regrant(share(None), limit_request.parse(compute="30"))[2:4] == (None, 30)
    assert regrant(share(4 * GIB, 30), limit_request.parse(compute="100%")).compute_percent == 100
    assert regrant(share(4 * GIB), limit_request.parse(compute="100")).compute_percent is None
    for memory in ("+1Gi", "-1Gi"):
        with pytest.raises(RequestError, match="no memory limit"):
            regrant(share(None), limit_request.parse(memory))
    with pytest.raises(RequestError, match="slot 0 has only 4 GiB"):
        regrant(share(4 * GIB), limit_request.parse("-4Gi"))
    for words in (("+25%",), ("0",), ("4Gj",), ("+",), ("", "0"), ("", "101"), ("", "x")):
        with pytest.raises(RequestError, match="--memory|--compute"):
            limit_request.parse(*words)
    with pytest.raises(CapacityError, match="all of device 0"):
        regrant(share(4 * GIB), limit_request.parse("unlimited"), OTHER)


def test_clamp_note_is_dropped_with_its_limit() -> None:
    clamped = share(4 * GIB, 30, clamped="8Gi of memory")
    assert regrant(clamped, limit_request.parse(priority="high")).clamped == "8Gi of memory"
    assert regrant(clamped, limit_request.parse("2Gi")).clamped == ""


def test_change_applies_to_named_device() -> None:
    lease = pure.lease(pure.share(0, 0, GIB), pure.share(1, 1, GIB))
    host = pure.node(2)
    for name, sizes in (
        ("1", (GIB, 2 * GIB)),
        (pure.UUIDS[0].upper(), (2 * GIB, GIB)),
        ("", (2 * GIB, 2 * GIB)),
    ):
        found = limit_request.shares(lease, limit_request.parse("2Gi", device=name), host, (lease,))
        assert tuple(one.memory_limit_bytes for one in found) == sizes
    with pytest.raises(RequestError, match='--device="2": this container has 0 \\(device 0, GPU-'):
        limit_request.shares(lease, limit_request.parse("2Gi", device="2"), host, (lease,))
