"""The choice of a device for `any`: conditions, strategies, and equal shares for containers without a limit."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from gpushare.allocation import placement
from gpushare.allocation.placement import Ledger
from gpushare.core.errors import CapacityError, DeviceError, GpushareError, RequestError
from gpushare.core.model import Device, Inventory, Lease, Node, Share, SharingRule
from gpushare.programs import why
from gpushare.request import request
from gpushare.request.dialects import conditions, parse_devices
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.pure import UUIDS, bundle, device, lease, ledger, node

GI = 1 << 30
MODELS = ("NVIDIA A100-SXM4-40GB", "NVIDIA L40S", "NVIDIA H100 PCIe", "Tesla T4")


def gpu(index: int, size_gib: int = 16, model: str = "Test GPU", **changes: Any) -> Device:
    uuid = f"GPU-{index:08x}-0000-0000-0000-000000000000"
    return device(0)._replace(index=index, minor=index, uuid=uuid, memory_bytes=size_gib * GI, model=model, **changes)


def host(*devices: Device, mig: tuple[Device, ...] = (), **config: Any) -> Node:
    usual = node()
    return Node(usual.config._replace(**config), Inventory("/", "535.1", devices, mig=mig))


def share(one: Device, size_gib: Any, percent: Any = None, page: int = 0) -> Share:
    return Share(0, one, None if size_gib is None else size_gib * GI, percent, page=page)


def held(*shares: Share) -> Ledger:
    return ledger(*(lease(one, container_id=f"c{at}") for at, one in enumerate(shares)))


def grant(where: Node, *env: str, taken: Any = None) -> tuple[Share, ...]:
    asked = request.resolve(bundle(*env), where)
    assert asked is not None
    return placement.grant(asked, where, taken or Ledger({}))


def indices(shares: tuple[Share, ...]) -> list[int]:
    return [one.device.index for one in shares]


# Conditions


@pytest.mark.parametrize(
    ("wanted", "models"),
    [
        ("A100", [MODELS[0]]),
        ("a100", [MODELS[0]]),
        ("A10", []),
        ("A10*", [MODELS[0]]),
        ("L40", []),
        ("L40S", [MODELS[1]]),
        ("*", list(MODELS)),
        ("nvidia", list(MODELS[:3])),
        ("NVIDIA-A100-SXM4-40GB", [MODELS[0]]),
        ("H100 PCIe", [MODELS[2]]),
        ("T4|H100", [MODELS[2], MODELS[3]]),
        ("100", []),
        ("*100", [MODELS[0], MODELS[2]]),
        ("a*b", [MODELS[0]]),
        ("A100*A100", []),
    ],
)
def test_model_pattern_matches_names(wanted: str, models: list[str]) -> None:
    assert [model for model in MODELS if conditions.is_model(wanted, model)] == models


def test_any_with_conditions_selects_matching_device() -> None:
    where = host(*(gpu(at, size, model) for at, (size, model) in enumerate(zip((40, 48, 80, 16), MODELS))))
    for condition, index in (
        ("model=H100", 2),
        ("memory>=41Gi", 1),
        ("memory>=40Gi,model=A100|H100", 0),
        ("free>=50Gi", 2),
        ("free>=53687091200", 2),
        ("free>=100%,model=t4", 3),
    ):
        assert indices(grant(where, f"GPUSHARE_DEVICES=any,{condition}", "GPUSHARE_MEMORY=1Gi")) == [index], condition
    busy = held(share(gpu(2, 80), 31))
    with pytest.raises(
        CapacityError, match=r"GPU 0: 40 GiB of 40 GiB free; .* GPU 2: 49 GiB of 80 GiB free; GPU 3: 16"
    ):
        grant(where, "GPUSHARE_DEVICES=any,free>=50Gi", "GPUSHARE_MEMORY=1Gi", taken=busy)
    with pytest.raises(DeviceError) as caught:
        grant(where, "GPUSHARE_DEVICES=any,model=B200", "GPUSHARE_MEMORY=1Gi", taken=busy)
    assert str(caught.value) == (
        'no device fits GPUSHARE_DEVICES="any,model=B200" and 1 GiB of memory: '
        'GPU 0: model "NVIDIA A100-SXM4-40GB"; GPU 1: model "NVIDIA L40S"; GPU 2: model "NVIDIA H100 PCIe"; '
        'GPU 3: model "Tesla T4"; `gpushare devices` shows what this host has'
    )


def test_free_condition_excludes_own_request() -> None:
    """`free` is the room before this container; a device of unknown size never satisfies it."""
    where = host(gpu(0))
    env = ("GPUSHARE_DEVICES=any,free>=4Gi", "GPUSHARE_MEMORY=1Gi")
    assert grant(where, *env, taken=held(share(gpu(0), 12)))
    with pytest.raises(CapacityError, match=r"^free>=4 GiB requested, device 0: 3 GiB of 16 GiB free; "):
        grant(where, *env, taken=held(share(gpu(0), 13)))
    with pytest.raises(CapacityError, match="of unknown size"):
        grant(host(gpu(0, 0)), *env)


def test_any_selects_mig_or_whole_gpu_by_condition() -> None:
    parts = tuple(
        gpu(1)._replace(uuid=f"MIG-{at}", parent=gpu(1).uuid, mig_index=at, memory_bytes=5 * GI) for at in range(2)
    )
    where = host(gpu(0), gpu(1, 40), mig=parts)

    def got(more: str) -> list[str]:
        return [one.device.uuid for one in grant(where, f"GPUSHARE_DEVICES=any{more}", "GPUSHARE_MEMORY=4Gi")]

    assert got("") == ["MIG-0"]  # it becomes the fullest; the divided GPU itself is no candidate
    assert got(",mig=no") == [gpu(0).uuid] == got(":1, mig=NO")
    assert got(":2,mig=yes") == ["MIG-0", "MIG-1"]
    with pytest.raises(DeviceError, match=r"^2 devices of 3 fit GPUSHARE_DEVICES=.* and .*: GPU 0: a whole GPU; "):
        got(":3,mig=yes")


@pytest.mark.parametrize(
    ("value", "reason", "hint"),
    [
        ("any:model=A100", '"any:model=A100" is not a number of devices', 'write "any,model=A100"'),
        ("any:0,model=A100", '"any:0" is not a number', "write any:1 to any:16"),
        ("any,0", "any cannot be combined", "write any"),
        ("0,any,model=A100", "any cannot be combined", "write any"),
        ("any,", "any cannot be combined", "write any"),
        (
            "any,modle=A100",
            '"modle=A100" is not a condition for a device',
            "write any or any:2, then with commas model=",
        ),
        ("any,model>=A100", '"model>=A100" has >= where only = is allowed', "write any or"),
        (
            "any,free",
            "condition free has no value",
            "write 'free>=...', in quotes for a shell, which takes a bare > for itself",
        ),
        ("any,model=A100,0", "any cannot be combined", "write any"),
        ("any,free=4Gi", '"free=4Gi" has = where only >= is allowed', "write any or"),
        ("any,free>4Gi", '"free>4Gi" is not a condition for a device', "write any or any:2, then with"),
        ("any,free>=much", 'free="much": not an amount of memory', "write a size"),
        ("any,free>=101%", 'free="101%": out of range', "write a percentage"),
        ("any,free>=20", 'free="20": a number without a unit means bytes', "did you mean 20Gi?"),
        ("any,memory>=40", 'memory="40": a number without a unit means bytes', "did you mean 40Gi?"),
        ("any,memory>=20%", 'memory="20%": ', ""),
        ("any,model=", 'model="": not a model', "write a word of its name"),
        ("any,model=**", "not a model", "write a word"),
        ("any,model=A100|", "not a model", "write a word"),
        ("any,model=" + "A" * 65, "not a model", "write a word"),
        ("any,mig=2", 'mig="2": neither yes nor no', "write mig=yes"),
        ("any,model=A100,model=H100", "model is given twice", r"keep one; several models are model=A100\|H100"),
    ],
)
def test_malformed_any_is_quoted_with_hint(value: str, reason: str, hint: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        grant(host(gpu(0)), f"GPUSHARE_DEVICES={value}", "GPUSHARE_MEMORY=1Gi")
    assert caught.value.message.startswith('GPUSHARE_DEVICES="any') or '="0,any' in caught.value.message
    assert caught.value.hint.startswith(hint.replace("\\", ""))


@given(st.text(alphabet="any:,model=AfreGi>0129%* |\u0661\x00", max_size=40))
def test_arbitrary_text_after_any_is_parsed_or_refused(text: str) -> None:
    try:
        found = parse_devices("N", "any" + text, node().inventory, any_allowed=True)
    except (RequestError, DeviceError) as error:
        assert error.hint and '="any' in str(error)
    else:
        assert found is None or (found.kind == "any" and 1 <= found.count <= 16)


def test_conditions_work_in_annotations_but_not_nvidia_variable() -> None:
    asked = request.resolve(bundle(annotations={"gpushare.io/devices": "any:2,mig=no"}), node())
    assert asked is not None and asked.selection.count == 2 and asked.selection.conditions[0].text == "mig=no"
    with pytest.raises(RequestError, match='^NVIDIA_VISIBLE_DEVICES="any,mig=no"'):  # not a variable of gpushare
        request.resolve(bundle("NVIDIA_VISIBLE_DEVICES=any,mig=no"), node())


def test_replica_suffix_selects_its_device() -> None:
    """NVIDIA's device plugin writes GPU-<uuid>::<n> when it shares by time-slicing."""
    for value in (f"{UUIDS[1]}::3", f"{UUIDS[1]}::3,{UUIDS[1]}::0", f"1::12,{UUIDS[1]}"):
        (one,) = grant(node(), f"NVIDIA_VISIBLE_DEVICES={value}")
        assert one.device.uuid == UUIDS[1]
    for value in (f"{UUIDS[1]}::", f"{UUIDS[1]}::x", f"{UUIDS[1]}::1::2", "::1"):
        with pytest.raises(GpushareError, match="NVIDIA_VISIBLE_DEVICES="):
            grant(node(), f"NVIDIA_VISIBLE_DEVICES={value}")


# Strategy


def test_binpack_fills_and_spread_levels() -> None:
    where, order = host(gpu(0), gpu(1), gpu(2)), {}
    for strategy in ("binpack", "spread"):
        here, taken = where._replace(config=where.config._replace(placement=strategy)), []
        for _ in range(6):
            taken += grant(here, "GPUSHARE_MEMORY=4Gi", taken=held(*taken))
        order[strategy] = [one.device.index for one in taken]
    assert order == {"binpack": [0, 0, 0, 0, 1, 1], "spread": [0, 1, 2, 0, 1, 2]}


def test_placement_counts_compute_like_memory() -> None:
    where = host(gpu(0), gpu(1))
    spread = where._replace(config=where.config._replace(placement="spread"))
    taken = held(share(gpu(0), 1, 80), share(gpu(1), 8))
    env = ("GPUSHARE_MEMORY=1Gi", "GPUSHARE_COMPUTE=10%")
    assert indices(grant(where, *env, taken=taken)) == [0]
    assert indices(grant(spread, *env, taken=taken)) == [1]
    assert indices(grant(where, env[0], "GPUSHARE_COMPUTE=30%", taken=taken)) == [1]  # the fuller device has no room


def test_containers_without_limits_are_spread() -> None:
    where = host(gpu(0), gpu(1), placement="spread")
    where = where._replace(config=where.config._replace(policy=where.config.policy._replace(unlimited="shared")))
    taken = placement.ledger_of([lease(share(gpu(0), None))], where.config.policy)
    assert indices(grant(where, "GPUSHARE_DEVICES=any", taken=taken)) == [1]


def test_percentage_applies_to_selected_device() -> None:
    where = host(gpu(0, 80), gpu(1, 16))
    env = ("GPUSHARE_DEVICES=any:2", "GPUSHARE_MEMORY=25%")
    assert [one.memory_limit_bytes for one in grant(where, *env)] == [20 * GI, 4 * GI]
    (one,) = grant(where, "GPUSHARE_MEMORY=25%", taken=held(share(gpu(0, 80), 61)))
    assert (one.device.index, one.memory_limit_bytes) == (1, 4 * GI)


def test_slot_amounts_apply_in_pci_order() -> None:
    where = host(gpu(0, 8), gpu(1, 16), gpu(2, 8), gpu(3, 40))
    env = ("GPUSHARE_DEVICES=any:2", "GPUSHARE_MEMORY=0=16Gi,1=8Gi")
    assert indices(grant(where, *env)) == [1, 2]
    assert indices(grant(where, *env, taken=held(share(gpu(2, 8), 1)))) == [1, 3]
    with pytest.raises(CapacityError, match=r"^1 device of 2 fit .*GPU 0: 8 GiB of 8 GiB free"):
        grant(host(gpu(0, 8), gpu(1, 16), gpu(2, 4)), *env)


@given(st.data())
def test_choice_is_optimal_and_independent_of_lease_order(data: st.DataObject) -> None:
    """Compared with every possible choice on few devices; the first of equals wins."""
    sizes = data.draw(st.lists(st.sampled_from([8, 16, 24]), min_size=1, max_size=4))
    devices = tuple(gpu(at, size) for at, size in enumerate(sizes))
    slots = data.draw(st.integers(1, len(devices)))
    amounts = data.draw(st.lists(st.integers(1, 16), min_size=slots, max_size=slots))
    strategy = data.draw(st.sampled_from(["binpack", "spread"]))
    leases: list[Lease] = [
        lease(share(one, data.draw(st.integers(1, 10)), data.draw(st.sampled_from([None, 20]))), container_id=f"c{at}")
        for at, one in enumerate(devices)
        if data.draw(st.booleans())
    ]
    where = host(*devices, placement=strategy)
    env = (f"GPUSHARE_DEVICES=any:{slots}", "GPUSHARE_MEMORY=" + ",".join(f"{i}={a}Gi" for i, a in enumerate(amounts)))
    used = ledger(*leases).used
    compute = ledger(*leases).compute

    def cost(chosen: tuple[Device, ...]) -> float:
        parts = (
            (used.get(one.uuid, 0) + amount * GI) * 1_000_000 // one.memory_bytes * 1_000
            + (200_000_000 if one.uuid in compute else 0)
            + (1 if any(one.uuid == x.shares[0].device.uuid for x in leases) else 0)
            for one, amount in zip(chosen, amounts)
        )
        return sum(parts) * (1 if strategy == "spread" else -1)

    ways = [
        way
        for way in itertools.combinations(devices, slots)
        if all(used.get(one.uuid, 0) + amount * GI <= one.memory_bytes for one, amount in zip(way, amounts))
    ]
    mixed = random.Random(0).sample(leases, len(leases))
    if not ways:
        with pytest.raises(CapacityError):
            grant(where, *env, taken=ledger(*leases))
        return
    found = grant(where, *env, taken=ledger(*leases))
    assert cost(tuple(one.device for one in found)) == min(map(cost, ways))
    assert [one._replace(page=0) for one in found] == [
        one._replace(page=0) for one in grant(where, *env, taken=ledger(*mixed))
    ]


# Equal shares


def equal(*rules: SharingRule, **config: Any) -> Node:
    return host(gpu(0, 24), gpu(1, 16, "NVIDIA L40S"), sharing=rules, **config)


@pytest.mark.parametrize(
    ("rule", "size_gib", "percent"),
    [
        (SharingRule(3), 8, 33),
        (SharingRule(4), 6, 25),
        (SharingRule(4, 0.5), 3, 25),
        (SharingRule(4, 1.0, 2.0), 6, 50),
        (SharingRule(2, 1.0, 4.0), 12, 100),
        (SharingRule(1), 24, 100),
    ],
)
def test_equal_share_is_fraction_of_device(rule: SharingRule, size_gib: int, percent: int) -> None:
    for env in ("NVIDIA_VISIBLE_DEVICES=0", "GPUSHARE_DEVICES=0", f"NVIDIA_VISIBLE_DEVICES={gpu(0).uuid}::1"):
        (one,) = grant(equal(rule), env)
        assert (one.memory_limit_bytes, one.compute_percent, one.soft) == (size_gib * GI, percent, False)
    both = grant(equal(rule), "NVIDIA_VISIBLE_DEVICES=all")
    assert [one.memory_limit_bytes for one in both] == [size_gib * GI, size_gib * GI * 2 // 3 // (2 << 20) * (2 << 20)]


@pytest.mark.parametrize("split", [1, 2, 3, 7, 10, 33, 100])
@pytest.mark.parametrize("cores", [1.0, 1.5])
def test_device_fits_exactly_split_count_shares(split: int, cores: float) -> None:
    where = equal(SharingRule(split, 1.0, cores))
    taken: list[Share] = []
    for _ in range(split):
        (one,) = grant(where, "GPUSHARE_DEVICES=0", taken=held(*taken))
        taken.append(one)
    assert 24 * GI - split * (2 << 20) < sum(one.memory_limit_bytes or 0 for one in taken) <= 24 * GI
    assert sum(one.compute_percent or 0 for one in taken) <= 100 * cores or split == 1
    with pytest.raises(CapacityError, match="^device 0: an equal share|^device 0: .* of compute asked|serves"):
        grant(where, "GPUSHARE_DEVICES=0", taken=held(*taken))
    assert indices(grant(where, "GPUSHARE_DEVICES=any", taken=held(*taken))) == [1]


def test_undersubscribed_device_fits_no_more_than_split_count() -> None:
    where = equal(SharingRule(2, 0.5))
    taken = held(share(gpu(0, 24), 1), share(gpu(0, 24), 1, page=1))
    with pytest.raises(CapacityError) as caught:
        grant(where, "GPUSHARE_DEVICES=0", "GPUSHARE_MEMORY=1Gi", taken=taken)
    assert str(caught.value) == (
        "device 0 serves 2 containers already, sharing.split_count is 2; stop one of them, or ask for another device"
    )


def test_explicit_amount_overrides_equal_share() -> None:
    where = equal(SharingRule(4))
    cases = {
        ("GPUSHARE_MEMORY=2Gi",): (2, None),
        ("GPUSHARE_MEMORY=2Gi", "GPUSHARE_COMPUTE=5%"): (2, 5),
        ("GPUSHARE_COMPUTE=5%",): (6, 5),
        ("GPUSHARE_COMPUTE_MODE=soft",): (6, 25),
        ("GPUSHARE_MEMORY=100%",): (24, None),
    }
    for env, (size_gib, percent) in cases.items():
        (one,) = grant(where, "GPUSHARE_DEVICES=0", *env)
        assert (one.memory_limit_bytes, one.compute_percent) == (size_gib * GI, percent), env
        assert one.soft == ("GPUSHARE_COMPUTE_MODE=soft" in env)


def test_device_rules_precede_default_rule() -> None:
    where = equal(SharingRule(8, model="l40*"), SharingRule(0, devices=("0",)), SharingRule(2))
    first, second = grant(where, "NVIDIA_VISIBLE_DEVICES=all")
    assert (first.memory_limit_bytes, second.memory_limit_bytes) == (None, 2 * GI)
    where = equal(SharingRule(8, model="L40S", devices=("0",)), SharingRule(2))
    first, second = grant(where, "NVIDIA_VISIBLE_DEVICES=all")
    assert (first.memory_limit_bytes, second.memory_limit_bytes) == (12 * GI, 8 * GI)


def test_equal_share_satisfies_required_limit() -> None:
    where = equal(SharingRule(4))
    for policy in ({"require_limits": True}, {"unlimited": "deny"}, {"max_memory": "12Gi"}):
        here = where._replace(config=where.config._replace(policy=where.config.policy._replace(**policy)))
        assert grant(here, "NVIDIA_VISIBLE_DEVICES=0")[0].memory_limit_bytes == 6 * GI
    clamp = where.config.policy._replace(max_memory="5Gi", over_maximum="clamp")
    (one,) = grant(where._replace(config=where.config._replace(policy=clamp)), "NVIDIA_VISIBLE_DEVICES=0")
    assert (one.memory_limit_bytes, one.clamped) == (5 * GI, "an equal share (1 of 4) of memory")


def test_equal_share_of_unknown_size_is_refused() -> None:
    with pytest.raises(
        DeviceError,
        match="device 0 cannot be divided into equal shares: its memory size is not known; run `gpushare ref",
    ):
        grant(host(gpu(0, 0), sharing=(SharingRule(2),)), "NVIDIA_VISIBLE_DEVICES=0")


def test_explain_describes_equal_share_of_named_device() -> None:
    where = equal(SharingRule(4))
    asked = request.resolve(bundle("NVIDIA_VISIBLE_DEVICES=0"), where)
    assert asked is not None
    shares = placement.grant(asked, where, Ledger({}))
    (reason,) = why.placed(asked, where, Ledger({}), shares)
    assert (reason.device, reason.chosen, reason.text) == ("GPU 0", True, "named, an equal share (1 of 4)")
