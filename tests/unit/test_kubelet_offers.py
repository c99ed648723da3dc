"""The resources that kubelet is offered, and the devices that a container gets for kubelet's choice."""

from __future__ import annotations

from typing import Any

import pytest
from gpushare.core import constants
from gpushare.core.errors import DeviceError, GpushareError, PolicyError, RequestError
from gpushare.core.model import Node, SharingRule
from gpushare.integrations.kubelet import offers
from gpushare.integrations.kubelet.offers import GPU, MEMORY, Offered
from gpushare.request import request

from tests.unit import pure

FIRST, SECOND = pure.UUIDS
BOTH = frozenset(pure.UUIDS)
A, B = "aaaaaaaa", "bbbbbbbb"


def shared(node: Node, *rules: SharingRule, **changes: Any) -> Node:
    return node._replace(config=node.config._replace(sharing=rules, **changes))


def summary(node: Node, unit_mib: int = 1, whole: tuple[str, ...] = ()) -> dict[str, list[tuple[str, int, int]]]:
    found = offers.offered(node, unit_mib, whole)
    return {kind: [(one.key, one.count, one.mib) for one in some] for kind, some in found.items()}


@pytest.mark.parametrize(
    ("node", "words", "memory", "gpu"),
    [
        (pure.node(), {}, [(A, 16384, 1), (B, 16384, 1)], []),
        (pure.node(), {"unit_mib": 1024}, [(A, 16, 1024), (B, 16, 1024)], []),
        (pure.node(), {"unit_mib": 6000}, [(A, 2, 6000), (B, 2, 6000)], []),  # the rest of a device fills no unit
        (pure.node(overcommit=1.5), {}, [(A, 24576, 1), (B, 24576, 1)], []),
        (pure.node(allowed_devices=("1",)), {}, [(B, 16384, 1)], []),
        (pure.node(memory_bytes=0), {"whole": ("0",)}, [], []),
        (pure.node(), {"whole": ("1",)}, [(A, 16384, 1)], [(B, 1, 16384)]),
        (pure.node(overcommit=1.5), {"whole": (FIRST, "1")}, [], [(A, 1, 16384), (B, 1, 16384)]),
        (shared(pure.node(), SharingRule(10)), {}, [], [(A, 10, 0), (B, 10, 0)]),
        (shared(pure.node(), SharingRule(10, devices=("0",))), {}, [(B, 16384, 1)], [(A, 10, 0)]),
        (shared(pure.node(), SharingRule(10)), {"whole": ("1",)}, [], [(A, 10, 0), (B, 1, 16384)]),
    ],
)
def test_every_device_is_in_one_resource_only(node: Node, words: Any, memory: Any, gpu: Any) -> None:
    assert summary(node, **words) == {MEMORY: memory, GPU: gpu}


def test_device_ids_are_stable_and_short() -> None:
    """An id does not depend on other devices. Two similar UUIDs give two whole ids, within kubelet's 63 characters."""
    node = pure.node()
    alone = node._replace(inventory=node.inventory._replace(devices=(pure.device(1),)))
    assert summary(alone)[MEMORY] == summary(node)[MEMORY][1:]
    twins = (pure.device(0, uuid=f"GPU-aaaaaaaa-{0:027}"), pure.device(1, uuid=f"GPU-aaaaaaaa-{1:027}"))
    found = offers.offered(node._replace(inventory=node.inventory._replace(devices=twins)), 1)[MEMORY]
    ids = [unit for one in found for unit in one.ids()]
    assert len(set(ids)) == 2 * 16384 and max(map(len, ids)) <= 63
    for one in found:
        env = offers.allocate(MEMORY, found, {device.uuid for device in twins}, list(one.ids())[:7])
        assert env == {constants.ENV_ALLOCATED_MEMORY: f"{one.device.uuid}=7Mi"}


@pytest.mark.parametrize(
    ("unit_mib", "name"),
    [(1, "memory-mib"), (64, "memory-64mib"), (1024, "memory-gib"), (4096, "memory-4gib"), (1536, "memory-1536mib")],
)
def test_resource_name_contains_unit(unit_mib: int, name: str) -> None:
    assert offers.resource(MEMORY, unit_mib) == f"gpushare.io/{name}"
    assert offers.resource(GPU, unit_mib) == "gpushare.io/gpu"


def of(kind: str, **words: Any) -> tuple[Offered, ...]:
    node = shared(pure.node(), SharingRule(4)) if kind == GPU and "whole" not in words else pure.node()
    return offers.offered(node, words.get("unit_mib", 1), words.get("whole", ()))[kind]


@pytest.mark.parametrize(
    ("kind", "offered", "ids", "value"),
    [
        (MEMORY, of(MEMORY), [f"{B}-{n}" for n in range(16383, 12287, -1)], f"{SECOND}=4096Mi"),
        (MEMORY, of(MEMORY, unit_mib=64), [f"{A}-3", f"{A}-9"], f"{FIRST}=128Mi"),
        (GPU, of(GPU), [f"{B}-3"], SECOND),
        (GPU, of(GPU), [f"{B}-3", f"{A}-0"], f"{FIRST},{SECOND}"),
        (GPU, of(GPU, whole=("0", "1")), [f"{B}-0", f"{A}-0"], f"{FIRST}=16384Mi,{SECOND}=16384Mi"),
    ],
)
def test_container_gets_devices_chosen_by_kubelet(kind: str, offered: Any, ids: list[str], value: str) -> None:
    """From kubelet's choice to the request of the container that starts with it."""
    env = offers.allocate(kind, offered, BOTH, ids)
    assert env == {offers.VARIABLES[kind]: value}
    bundle = pure.bundle(*(f"{name}={text}" for name, text in env.items()), "NVIDIA_VISIBLE_DEVICES=all")
    found = request.resolve(bundle, pure.node(annotations="scoped"))
    assert found is not None and found.selection.kind == "list"
    assert ",".join(found.selection.names) == ",".join(item.partition("=")[0] for item in value.split(","))
    sizes = {item.partition("=")[2] for item in value.split(",")} - {""}
    assert {f"{amount.limit_bytes // 2**20}Mi" for _, amount in found.memory if amount.limit_bytes} == sizes


@pytest.mark.parametrize(
    ("kind", "healthy", "ids", "match"),
    [
        (MEMORY, BOTH, [], "no device"),
        (MEMORY, BOTH, [f"{A}-0", f"{B}-0"], r"free in no single device \(kubelet chose 1 of GPU 0, 1 of GPU 1\)"),
        (MEMORY, BOTH, [f"{A}-16384"], "is offered"),
        (MEMORY, BOTH, [f"{A}--1"], "is offered"),
        (MEMORY, BOTH, [f"{A}-1\u0661"], "is offered"),
        (MEMORY, BOTH, ["GPU-cccccccc-0"], "is offered"),
        (MEMORY, BOTH, ["x" * 10_000], r'"x{64}\.\.\." \(10000 characters\) is offered'),
        (MEMORY, {FIRST}, [f"{B}-0"], "is gone"),
        (GPU, BOTH, [f"{A}-0", f"{A}-1"], "2 GPUs are requested, and kubelet chose from 1"),
        (GPU, {FIRST}, [f"{A}-0", f"{B}-1"], r"device 1 \(GPU-bbbb.*is gone"),
    ],
)
def test_impossible_allocation_is_refused(kind: str, healthy: Any, ids: list[str], match: str) -> None:
    with pytest.raises((RequestError, DeviceError), match=match) as caught:
        offers.allocate(kind, of(kind), healthy, ids)
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def ids_of(*ranges: tuple[str, int, int]) -> list[str]:
    return [f"{key}-{number}" for key, first, end in ranges for number in range(first, end)]


@pytest.mark.parametrize(
    ("kind", "placement", "available", "must", "size", "wanted"),
    [
        # memory: from one device, the fuller or the emptier one
        (MEMORY, "binpack", ids_of((A, 0, 16384), (B, 0, 9000)), [], 2, [f"{B}-0", f"{B}-1"]),
        (MEMORY, "spread", ids_of((A, 0, 16384), (B, 0, 9000)), [], 2, [f"{A}-0", f"{A}-1"]),
        (MEMORY, "binpack", ids_of((B, 0, 9), (A, 0, 9)), [], 1, [f"{A}-0"]),
        (MEMORY, "binpack", ids_of((A, 0, 10), (B, 7, 9)), [], 3, [f"{A}-0", f"{A}-1", f"{A}-2"]),
        (MEMORY, "binpack", ids_of((A, 9, 11), (B, 0, 1)), [], 2, [f"{A}-9", f"{A}-10"]),
        (MEMORY, "binpack", ids_of((A, 0, 10), (B, 0, 3)), [f"{A}-5"], 2, [f"{A}-5", f"{A}-0"]),
        (MEMORY, "binpack", ids_of((A, 0, 3), (B, 0, 3)), [], 4, []),
        (MEMORY, "binpack", ids_of((A, 0, 1), (B, 0, 9)), [f"{A}-5"], 4, []),
        (MEMORY, "binpack", ids_of((A, 0, 1)), [], -1, []),
        # GPUs: each share from another device
        (GPU, "binpack", ids_of((A, 0, 4), (B, 2, 4)), [], 1, [f"{B}-2"]),
        (GPU, "spread", ids_of((A, 0, 4), (B, 2, 4)), [], 1, [f"{A}-0"]),
        (GPU, "binpack", ids_of((A, 0, 4), (B, 2, 4)), [], 2, [f"{B}-2", f"{A}-0"]),
        (GPU, "binpack", ids_of((A, 0, 4), (B, 2, 4)), [f"{B}-3"], 2, [f"{B}-3", f"{A}-0"]),
        (GPU, "binpack", ids_of((A, 0, 4)), [], 2, []),
    ],
)
def test_preferred_ids_follow_placement(
    kind: str, placement: str, available: Any, must: Any, size: int, wanted: list[str]
) -> None:
    found = offers.preferred(kind, of(kind), placement, available, must, size)
    assert found == wanted
    if found:
        assert offers.allocate(kind, of(kind), BOTH, found)


# Further requests of the container

GIVEN = f"{constants.ENV_ALLOCATED_MEMORY}={SECOND}=4096Mi"
SHARE = f"{constants.ENV_ALLOCATED_GPU}={FIRST}"


def asked(*env: str, annotations: Any = None, **policy: Any) -> Any:
    return request.resolve(pure.bundle(*env, annotations=annotations), pure.node(**policy))


@pytest.mark.parametrize(
    ("env", "annotations"),
    [
        (("GPUSHARE_MEMORY=4Gi",), None),
        (("GPUSHARE_DEVICES=any", "GPUSHARE_MEMORY=4096MiB"), None),
        ((f"GPUSHARE_DEVICES={SECOND}", GIVEN), None),
        (("NVIDIA_VISIBLE_DEVICES=0",), None),
        ((), {"gpushare.io/memory": "4Gi"}),
    ],
)
def test_same_request_in_pod_is_accepted(env: tuple[str, ...], annotations: Any) -> None:
    for order in ((GIVEN, *env), (*env, GIVEN)):
        assert asked(*order, annotations=annotations) == asked(GIVEN)


def test_pod_may_add_compute_limit() -> None:
    found = asked(GIVEN, "GPUSHARE_COMPUTE=30")
    assert (found.selection.names, found.compute) == ((SECOND,), ((None, 30),))


@pytest.mark.parametrize(
    ("env", "annotations", "match"),
    [
        (("GPUSHARE_MEMORY=8Gi",), None, 'GPUSHARE_MEMORY="8Gi", and kubelet gave "4096Mi"'),
        (("GPUSHARE_MEMORY=25%",), None, "contradict"),
        (("GPUSHARE_MEMORY=0=4Gi",), None, "contradict"),
        (("GPUSHARE_DEVICES=all",), None, "contradict"),
        (("GPUSHARE_DEVICES=0",), None, "contradict"),
        (("GPUSHARE_DEVICES=void",), None, "contradict"),
        (("GPUSHARE_DEVICES=any:2",), None, "contradict"),
        ((f"GPUSHARE_CDI_A={FIRST}",), None, "GPUSHARE_CDI_A=.* contradict"),
        ((), {"gpushare.io/memory": "8Gi"}, "gpushare.io/memory=.* contradict"),
        ((GIVEN + "0",), None, "given twice"),
        ((f"{constants.ENV_ALLOCATED_GPU}={FIRST}",), None, "one of these resources"),
    ],
)
def test_contradicting_request_in_pod_is_refused(env: tuple[str, ...], annotations: Any, match: str) -> None:
    for order in ((GIVEN, *env), (*env, GIVEN)):
        with pytest.raises(GpushareError, match=match):
            asked(*order, annotations=annotations)


@pytest.mark.parametrize("memory", ["GPUSHARE_MEMORY=16Gi", "GPUSHARE_MEMORY=100%", "gpushare.io/memory"])
def test_equal_share_with_other_amount_is_refused(memory: str) -> None:
    """Applies to every source, including the image's ENV: kubelet has promised the other shares of that device."""
    annotations = {} if "=" in memory else {memory: "16Gi"}
    with pytest.raises(RequestError, match="kubelet gave an equal share of a device, whose size is fixed; leave out"):
        asked(SHARE, *([] if annotations else [memory]), annotations=annotations)


@pytest.mark.parametrize(
    "words",
    [
        ("CUDA_DEVICE_MEMORY_LIMIT=16g", "CUDA_OVERSUBSCRIBE=true"),
        ("CUDA_MEM_LIMIT_0=16g", "CUDA_MEM_RATIO=2"),
        ("VOLCANO_GPU_ALLOCATED=16000", "VOLCANO_GPU_MEMORY_TOTAL=16384"),
    ],
)
def test_other_schedulers_amount_is_ignored_beside_equal_share(words: tuple[str, ...]) -> None:
    found = asked(SHARE, *words)
    assert (found.selection.names, found.memory, found.scalings) == ((FIRST,), (), ())
    assert any(words[0].partition("=")[0] in line and constants.ENV_ALLOCATED_GPU in line for line in found.ignored)


@pytest.mark.parametrize(
    "value", ["", "=", "=4Gi", f"{FIRST}=", f"{FIRST}=x", f"{FIRST}=1Gi,{SECOND}=2Gi", f"{FIRST},,"]
)
def test_invalid_plugin_value_is_refused(value: str) -> None:
    with pytest.raises(RequestError):
        asked(f"{constants.ENV_ALLOCATED_MEMORY}={value}")


def test_allocation_obeys_policy() -> None:
    with pytest.raises(PolicyError, match=r"policy\.accept\.env"):
        asked(GIVEN, accept_env="never")
    with pytest.raises(RequestError, match="unknown name"):
        asked(GIVEN, "GPUSHARE_ALLOCATED_CORES=1")
