"""Placement and policy: never more than a device has, no device twice, no accidental unlimited allocation."""

from __future__ import annotations

from typing import Any

import pytest
from gpushare.allocation import placement
from gpushare.allocation.placement import Ledger
from gpushare.core.errors import CapacityError, DeviceError, GpushareError, PolicyError, RequestError
from gpushare.core.model import Node, Share
from gpushare.request import request
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.pure import UUIDS, bundle, device, lease, ledger, node, share

GI = 1 << 30


def grant(*env: str, host: Any = None, held: Any = None) -> tuple[Share, ...]:
    host = host or node()
    asked = request.resolve(bundle(*env), host)
    assert asked is not None
    return placement.grant(asked, host, held or Ledger({}))


def got(shares: tuple[Share, ...]) -> list[tuple[int, int, Any]]:
    return [(s.slot, s.device.index, s.memory_limit_bytes) for s in shares]


def test_percentage_applies_to_each_device() -> None:
    host = node()
    small = host.inventory.devices[1]._replace(memory_bytes=8 * GI + 1)
    host = host._replace(inventory=host.inventory._replace(devices=(host.inventory.devices[0], small)))
    assert got(grant("GPUSHARE_DEVICES=all", "GPUSHARE_MEMORY=25%", host=host)) == [(0, 0, 4 * GI), (1, 1, 2 * GI)]


def test_exact_fit_is_granted_and_one_byte_more_refused() -> None:
    held = ledger(lease(share(0, 0, 12 * GI)))
    one = node(devices=1)
    assert got(grant("GPUSHARE_MEMORY=4Gi", host=one, held=held)) == [(0, 0, 4 * GI)]
    with pytest.raises(CapacityError) as caught:
        grant(f"GPUSHARE_MEMORY={4 * GI + 1}", host=one, held=held)
    assert "4 GiB free of 16 GiB, held by c1 (12 GiB)" in str(caught.value)


def test_refusal_has_numbers_and_container_names() -> None:
    held = ledger(*(lease(share(0, 0, 3 * GI), container_id=f"c{i}") for i in range(5)))
    with pytest.raises(CapacityError) as caught:
        grant("GPUSHARE_DEVICES=0", "GPUSHARE_MEMORY=25%", held=held)
    assert str(caught.value) == (
        "device 0: 25% (4 GiB) requested, 1 GiB free of 16 GiB, "
        "held by c0 (3 GiB), c1 (3 GiB), c2 (3 GiB), c3 (3 GiB) and 1 more; stop one of them, or ask for less"
    )


def test_refusal_with_one_container_names_it() -> None:
    with pytest.raises(CapacityError) as caught:
        grant(
            "GPUSHARE_MEMORY=8Gi", host=node(devices=1), held=ledger(lease(share(0, 0, 12 * GI), container_id="train"))
        )
    assert str(caught.value) == (
        "device 0: 8 GiB requested, 4 GiB free of 16 GiB, held by train (12 GiB); stop it, or ask for less"
    )


def test_request_above_device_size_has_no_hint_to_stop_containers() -> None:
    with pytest.raises(CapacityError, match=r"held by c1 \(12 GiB\); ask for at most 4 GiB$"):
        grant("GPUSHARE_MEMORY=17Gi", host=node(devices=1), held=ledger(lease(share(0, 0, 12 * GI))))


def test_overcommit_does_not_raise_limit_of_one_container() -> None:
    """A container shown a GPU of 20 GiB could never fill it."""
    host = node(devices=1, overcommit=2.0)
    with pytest.raises(CapacityError, match="^device 0: 20 GiB requested, and it has 16 GiB; ask for at most 16 GiB$"):
        grant("GPUSHARE_MEMORY=20Gi", host=host)
    full = ledger(lease(share(0, 0, 16 * GI)))
    assert got(grant("GPUSHARE_MEMORY=16Gi", host=host, held=full)) == [(0, 0, 16 * GI)]


def test_maximum_above_device_is_clamped_to_device() -> None:
    """One configuration for nodes of several sizes."""
    for overcommit, size in ((1.0, 16), (2.0, 16), (0.5, 8)):
        host = node(devices=1, overcommit=overcommit, max_memory="20Gi", over_maximum="clamp")
        assert got(grant("GPUSHARE_DEVICES=0", host=host)) == [(0, 0, size * GI)]


@pytest.mark.parametrize(
    ("asked", "shown", "hint"),
    [("4", "4 B", "did you mean 4Gi."), ("2047Ki", "2047 KiB", "ask for more"), ("0.01%", "0.01%", "ask for more")],
)
def test_limit_below_one_block_is_refused_with_hint(asked: str, shown: str, hint: str) -> None:
    """GPUSHARE_MEMORY=4 probably means 4Gi; no program could start with 4 bytes."""
    with pytest.raises(RequestError, match=f"^{shown} of device 0 is less than one block of 2 MiB; {hint}$"):
        grant(f"GPUSHARE_MEMORY={asked}", host=node(devices=1))
    assert got(grant("GPUSHARE_MEMORY=2Mi", host=node(devices=1))) == [(0, 0, 2 << 20)]


def test_refusal_shows_short_container_id() -> None:
    with pytest.raises(CapacityError, match=r"held by 397847f6558e \(12 GiB\); stop it"):
        held = ledger(lease(share(0, 0, 12 * GI), container_id="397847f6558e" + "0" * 52))
        grant("GPUSHARE_MEMORY=8Gi", host=node(devices=1), held=held)


def test_error_quotes_annotation_as_written() -> None:
    with pytest.raises(RequestError, match='^gpushare.io/memory="1=1Gi": an amount for slot 1'):
        asked = request.resolve(bundle(annotations={"gpushare.io/memory": "1=1Gi"}), node())
        assert asked is not None
        placement.grant(asked, node(), Ledger({}))


def test_refusal_of_any_gives_reason_for_each_device() -> None:
    held = ledger(lease(share(0, 0, 15 * GI)), lease(share(0, 1, None), container_id="b"))
    with pytest.raises(
        CapacityError,
        match=r"^no device fits 2 GiB of memory: GPU 0: 1 GiB of 16 GiB free; GPU 1: held whole by b; ask for l",
    ):
        grant("GPUSHARE_MEMORY=2Gi", held=held)


def test_reason_common_to_all_devices_is_given_once() -> None:
    with pytest.raises(PolicyError) as caught:
        grant("GPUSHARE_DEVICES=any", host=node(require_limits=True))
    assert str(caught.value).startswith("no memory limit is requested, and policy.require_limits requires one")


def test_overcommit_grants_more_than_device() -> None:
    held = ledger(lease(share(0, 0, 16 * GI)))
    with pytest.raises(CapacityError, match="0 B free of 16 GiB"):
        grant("GPUSHARE_MEMORY=8Gi", host=node(devices=1), held=held)
    assert grant("GPUSHARE_MEMORY=8Gi", host=node(devices=1, overcommit=1.5), held=held)
    with pytest.raises(CapacityError, match="8 GiB free of 24 GiB"):
        grant("GPUSHARE_MEMORY=9Gi", host=node(devices=1, overcommit=1.5), held=held)


def test_unlimited_request_takes_whole_device() -> None:
    shares = grant("NVIDIA_VISIBLE_DEVICES=0")
    assert got(shares) == [(0, 0, None)]
    held = ledger(lease(*shares))
    for env in ("NVIDIA_VISIBLE_DEVICES=0", "GPUSHARE_DEVICES=0"):
        with pytest.raises(CapacityError, match=r"device 0 is in exclusive use, held by c1 \(all\)"):
            grant(env, "GPUSHARE_MEMORY=1Gi", held=held)
    with pytest.raises(CapacityError, match=r"all of device 0 was requested, but 1 GiB is granted, held by c1"):
        grant("NVIDIA_VISIBLE_DEVICES=0", held=ledger(lease(share(0, 0, GI))))


def test_unlimited_request_obeys_policy() -> None:
    shared = node(unlimited="shared")
    held = ledger(lease(share(0, 0, None)), lease(share(0, 0, 10 * GI), container_id="b"), unlimited="shared")
    assert got(grant("NVIDIA_VISIBLE_DEVICES=0", host=shared, held=held)) == [(0, 0, None)]
    assert grant("GPUSHARE_DEVICES=0", "GPUSHARE_MEMORY=6Gi", host=shared, held=held)
    with pytest.raises(CapacityError):
        grant("GPUSHARE_DEVICES=0", "GPUSHARE_MEMORY=7Gi", host=shared, held=held)
    with pytest.raises(PolicyError, match="policy.unlimited requires one"):
        grant("NVIDIA_VISIBLE_DEVICES=0", host=node(unlimited="deny"))


def test_blocked_device_gets_no_new_lease() -> None:
    with pytest.raises(CapacityError, match="does not know.*prune --assume-free"):
        grant("GPUSHARE_DEVICES=0", "GPUSHARE_MEMORY=1Gi", held=ledger(blocked=[UUIDS[0]]))
    assert got(grant("GPUSHARE_MEMORY=1Gi", held=ledger(blocked=[UUIDS[0]]))) == [(0, 1, GI)]


def test_slots_follow_pci_order_not_request_order() -> None:
    shares = grant("GPUSHARE_DEVICES=1,0", "GPUSHARE_MEMORY=0=1Gi,1=2Gi")
    assert got(shares) == [(0, 0, GI), (1, 1, 2 * GI)]


def test_any_with_count_selects_distinct_devices() -> None:
    assert got(grant("GPUSHARE_DEVICES=any:2", "GPUSHARE_MEMORY=1Gi")) == [(0, 0, GI), (1, 1, GI)]
    with pytest.raises(CapacityError, match=r'GPUSHARE_DEVICES="any:3": this container may use 2 devices; ask'):
        grant("GPUSHARE_DEVICES=any:3", "GPUSHARE_MEMORY=1Gi")


@pytest.mark.parametrize(
    ("env", "what"),
    [
        (("GPUSHARE_MEMORY=0=1Gi,1=1Gi",), '^GPUSHARE_MEMORY="0=1Gi,1=1Gi": .*slot 1, but .* 1 device, .*any:2 '),
        (("GPUSHARE_MEMORY=3=1Gi",), '^GPUSHARE_MEMORY="3=1Gi": an amount for slot 3, but .*any:4 '),
        (("GPUSHARE_DEVICES=all", "GPUSHARE_MEMORY=0=1Gi"), '^GPUSHARE_MEMORY="0=1Gi": no amount for slot 1'),
        (("GPUSHARE_DEVICES=all", "GPUSHARE_MEMORY=1=1Gi"), '^GPUSHARE_MEMORY="1=1Gi": no amount for slot 0'),
    ],
)
def test_missing_or_extra_slot_amount_is_refused(env: tuple[str, ...], what: str) -> None:
    with pytest.raises(RequestError, match=what):
        grant(*env)


def test_device_of_unknown_size_grants_once() -> None:
    unknown = node(memory_bytes=0)
    with pytest.raises(DeviceError, match="25% of device 0: its memory size is not known; .*gpushare refresh"):
        grant("GPUSHARE_DEVICES=0", "GPUSHARE_MEMORY=25%", host=unknown)
    assert got(grant("GPUSHARE_DEVICES=0", "GPUSHARE_MEMORY=4Gi", host=unknown)) == [(0, 0, 4 * GI)]
    with pytest.raises(DeviceError, match="not known"):  # a second allocation could oversell it
        grant("GPUSHARE_DEVICES=0", "GPUSHARE_MEMORY=4Gi", host=unknown, held=ledger(lease(share(0, 0, GI))))


def test_percentage_below_one_block_is_refused() -> None:
    with pytest.raises(RequestError, match="less than one block of 2 MiB"):
        grant("GPUSHARE_MEMORY=0.001%")


def test_host_without_device_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"no NVIDIA device on this host \(driver root /\)"):
        grant("GPUSHARE_MEMORY=1Gi", host=node(devices=0))
    assert grant("NVIDIA_VISIBLE_DEVICES=none", host=node(devices=0)) == ()


@pytest.mark.parametrize(
    ("policy", "env", "what"),
    [
        ({"require_limits": True}, ("NVIDIA_VISIBLE_DEVICES=all",), "policy.require_limits requires one"),
        ({"max_memory": "8Gi"}, ("NVIDIA_VISIBLE_DEVICES=all",), "policy.max_memory requires one"),
        (
            {"max_memory": "4Gi"},
            ("GPUSHARE_DEVICES=0", "GPUSHARE_MEMORY=5Gi"),
            r"5 GiB of device 0 is more than policy.max_memory allows: 4 GiB",
        ),
        (
            {"max_memory": "4Gi"},
            ("GPUSHARE_MEMORY=5Gi",),
            r"5 GiB of memory: GPU 0: policy.max_memory is 4 GiB; .* at most 4 GiB",
        ),
        ({"max_memory": "25%"}, ("GPUSHARE_DEVICES=1", "GPUSHARE_MEMORY=26%"), "more than policy.max_memory allows"),
        ({"max_compute_percent": 50}, ("GPUSHARE_MEMORY=1Gi",), r"no compute limit was requested, .*\(50%\)"),
        (
            {"allowed_devices": ("1",)},
            ("GPUSHARE_DEVICES=0",),
            "device 0 .* is not among policy.allowed_devices; use 1",
        ),
        ({"allowed_devices": ("9",)}, ("GPUSHARE_MEMORY=1Gi",), "not among policy.allowed_devices"),
        ({"allowed_devices": ("",)}, ("GPUSHARE_MEMORY=1Gi",), "not among policy.allowed_devices"),
        (
            {"max_memory": "8Gi", "over_maximum": "clamp", "unlimited": "deny"},
            ("NVIDIA_VISIBLE_DEVICES=all",),
            "policy.unlimited requires one",
        ),
    ],
)
def test_request_against_policy_is_refused(policy: dict[str, Any], env: tuple[str, ...], what: str) -> None:
    with pytest.raises(PolicyError, match=what):
        grant(*env, host=node(**policy))


def test_request_within_policy_is_granted() -> None:
    assert got(grant("GPUSHARE_MEMORY=25%", host=node(max_memory="25%"))) == [(0, 0, 4 * GI)]
    for allowed in ("1", UUIDS[1], UUIDS[1].lower()):
        host = node(allowed_devices=(allowed,))
        assert got(grant("GPUSHARE_MEMORY=1Gi", host=host)) == [(0, 1, GI)]
        assert got(grant("NVIDIA_VISIBLE_DEVICES=all", host=host)) == [(0, 1, None)]


@pytest.mark.parametrize(
    ("policy", "env", "got_bytes", "asked"),
    [
        ({"max_memory": "4Gi"}, ("GPUSHARE_MEMORY=5Gi",), 4 * GI, "5 GiB of memory"),
        ({"max_memory": "25%"}, ("GPUSHARE_MEMORY=50%",), 4 * GI, "50% of memory"),
        ({"max_memory": "4Gi"}, ("NVIDIA_VISIBLE_DEVICES=0",), 4 * GI, "no memory limit"),
        ({"max_memory": "4Gi"}, ("GPUSHARE_MEMORY=4Gi",), 4 * GI, ""),
    ],
)
def test_request_above_maximum_is_clamped(
    policy: dict[str, Any], env: tuple[str, ...], got_bytes: int, asked: str
) -> None:
    (given,) = grant(*env, host=node(over_maximum="clamp", **policy))
    assert (given.memory_limit_bytes, given.clamped) == (got_bytes, asked)


def test_clamping_does_not_satisfy_required_limit() -> None:
    clamp = {"over_maximum": "clamp", "max_memory": "4Gi"}
    with pytest.raises(PolicyError, match="policy.require_limits requires one"):
        grant("NVIDIA_VISIBLE_DEVICES=0", host=node(**clamp, require_limits=True))
    with pytest.raises(PolicyError, match="policy.max_memory requires one|policy.unlimited requires one"):
        grant("NVIDIA_VISIBLE_DEVICES=0", host=node(**clamp, unlimited="deny"))


def compute(percent: Any, index: int = 0, soft: bool = False) -> Share:
    """An existing allocation."""
    return share(0, index, GI)._replace(compute_percent=percent, soft=soft)


def test_compute_limits_are_assigned_by_slot() -> None:
    (one,) = grant("GPUSHARE_MEMORY=1Gi", "GPUSHARE_COMPUTE=30%")
    assert (one.compute_percent, one.soft, one.priority) == (30, False, 0)
    found = grant("GPUSHARE_DEVICES=all", "GPUSHARE_MEMORY=1Gi", "GPUSHARE_COMPUTE=0=10%,1=90%")
    assert [share.compute_percent for share in found] == [10, 90]
    assert grant("GPUSHARE_MEMORY=1Gi")[0].compute_percent is None


def test_compute_above_maximum_is_clamped_or_refused() -> None:
    env = ("GPUSHARE_MEMORY=1Gi",)
    (given,) = grant(*env, host=node(over_maximum="clamp", max_compute_percent=50))
    assert (given.compute_percent, given.clamped) == (50, "no compute limit")
    (given,) = grant(*env, "GPUSHARE_COMPUTE=60%", host=node(over_maximum="clamp", max_compute_percent=50))
    assert (given.compute_percent, given.clamped) == (50, "60% of compute")
    limited = node(max_compute_percent=50)
    assert grant(*env, "GPUSHARE_COMPUTE=50%", host=limited)[0].compute_percent == 50
    for more in ((), ("GPUSHARE_COMPUTE=51%",)):
        with pytest.raises(PolicyError, match=r"more than policy.max_compute \(50%\) allows; set GPUSHARE_COMPUTE=50%"):
            grant(*env, *more, host=limited)


def test_hard_compute_limits_never_exceed_device() -> None:
    one, env = node(devices=1), ("GPUSHARE_MEMORY=1Gi",)
    held = ledger(lease(compute(30), container_id="a"), lease(compute(30), container_id="b"))
    assert grant(*env, "GPUSHARE_COMPUTE=40%", host=one, held=held)[0].compute_percent == 40
    with pytest.raises(CapacityError) as caught:
        grant(*env, "GPUSHARE_COMPUTE=41%", host=one, held=held)
    assert str(caught.value) == (
        "device 0: 41% of compute requested, 40% free of 100%, held by a (30%), b (30%); "
        "stop one of them, ask for less, or set GPUSHARE_COMPUTE_MODE=soft"
    )
    with pytest.raises(CapacityError, match=r"99% of compute requested, 50% free of 50%; ask for less, or set"):
        host = one._replace(config=one.config._replace(compute_overcommit=0.5))
        grant(*env, "GPUSHARE_COMPUTE=99%", host=host)


def test_soft_or_missing_compute_limit_does_not_count() -> None:
    """Soft limits and containers without a limit do not count; nor does the request, if soft."""
    one, env = node(devices=1), ("GPUSHARE_MEMORY=1Gi",)
    held = ledger(
        *(lease(compute(*how), container_id=f"c{at}") for at, how in enumerate(((90, 0, True), (None,), (100,), (70,))))
    )
    assert held.compute == {UUIDS[0]: (("c3", 70),)}
    assert grant(*env, "GPUSHARE_COMPUTE=30%", host=one, held=held)[0].compute_percent == 30
    for env_of_more in ((), ("GPUSHARE_COMPUTE=100%",), ("GPUSHARE_COMPUTE=80%", "GPUSHARE_COMPUTE_MODE=soft")):
        grant(*env, *env_of_more, host=one, held=held)
    with pytest.raises(CapacityError, match="80% of compute requested, 30% free"):
        grant(*env, "GPUSHARE_COMPUTE=80%", host=one, held=held)


def test_any_selects_device_with_enough_compute() -> None:
    held = ledger(lease(compute(80), container_id="a"))
    assert got(grant("GPUSHARE_MEMORY=1Gi", "GPUSHARE_COMPUTE=30%", held=held)) == [(0, 1, GI)]
    assert got(grant("GPUSHARE_MEMORY=1Gi", "GPUSHARE_COMPUTE=20%", held=held)) == [(0, 0, GI)]
    with pytest.raises(CapacityError, match="20% free of 100%"):
        grant("GPUSHARE_DEVICES=0", "GPUSHARE_MEMORY=1Gi", "GPUSHARE_COMPUTE=30%", held=held)


def test_compute_overcommit_grants_more_than_device() -> None:
    twice = node(devices=1)
    twice = twice._replace(config=twice.config._replace(compute_overcommit=2.0))
    held = ledger(lease(compute(90), container_id="a"), lease(compute(90), container_id="b"))
    assert grant("GPUSHARE_MEMORY=1Gi", "GPUSHARE_COMPUTE=20%", host=twice, held=held)[0].compute_percent == 20
    with pytest.raises(CapacityError, match="21% of compute requested, 20% free of 200%"):
        grant("GPUSHARE_MEMORY=1Gi", "GPUSHARE_COMPUTE=21%", host=twice, held=held)


def test_activity_file_gets_lowest_free_number() -> None:
    taken = ledger(*(lease(compute(None)._replace(page=page), container_id=f"c{page}") for page in (0, 1, 3)))
    assert grant("GPUSHARE_MEMORY=1Gi", held=taken)[0].page == 2
    full = ledger(*(lease(share(0, 0, 1 << 21)._replace(page=page), container_id=f"c{page}") for page in range(128)))
    assert grant("GPUSHARE_MEMORY=1Gi", held=full)[0].device.index == 1
    with pytest.raises(CapacityError, match="device 0 serves 128 containers already") as caught:
        grant("GPUSHARE_DEVICES=0", "GPUSHARE_MEMORY=1Gi", held=full)
    assert caught.value.hint


def test_mode_and_priority_reach_allocation() -> None:
    (found,) = grant("GPUSHARE_MEMORY=1Gi", "GPUSHARE_COMPUTE_MODE=soft", "GPUSHARE_PRIORITY=high")
    assert (found.soft, found.priority, found.oversubscribe) == (True, 1, False)


def test_ledger_sums_leases() -> None:
    found = ledger(lease(share(0, 0, GI), share(1, 1, None)), lease(share(0, 0, GI), container_id="b"))
    assert found.used == {UUIDS[0]: 2 * GI}
    assert found.exclusive == {UUIDS[1]}
    assert found.holders[UUIDS[0]] == (("c1", GI), ("b", GI))


requests = st.tuples(
    st.sampled_from(["", "any", "any:2", "all", "0", "1", "0,1"]),
    st.sampled_from(["", "1Gi", "3.7Gi", "5000000001", "33%", "16Gi", "0=2Gi,1=9Gi", "100%"]),
)


@given(st.lists(requests, max_size=40), st.sampled_from([0.5, 1.0, 1.7]), st.sampled_from(["exclusive", "shared"]))
def test_no_sequence_of_grants_oversells_device(asks: list[tuple[str, str]], overcommit: float, unlimited: str) -> None:
    host: Node = node(overcommit=overcommit, unlimited=unlimited)
    leases = []
    for number, (devices, memory) in enumerate(asks):
        env = [f"GPUSHARE_DEVICES={devices}"] + ([f"GPUSHARE_MEMORY={memory}"] if memory else [])
        try:
            asked = request.resolve(bundle(*env), host)
            shares = placement.grant(asked, host, ledger(*leases, unlimited=unlimited)) if asked else ()
        except GpushareError:
            continue
        indices = [s.device.index for s in shares]
        assert indices == sorted(set(indices))
        assert [s.slot for s in shares] == list(range(len(shares)))
        assert all((s.memory_limit_bytes is None) == (memory == "") for s in shares)
        leases.append(lease(*shares, container_id=f"c{number}"))
    for gpu in (device(0), device(1)):
        held = [s.memory_limit_bytes for item in leases for s in item.shares if s.device.uuid == gpu.uuid]
        assert sum(size for size in held if size is not None) <= 16 * GI * overcommit
        if unlimited == "exclusive" and None in held:
            assert held == [None]
