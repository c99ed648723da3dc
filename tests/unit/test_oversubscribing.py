"""Allocations that extend into host memory: the promised amount of each, within the budget."""

from __future__ import annotations

from typing import Any, Optional

import pytest
from gpushare.allocation import admission, oversubscribing, placement
from gpushare.core.errors import CapacityError, GpushareError, PolicyError, RequestError
from gpushare.core.model import Amount, Lease, Node, Share, SharingRule
from gpushare.gpu import inventory
from gpushare.request import request
from gpushare.state import leasefile
from gpushare.state.ledger import Ledger, capacity_bytes
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.pure import bundle, lease, ledger, node, share

GI = 1 << 30
ON = "GPUSHARE_OVERSUBSCRIBE=1"


def host_of(budget: str = "32Gi", scaling: float = 2.0, memory: int = 64 * GI, **more: Any) -> Node:
    host: Node = node(**more)
    config = host.config._replace(host_memory=budget, oversubscribe_scaling=scaling)
    return host._replace(config=config, inventory=host.inventory._replace(host_memory_bytes=memory))


def grant(host: Node, *env: str, held: Optional[Ledger] = None) -> tuple[Share, ...]:
    asked = request.resolve(bundle(*env), host)
    assert asked is not None
    return placement.grant(asked, host, held or Ledger({}))


@pytest.mark.parametrize(
    ("memory", "scaling", "whole"),
    [("4Gi", 2.0, 8 * GI), ("4Gi", 1.5, 6 * GI), ("4Gi", 1.0, 0), ("4Gi", 0.5, 0), ("5Mi", 1.7, 8 << 20)],
)
def test_virtual_size_is_scaled_limit_in_whole_blocks(memory: str, scaling: float, whole: int) -> None:
    (one,) = grant(host_of(scaling=scaling), f"GPUSHARE_MEMORY={memory}", ON)
    assert (one.virtual_bytes, one.oversubscribe) == (whole, whole > 0)
    (without,) = grant(host_of(scaling=scaling), f"GPUSHARE_MEMORY={memory}")
    assert without == one._replace(virtual_bytes=0, oversubscribe=False)


@pytest.mark.parametrize(
    ("host", "env", "error", "message"),
    [
        (host_of(budget=""), ["GPUSHARE_MEMORY=4Gi"], PolicyError, "8 GiB on device and host .*host_memory gives none"),
        (host_of("50%", memory=0), ["GPUSHARE_MEMORY=4Gi"], PolicyError, "gives none"),
        (host_of("50%", memory=8 * GI), ["GPUSHARE_MEMORY=4Gi"], CapacityError, "8 GiB requested, 4 GiB free of 4 GiB"),
        (host_of("15Gi"), ["GPUSHARE_DEVICES=all", "GPUSHARE_MEMORY=4Gi"], CapacityError, "16 GiB requested"),
        (
            host_of(),
            ["GPUSHARE_DEVICES=any"],
            RequestError,
            "no memory limit .* no limit to exceed; set GPUSHARE_MEM",
        ),
    ],
)
def test_refusal_names_missing_condition(host: Node, env: list[str], error: type[GpushareError], message: str) -> None:
    with pytest.raises(error, match=message):
        grant(host, *env, ON)


def test_damaged_lease_blocks_host_memory() -> None:
    """It blocks only its own device, but host memory is shared by all devices."""
    held = ledger(blocked=("GPU-of-a-damaged-lease",))
    with pytest.raises(CapacityError, match="host memory .* does not know; stop them and run `gpushare prune"):
        grant(host_of(), "GPUSHARE_DEVICES=0", "GPUSHARE_MEMORY=1Gi", ON, held=held)
    assert grant(host_of(), "GPUSHARE_DEVICES=0", "GPUSHARE_MEMORY=1Gi", held=held)[0].virtual_bytes == 0


def test_too_many_devices_are_refused() -> None:
    many = tuple(share(slot, 0, GI)._replace(virtual_bytes=2 * GI) for slot in range(9))
    with pytest.raises(RequestError, match="9 devices .* at most 8"):
        oversubscribing.require_budget(many, host_of(), Ledger({}))
    oversubscribing.require_budget(many[:8], host_of(), Ledger({}))


def test_equal_share_may_exceed_device() -> None:
    host = host_of()
    host = host._replace(config=host.config._replace(sharing=(SharingRule(4, 1.5),)))
    (one,) = grant(host, "GPUSHARE_DEVICES=0")
    assert (one.memory_limit_bytes, one.virtual_bytes) == (4 * GI, 6 * GI)
    (more,) = grant(host, "GPUSHARE_DEVICES=0", ON)  # the larger of the two amounts
    assert (more.memory_limit_bytes, more.virtual_bytes) == (4 * GI, 8 * GI)


@pytest.mark.parametrize("scaling", [1.5, 2.0, 3.3])
def test_scaled_limits_fill_device_exactly(scaling: float) -> None:
    """As HAMi hands them out: limits that add up to the scaled device all fit despite rounding; each is the whole
    request, and one more does not fit."""
    host, leases = host_of("64Gi", scaling), list[Lease]()
    total = int(16 * 1024 * scaling)
    for number, size in enumerate((total // 3, total // 5, total // 7, total - total // 3 - total // 5 - total // 7)):
        env = ["NVIDIA_VISIBLE_DEVICES=0", f"CUDA_DEVICE_MEMORY_LIMIT_0={size}m", "CUDA_OVERSUBSCRIBE=true"]
        (one,) = grant(host, *env, held=ledger(*leases))
        assert one.virtual_bytes == size // 2 * 2 << 20
        assert 0 <= one.virtual_bytes / scaling - (one.memory_limit_bytes or 0) < 2 << 20
        leases.append(lease(one, container_id=f"c{number}"))
    with pytest.raises(CapacityError, match=r"2000 MiB \(.* of it on the device\) requested, .* free of 16 GiB"):
        grant(host, env[0], "CUDA_DEVICE_MEMORY_LIMIT_0=2000m", env[2], held=ledger(*leases))


def test_memory_reserved_for_migration_is_not_granted() -> None:
    host = host_of()
    host = host._replace(config=host.config._replace(turn_ms=500, turn_memory="25%"))
    assert grant(host, "GPUSHARE_DEVICES=0", "GPUSHARE_MEMORY=12Gi", ON)[0].virtual_bytes == 24 * GI
    with pytest.raises(CapacityError, match="12.50 GiB requested, 12 GiB free of 12 GiB"):
        grant(host, "GPUSHARE_DEVICES=0", "GPUSHARE_MEMORY=12.5Gi")
    host = host._replace(config=host.config._replace(sharing=(SharingRule(4, 1.5),)))
    (one,) = grant(host, "GPUSHARE_DEVICES=0")
    assert (one.memory_limit_bytes, one.virtual_bytes) == (3 * GI, 6 * GI)
    off = host.config._replace(host_memory="")
    assert capacity_bytes(one.device, host.config) == 12 * GI
    assert capacity_bytes(one.device, off) == 16 * GI


@pytest.mark.parametrize("memory", ["20Gi", "4Gi", "25%"])
def test_device_fully_reserved_for_migration_grants_nothing(memory: str) -> None:
    """It must not count as a device of unknown size, which serves one container with any request."""
    host = host_of()
    host = host._replace(config=host.config._replace(turn_ms=500, turn_memory="100%"))
    with pytest.raises(CapacityError, match="requested, 0 B free of 0 B; .* lower oversubscription.turn_memory"):
        grant(host, "GPUSHARE_DEVICES=0", f"GPUSHARE_MEMORY={memory}")
    with pytest.raises(CapacityError, match="0 B of 0 B free"):
        grant(host, "GPUSHARE_DEVICES=any,free>=1Gi", f"GPUSHARE_MEMORY={memory}")


def test_virtual_size_survives_change_and_file() -> None:
    one = share(0, 0, 4 * GI)._replace(virtual_bytes=8 * GI)
    for size in (GI, 8 * GI):
        changed = admission.regrant(
            one, admission.SlotRequest(Amount(size, None, "x"), None), False, host_of(), Ledger({})
        )
        assert (changed.memory_limit_bytes, changed.virtual_bytes) == (size, 8 * GI)
    for memory in (Amount(9 * GI, None, "9Gi"), None):
        with pytest.raises(RequestError, match="8 GiB on device and host together; ask for at most 8 GiB"):
            admission.regrant(one, admission.SlotRequest(memory, None), False, host_of(), Ledger({}))
    kept = lease(one)
    assert leasefile.from_json(leasefile.to_json(kept), kept.id) == kept


def test_host_memory_size_is_read() -> None:
    assert inventory.host_memory_bytes() > 1 << 28


@given(
    st.lists(st.tuples(st.sampled_from(["1Gi", "3Gi", "25%", "8Gi"]), st.booleans(), st.sampled_from(["any", "all"])))
)
def test_no_sequence_of_grants_exceeds_budget(asks: list[tuple[str, bool, str]]) -> None:
    host, leases = host_of("20Gi", 1.5), list[Lease]()
    for number, (memory, on, devices) in enumerate(asks):
        env = [f"GPUSHARE_DEVICES={devices}", f"GPUSHARE_MEMORY={memory}", *([ON] if on else [])]
        try:
            shares = grant(host, *env, held=ledger(*leases))
        except CapacityError:
            continue
        assert all((one.virtual_bytes > 0) == on for one in shares)
        leases.append(lease(*shares, container_id=f"c{number}"))
    every = [one for some in leases for one in some.shares]
    assert sum(one.virtual_bytes for one in every) <= 20 * GI
    for uuid in {one.device.uuid for one in every}:
        assert sum(one.memory_limit_bytes or 0 for one in every if one.device.uuid == uuid) <= 16 * GI
