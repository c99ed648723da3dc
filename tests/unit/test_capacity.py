"""Capacity is what programs can allocate. Schedulers that divide NVML's whole total still get their last container."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gpushare.allocation import placement
from gpushare.core.errors import CapacityError
from gpushare.core.model import Inventory, Lease, Node, Policy, Request, Share
from gpushare.inject import plan
from gpushare.integrations import labels
from gpushare.request import request
from gpushare.request.dialects import conditions
from gpushare.state import leasefile

from tests.unit.pure import bundle, device, ledger, node

MIB = 1 << 20
TOTAL = 16384  # MiB, as NVML counts
RESERVED = 384
CAPACITY = TOTAL - RESERVED
SIZED = device(0, memory_bytes=CAPACITY * MIB, reserved_bytes=RESERVED * MIB)
HOST = Node(node().config, Inventory("/", "535", (SIZED,)))
ON_0 = "NVIDIA_VISIBLE_DEVICES=0"


def koordinator(mib: int) -> dict[str, str]:
    resources = {"koordinator.sh/gpu-memory": f"{mib}Mi"}
    return {"scheduling.koordinator.sh/device-allocated": json.dumps({"gpu": [{"minor": 0, "resources": resources}]})}


# the words of each scheduler that counts amounts of memory, for a number of MiB
AMOUNTS: dict[str, Any] = {
    "hami": lambda mib: ((ON_0, f"CUDA_DEVICE_MEMORY_LIMIT_0={mib}m"), {}),
    "vgpu-manager": lambda mib: ((ON_0, f"CUDA_MEM_LIMIT_0={mib}m"), {}),
    "pai": lambda mib: ((ON_0, "AMP_VGPU_ENABLE=1", f"GPU_MEM_PER_DEVICE={mib * MIB}"), {}),
    "runai": lambda mib: ((ON_0,), {"gpu-memory": str(mib)}),
    "koordinator": lambda mib: ((), koordinator(mib)),
    "tencent": lambda mib: ((ON_0,), {"tencent.com/vcuda-core": "25", "tencent.com/vcuda-memory": str(mib // 256)}),
    "mps": lambda mib: ((ON_0, f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={mib}M"), {}),
}
# and of schedulers that write a part of the device
PARTS: dict[str, Any] = {
    "volcano": lambda mib: ((ON_0, f"VOLCANO_GPU_ALLOCATED={mib}", f"VOLCANO_GPU_MEMORY_TOTAL={TOTAL}"), {}),
    "aliyun": lambda mib: ((f"ALIYUN_COM_GPU_MEM_CONTAINER={mib}", f"ALIYUN_COM_GPU_MEM_DEV={TOTAL}", ON_0), {}),
    "runai": lambda mib: ((ON_0, f"GPU_PORTION={mib / TOTAL}"), {}),
}


def asked(words: Any, host: Node = HOST) -> Request:
    env, annotations = words
    found = request.resolve(bundle(*env, annotations=annotations), host)
    assert found is not None
    return found


def granted(words: Any, held: list[Lease], host: Node = HOST) -> Share:
    (share,) = placement.grant(asked(words, host), host, ledger(*held))
    held.append(Lease(f"c{len(held)}", "held", "boot", "/b", (share._replace(page=len(held)),), 1, 1))
    return share


@pytest.mark.parametrize("name", AMOUNTS)
def test_last_container_of_scheduler_that_counts_total_fits(name: str) -> None:
    """Four quarters of NVML's total: the last one gets what is left, with a note. A fifth is refused."""
    held: list[Lease] = []
    shares = [granted(AMOUNTS[name](TOTAL // 4), held) for _ in range(4)]
    assert [share.memory_limit_bytes for share in shares] == [4096 * MIB] * 3 + [(4096 - RESERVED) * MIB]
    assert [bool(share.clamped) for share in shares] == [False, False, False, True]
    text = "4 GiB of memory, including 384 MiB that the driver reserves"
    assert shares[3].clamped == text
    note = f"slot 0: {text} was requested, less is granted"
    assert plan.request_notes(asked(AMOUNTS[name](4096)), (shares[3],))[-1] == note
    with pytest.raises(CapacityError, match="0 B free of 15.6"):
        granted(AMOUNTS[name](TOTAL // 4), held)


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_total_are_parts_of_capacity(name: str) -> None:
    held: list[Lease] = []
    shares = [granted(PARTS[name](TOTAL // 4), held) for _ in range(4)]
    assert [(share.memory_limit_bytes, share.clamped) for share in shares] == [(CAPACITY // 4 * MIB, "")] * 4


@pytest.mark.parametrize("name", AMOUNTS)
def test_request_for_total_gets_capacity(name: str) -> None:
    assert granted(AMOUNTS[name](TOTAL), []).memory_limit_bytes == CAPACITY * MIB


@pytest.mark.parametrize("name", AMOUNTS)
def test_request_above_total_is_refused(name: str) -> None:
    with pytest.raises(CapacityError, match="requested, "):
        granted(AMOUNTS[name](TOTAL + 256), [])


@pytest.mark.parametrize("over_maximum", ["refuse", "clamp"])
def test_policy_of_100_percent_allows_total(over_maximum: str) -> None:
    rules = Policy(max_memory="100%", over_maximum=over_maximum)
    host = HOST._replace(config=HOST.config._replace(policy=rules))
    assert granted(AMOUNTS["hami"](TOTAL), [], host).memory_limit_bytes == CAPACITY * MIB


@pytest.mark.parametrize("env", [("GPUSHARE_MEMORY=16Gi",), ("GPUSHARE_DEVICES=0", "GPUSHARE_MEMORY=16128Mi")])
def test_own_request_is_never_clamped(env: tuple[str, ...]) -> None:
    with pytest.raises(CapacityError, match=r"requested, 15\.6"):
        granted((env, {}), [])


def test_own_percentages_of_100_fit() -> None:
    held: list[Lease] = []
    for _ in range(3):
        granted((("GPUSHARE_MEMORY=33%",), {}), held)
    assert granted((("GPUSHARE_MEMORY=1%",), {}), held).clamped == ""


def test_rest_without_room_for_a_context_is_refused() -> None:
    """A container that could not even create a context is not started."""
    held: list[Lease] = []
    granted((("GPUSHARE_MEMORY=15700Mi",), {}), held)
    with pytest.raises(CapacityError, match="300 MiB free"):
        granted(AMOUNTS["hami"](512), held)
    small = SIZED._replace(context_bytes=300 * MIB)
    host = HOST._replace(inventory=HOST.inventory._replace(devices=(small,)))
    assert granted(AMOUNTS["hami"](512), held, host).memory_limit_bytes == 300 * MIB


def test_device_without_reserved_memory_clamps_nothing() -> None:
    """Older drivers do not report it."""
    host = HOST._replace(inventory=HOST.inventory._replace(devices=(SIZED._replace(reserved_bytes=0),)))
    with pytest.raises(CapacityError):
        granted(AMOUNTS["hami"](TOTAL), [], host)


def test_last_container_under_overcommit_fits() -> None:
    """A scheduler that divides twice NVML's total is over by twice the reserved memory."""
    host = HOST._replace(config=HOST.config._replace(memory_overcommit=2.0))
    held: list[Lease] = []
    sizes = [granted(AMOUNTS["hami"](TOTAL // 4), held, host).memory_limit_bytes for _ in range(8)]
    assert sizes == [4096 * MIB] * 7 + [(4096 - 2 * RESERVED) * MIB]


def test_last_oversubscribed_container_fits() -> None:
    """Its memory covers device and host. Only the device part is reduced to what is free."""
    host = Node(HOST.config._replace(host_memory="64Gi"), HOST.inventory._replace(host_memory_bytes=64 << 30))
    held: list[Lease] = []
    words = ((ON_0, f"CUDA_DEVICE_MEMORY_LIMIT_0={TOTAL // 2}m", "CUDA_OVERSUBSCRIBE=true"), {})
    shares = [granted(words, held, host) for _ in range(4)]
    sizes = [(share.memory_limit_bytes, share.virtual_bytes) for share in shares]
    rest = 4096 - RESERVED
    assert sizes == [(4096 * MIB, 8192 * MIB)] * 3 + [(rest * MIB, 2 * rest * MIB)]


@pytest.mark.parametrize("total", [15356, 16380, 14999])
def test_last_container_fits_whatever_is_rounded(total: int) -> None:
    """Quarters and capacity need not be whole blocks of 2 MiB."""
    sized = SIZED._replace(memory_bytes=(total - RESERVED) * MIB + 1)
    host = HOST._replace(inventory=HOST.inventory._replace(devices=(sized,)))
    held: list[Lease] = []
    sizes = [granted(AMOUNTS["hami"](total // 4), held, host).memory_limit_bytes or 0 for _ in range(4)]
    assert sizes[:3] == [total // 4 * MIB] * 3
    assert sizes[3] == (total - RESERVED) // 2 * 2 * MIB - sum(sizes[:3])


def test_any_takes_the_device_where_the_last_container_fits() -> None:
    devices = tuple(device(i, memory_bytes=CAPACITY * MIB, reserved_bytes=RESERVED * MIB) for i in range(2))
    host = HOST._replace(inventory=HOST.inventory._replace(devices=devices))
    held: list[Lease] = []
    shares = [granted((("CUDA_DEVICE_MEMORY_LIMIT=8192m",), {}), held, host) for _ in range(4)]
    assert sorted(share.device.index for share in shares) == [0, 0, 1, 1]


def test_amount_of_total_and_part_of_capacity_agree() -> None:
    """KAI writes the portion, and the amount for HAMi-core. The reserved memory is no contradiction."""
    small = SIZED._replace(memory_bytes=(TOTAL // 2 - RESERVED) * MIB)  # there it is 5 % of the device
    host = HOST._replace(inventory=HOST.inventory._replace(devices=(small,)))
    words = ((ON_0, "GPU_PORTION=0.5", f"CUDA_DEVICE_MEMORY_LIMIT={TOTAL // 4}m"), {})
    assert granted(words, [], host).memory_limit_bytes == (TOTAL // 2 - RESERVED) // 2 * MIB


def test_containers_from_before_the_upgrade_keep_their_shares() -> None:
    """A lease of NVML's whole total stays, is read as before, and leaves nothing for others."""
    before = device(0, memory_bytes=TOTAL * MIB)
    held = [Lease("old", "held", "boot", "/b", (Share(0, before, TOTAL * MIB),), 1, 1)]
    assert leasefile.from_json(leasefile.to_json(held[0]), "old") == held[0]
    for words in (AMOUNTS["hami"](256), (("GPUSHARE_MEMORY=1%",), {})):
        with pytest.raises(CapacityError, match="0 B free of 15.6"):
            granted(words, held)


def test_lease_file_can_be_read_by_the_version_before() -> None:
    """An exporter or device plugin that still runs refuses a lease with fields that it does not know."""
    one = Lease("c1", "held", "boot", "/b", (Share(0, SIZED._replace(profile="1g.10gb"), MIB),), 1, 1)
    fields = json.loads(leasefile.to_json(one))["shares"][0]["device"]
    assert not {"reserved_bytes", "profile"} & fields.keys()
    assert leasefile.from_json(leasefile.to_json(one), "c1").shares[0].device == SIZED._replace(reserved_bytes=0)


def test_names_of_sizes_are_those_of_nvml() -> None:
    """A condition on the device's memory, and the label of GPU feature discovery, count the reserved memory too."""
    (condition,) = conditions.parse("N", "any,memory>=16Gi", ["memory>=16Gi"])
    conditions.require((condition,), SIZED)
    assert labels.device_labels(HOST)["gpu.memory"] == str(TOTAL)
    assert labels.grantable_mib(HOST) == CAPACITY
