"""The resources that kubelet is offered, and the devices that a container gets for kubelet's choice."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, Optional

import pytest
from gpushare.allocation import placement
from gpushare.core import constants
from gpushare.core.errors import DeviceError, GpushareError, PolicyError, RequestError
from gpushare.core.model import Node, SharingRule
from gpushare.integrations.kubelet import checkpoint, offers
from gpushare.integrations.kubelet.offers import COMPUTE, DEVICES, GPU, MEMORY, Offered
from gpushare.integrations.kubelet.pairing import Pairing
from gpushare.request import request

from tests.unit import pure

FIRST, SECOND = pure.UUIDS
BOTH = frozenset(pure.UUIDS)
A, B = "aaaaaaaa", "bbbbbbbb"


def shared(node: Node, *rules: SharingRule, **changes: Any) -> Node:
    return node._replace(config=node.config._replace(sharing=rules, **changes))


def summary(node: Node, unit_mib: int = 1, whole: tuple[str, ...] = ()) -> dict[str, list[tuple[str, int, int]]]:
    found = offers.offered(node, unit_mib, whole)
    assert [(one.key, one.count) for one in found[COMPUTE]] == [(one.key, 100) for one in found[MEMORY]]
    assert found[DEVICES] == found[COMPUTE]
    found = {kind: found[kind] for kind in (MEMORY, GPU)}
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


@pytest.mark.parametrize(
    ("resource", "name"), [("", ""), (".shared", "gpushare.io/gpu.shared"), ("site.io/part", "site.io/part")]
)
def test_equal_shares_can_have_a_name_of_their_own(resource: str, name: str) -> None:
    """Not whole devices."""
    node = shared(pure.node(), SharingRule(10, resource=resource))
    assert offers.name_of_shares(node, offers.resources(1, {})) == name
    found = offers.offered(node, 1, ("1",))
    shares = [(one.key, one.count) for one in found[offers.SHARED if resource else GPU] if not one.mib]
    assert shares == [(A, 10)] and [one.key for one in found[GPU] if one.mib] == [B]
    assert offers.allocate(offers.SHARED, found[offers.SHARED], BOTH, [f"{A}-3"]) if resource else True


def test_init_container_s_units_bind_the_next_container_to_its_device() -> None:
    """shared/cases/engines/07: kubelet gives the second container all units of the first. The message names the
    remedy."""
    some = offers.offered(pure.node(), 1024)[MEMORY]
    free = [*(f"{A}-{number}" for number in range(4, 16)), *(f"{B}-{number}" for number in range(16))]
    must = [f"{A}-{number}" for number in range(4, 6)]
    assert offers.preferred(MEMORY, some, "binpack", free, must, 14) == []
    chosen = [*free[:12], f"{B}-0", f"{B}-1"]
    with pytest.raises(RequestError, match="An init container must request as much as the container after it"):
        offers.allocate(MEMORY, some, BOTH, chosen)


def test_more_than_one_share_can_be_refused() -> None:
    node = shared(pure.node(), SharingRule(10, alone=True))
    some = offers.offered(node, 1)[GPU]
    assert offers.allocate(GPU, some, BOTH, [f"{A}-0"]) == {constants.ENV_ALLOCATED_GPU: FIRST}
    with pytest.raises(RequestError, match="2 shares are requested, and .*failRequestsGreaterThanOne allows 1"):
        offers.allocate(GPU, some, BOTH, [f"{A}-0", f"{B}-0"])
    whole = offers.offered(node, 1, ("0", "1"))[GPU]
    assert offers.allocate(GPU, whole, BOTH, [f"{A}-0", f"{B}-0"])


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
    wanted = {MEMORY: f"gpushare.io/{name}", COMPUTE: "gpushare.io/compute", GPU: "gpushare.io/gpu"}
    assert offers.resources(unit_mib, {}) == wanted
    assert offers.resources(unit_mib, {MEMORY: "a.b/c", DEVICES: "a.b/d"}) == {
        **wanted,
        MEMORY: "a.b/c",
        DEVICES: "a.b/d",
    }


@pytest.mark.parametrize(("count", "text"), [(4096, ""), (32768, "warning: 32768 units of x/y can stop kubelet 1.36")])
def test_many_units_are_named(count: int, text: str) -> None:
    assert offers.warning("x/y", count).startswith(text) and bool(text) == bool(offers.warning("x/y", count))


def numa(node: Node, nodes: dict[str, int]) -> set[tuple[tuple[str, int], ...]]:
    """The NUMA node of each device, as each of memory, compute and devices has it."""
    found = offers.with_numa(offers.offered(node, 1), nodes)
    return {tuple((one.key, one.numa) for one in found[kind]) for kind in (MEMORY, COMPUTE, DEVICES)}


@pytest.mark.parametrize(
    ("nodes", "hints"),
    [
        ((0, 1), (0, 1)),
        ((1, 0), (1, 0)),
        ((1, 1), (-1, -1)),  # a host with one node for all devices needs no hint
        ((0, -1), (-1, -1)),  # the kernel does not know one of them
        ((-1, -1), (-1, -1)),
        ((0, None), (-1, -1)),
    ],
)
def test_numa_node_is_a_hint_if_devices_are_on_several(
    nodes: tuple[Optional[int], ...], hints: tuple[int, ...]
) -> None:
    node = pure.node()
    known = {one.bus_id: number for one, number in zip(node.inventory.devices, nodes) if number is not None}
    assert numa(node, known) == {tuple(zip((A, B), hints))}


def test_device_without_numa_node_has_no_hint_beside_others() -> None:
    node, third = pure.node(), pure.device(1, uuid="GPU-cccccccc-2", bus_id="0000:03:00.0")._replace(index=2)
    devices = (*node.inventory.devices, third)
    node = node._replace(inventory=node.inventory._replace(devices=devices))
    known = {one.bus_id: number for one, number in zip(devices, (0, 1))}
    assert numa(node, known) == {((A, 0), (B, 1), ("cccccccc", -1))}


@pytest.mark.parametrize("whole", [(), ("2",), ("GPU-cccccccc",), (SECOND.lower()[:-1] + "9",)])
def test_whole_that_names_no_device_leaves_all_divided(whole: tuple[str, ...]) -> None:
    assert summary(pure.node(), whole=whole) == {MEMORY: [(A, 16384, 1), (B, 16384, 1)], GPU: []}


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
        # units of a list that kubelet had before the configuration changed are not chosen
        (MEMORY, "binpack", ids_of((A, 16383, 16390), (B, 0, 1)), [], 1, [f"{A}-16383"]),
        (MEMORY, "binpack", [f"{A}-x", "", "-", "GPU-cccccccc-0", f"{B}-0"], [], 1, [f"{B}-0"]),
        (DEVICES, "binpack", [f"{A}-100", f"{A}--1", f"{A}-99"], [], 1, [f"{A}-99"]),
        (GPU, "binpack", [f"{A}-4", f"{B}-1"], [], 2, []),
        # more than there is, in no time and little memory
        (MEMORY, "binpack", ids_of((A, 0, 3)), [], 2**31 - 1, []),
        (COMPUTE, "binpack", ids_of((A, 0, 3)), [], 2**31 - 1, []),
        (DEVICES, "binpack", ids_of((A, 0, 3)), [], 2**31 - 1, []),
    ],
)
def test_preferred_ids_follow_placement(
    kind: str, placement: str, available: Any, must: Any, size: int, wanted: list[str]
) -> None:
    found = offers.preferred(kind, of(kind), placement, available, must, size)
    assert found == wanted
    if found:
        assert offers.allocate(kind, of(kind), BOTH, found)


@pytest.mark.parametrize(
    ("reused", "why"),
    [
        (
            ("0", "1"),
            r"in no single device with the 2 that kubelet reuses from an init container \(kubelet chose 3 of .*",
        ),
        (("9",), r"in no single device \(kubelet chose 3 of GPU 0, 2 of GPU 1\); request less"),
    ],
)
def test_refusal_names_the_units_of_an_init_container(reused: tuple[str, ...], why: str) -> None:
    """`reused`: ids that kubelet had to include. Those of an earlier container do not count."""
    with pytest.raises(RequestError, match=f"5 units are free {why}") as caught:
        offers.allocate(
            MEMORY, of(MEMORY), BOTH, ids_of((A, 0, 3), (B, 0, 2)), (), [f"{A}-{number}" for number in reused]
        )
    assert ("request 5 units for the init container too" in str(caught.value)) == (len(reused) == 2)


@pytest.mark.parametrize("kind", [COMPUTE, DEVICES, MEMORY])
def test_unit_that_is_named_twice_counts_once(kind: str) -> None:
    """Or is refused, but never gives more than what was allocated."""
    try:
        found = offers.allocate(kind, of(kind), BOTH, [f"{A}-0", f"{A}-00", f"{A}-0"])
    except RequestError:
        return
    assert found == {offers.VARIABLES[kind]: "1"}


@pytest.mark.parametrize(
    ("kind", "available", "size", "beside", "short", "wanted"),
    [
        (MEMORY, ids_of((A, 0, 16384), (B, 0, 16384)), 20000, (), (), {A: 10000, B: 10000}),
        (MEMORY, ids_of((A, 0, 16384), (B, 0, 9999)), 20000, (), (), {}),
        (MEMORY, ids_of((A, 0, 9), (B, 0, 99)), 9, (B,), (), {B: 9}),
        (MEMORY, ids_of((A, 0, 99), (B, 0, 99)), 9, (), (A,), {B: 9}),
        (MEMORY, ids_of((A, 0, 99), (B, 0, 8)), 9, (B,), (), {A: 9}),  # allocate refuses it
        (COMPUTE, ids_of((A, 0, 99), (B, 0, 99)), 61, (A, B), (), {A: 31, B: 30}),
        (COMPUTE, ids_of((A, 0, 100), (B, 0, 100)), 200, (), (), {A: 100, B: 100}),
        (COMPUTE, ids_of((A, 0, 40), (B, 0, 99)), 60, (), (), {B: 60}),
        (DEVICES, ids_of((A, 0, 9), (B, 0, 9)), 1, (), (), {A: 1}),
    ],
)
def test_units_are_of_as_few_devices_as_have_them(
    kind: str, available: Any, size: int, beside: Any, short: Any, wanted: dict[str, int]
) -> None:
    found = offers.preferred(kind, of(kind), "binpack", available, [], size, beside, short)
    assert {key: sum(unit.startswith(key) for unit in found) for key in (A, B)} == {A: 0, B: 0, **wanted}
    if found and (not beside or set(beside) == set(wanted)):
        value = offers.allocate(kind, of(kind), BOTH, found, beside)[offers.VARIABLES[kind]]
        assert value == (
            ",".join(f"{one}={size // len(wanted)}Mi" for one in _uuids(wanted)) if kind == MEMORY else str(size)
        )
    elif found:
        with pytest.raises(RequestError, match="9 units of memory are not free on GPU 1, where the container's comp"):
            offers.allocate(kind, of(kind), BOTH, found, beside)


@pytest.mark.parametrize(
    ("kind", "rules", "size", "sizes"),
    [
        (MEMORY, {"max_memory": "50%"}, 8192, [8192]),
        (MEMORY, {"max_memory": "50%"}, 16384, [8192, 8192]),
        (MEMORY, {"max_memory": "50%"}, 16386, []),
        (COMPUTE, {"max_compute_percent": 40}, 60, [30, 30]),
        (COMPUTE, {"max_compute_percent": 40}, 81, []),
    ],
)
def test_no_device_gives_more_than_policy_allows(kind: str, rules: Any, size: int, sizes: list[int]) -> None:
    """Otherwise the container never starts: kubelet admits it, and the hook always refuses it. The pod fails instead,
    with the reason."""
    some = offers.offered(pure.node(**rules), 1)[kind]
    units = [unit for one in some for unit in one.ids()]
    found = offers.preferred(kind, some, "binpack", units, [], size)
    parts = [sum(unit.startswith(key) for unit in found) for key in (A, B)]
    assert [part for part in parts if part] == sizes
    if not sizes:
        match = rf"a container can have \d+ units of each of 2 devices, and {size} are requested; .*raise policy.max_"
        with pytest.raises(RequestError, match=match):
            offers.allocate(kind, some, BOTH, units[:size])


def _uuids(wanted: dict[str, int]) -> list[str]:
    return [uuid for uuid in pure.UUIDS if uuid[4:12] in wanted]


class Admission:
    """kubelet's calls for containers, in a given order, and what is free."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pairing = Pairing(lambda: self.now)
        self.free = {kind: {unit for one in of(kind) for unit in one.ids()} for kind in (MEMORY, COMPUTE)}

    def container(self, *order: tuple[str, int]) -> dict[str, set[str]]:
        """Return {kind: keys of its devices}. Take back all if one is refused, like kubelet."""
        taken: dict[str, list[str]] = {}
        try:
            for kind, size in order:
                free = sorted(self.free[kind])
                pair = self.pairing.asked(kind, free, size)
                chosen = offers.preferred(kind, of(kind), "binpack", free, [], size, *pair)
                chosen += [unit for unit in free if unit not in chosen][: size - len(chosen)]
                offers.allocate(kind, of(kind), BOTH, chosen, self.pairing.beside(kind))
                taken[kind] = chosen
                self.pairing.chosen(kind, {unit.rpartition("-")[0] for unit in chosen}, chosen)
        except RequestError:
            self.pairing.refused()
            raise
        for kind, chosen in taken.items():
            self.free[kind] -= set(chosen)
        return {kind: {unit.rpartition("-")[0] for unit in chosen} for kind, chosen in taken.items()}


ORDERS = ([MEMORY, COMPUTE], [COMPUTE, MEMORY])


@pytest.mark.parametrize("orders", list(itertools.product(ORDERS, repeat=3)))
def test_compute_follows_memory_in_either_order(orders: Any) -> None:
    """Two containers of 60 % get a device each, and a third one is refused, since 40 % are left of each."""
    kubelet, size = Admission(), {MEMORY: 4096, COMPUTE: 60}
    first, second = (kubelet.container(*((kind, size[kind]) for kind in order)) for order in orders[:2])
    assert first == {MEMORY: {A}, COMPUTE: {A}} and second == {MEMORY: {B}, COMPUTE: {B}}
    with pytest.raises(RequestError, match="60 units"):
        kubelet.container(*((kind, size[kind]) for kind in orders[2]))
    small = kubelet.container(*((kind, {MEMORY: 1024, COMPUTE: 40}[kind]) for kind in orders[2]))
    assert small[MEMORY] == small[COMPUTE]


@pytest.mark.parametrize("order", ORDERS)
def test_refused_pair_is_placed_elsewhere_next_time(order: Any) -> None:
    """The first device has memory and no compute. Whether kubelet asks for memory first, then the pod fails once."""
    kubelet, size = Admission(), {MEMORY: 4096, COMPUTE: 60}
    kubelet.free[COMPUTE] = {unit for unit in kubelet.free[COMPUTE] if unit.startswith(B)}
    wanted = {MEMORY: {B}, COMPUTE: {B}}
    if order[0] == MEMORY:
        with pytest.raises(
            RequestError, match="60 units of compute are not free on GPU 0, where the container's memory is"
        ):
            kubelet.container(*((kind, size[kind]) for kind in order))
    assert kubelet.container(*((kind, size[kind]) for kind in order)) == wanted


def record(*entries: tuple[str, str, str, Any]) -> str:
    """kubelet_internal_checkpoint as kubelet 1.36 writes it."""
    fields = ("PodUID", "ContainerName", "ResourceName")
    found = [{**dict(zip(fields, one)), "DeviceIDs": {"-1": list(one[3])}, "AllocResp": ""} for one in entries]
    return json.dumps({"Data": {"PodDeviceEntries": found, "RegisteredDevices": {}}, "Checksum": 1})


def test_containers_with_one_resource_each_are_no_pair(tmp_path: Path) -> None:
    """kubelet writes its record between two containers, and not between two resources of one."""
    file = tmp_path / checkpoint.FILE
    pairing = Pairing(lambda: 0.0, checkpoint.Checkpoint(str(tmp_path), offers.resources(1, {})).holders)
    memory, init = [f"{A}-0"], ("p0", "init", "gpushare.io/memory-mib", [f"{A}-0"])
    file.write_text(record(init))  # an init container had the same units
    pairing.chosen(MEMORY, {A}, memory)
    assert pairing.beside(COMPUTE) == {A}
    file.write_text(record(init, ("p1", "main", "gpushare.io/compute", memory)))  # of another resource
    assert pairing.beside(COMPUTE) == {A}
    file.write_text(record(init, ("p1", "main", "gpushare.io/memory-mib", memory)))
    assert pairing.beside(COMPUTE) == frozenset()


@pytest.mark.parametrize("text", ["", "[]", '{"Data": {"PodDeviceEntries": [{"ResourceName": 1}]}}', "{"])
def test_unknown_record_of_kubelet_counts_as_empty(tmp_path: Path, text: str) -> None:
    (tmp_path / checkpoint.FILE).write_text(text)
    assert checkpoint.Checkpoint(str(tmp_path), {MEMORY: "a"}).holders(MEMORY, "x") == frozenset()


def test_old_choice_has_no_partner() -> None:
    kubelet = Admission()
    assert kubelet.container((MEMORY, 10)) == {MEMORY: {A}}
    assert kubelet.pairing.beside(COMPUTE) == {A} and kubelet.pairing.beside(MEMORY) == set()
    kubelet.now += 3
    assert kubelet.pairing.beside(COMPUTE) == set()


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


TWO = f"{constants.ENV_ALLOCATED_MEMORY}={FIRST}=4097Mi,{SECOND}=4096Mi"
PERCENT, COUNT = constants.ENV_ALLOCATED_COMPUTE, constants.ENV_ALLOCATED_DEVICES


@pytest.mark.parametrize(
    ("env", "compute"),
    [
        ((GIVEN, f"{PERCENT}=30"), ((None, 30),)),
        ((GIVEN, f"{PERCENT}=30", f"{COUNT}=1", "GPUSHARE_COMPUTE=30%"), ((None, 30),)),
        ((GIVEN, "GPUSHARE_COMPUTE=30"), ((None, 30),)),
        ((GIVEN, f"{PERCENT}=100"), ((None, 100),)),
        ((TWO, f"{PERCENT}=120"), ((None, 60),)),
        ((TWO, f"{PERCENT}=61", f"{COUNT}=2"), ((0, 31), (1, 30))),
        ((GIVEN, f"{COUNT}=1"), ()),
    ],
)
def test_compute_of_kubelet_is_divided_among_devices(env: Any, compute: Any) -> None:
    for order in (env, env[::-1]):
        found = asked(*order)
        assert found.compute == compute
        assert found.selection.names == ((FIRST, SECOND) if TWO in env else (SECOND,))
        sizes = [amount.limit_bytes >> 20 for _, amount in found.memory]
        assert sizes == ([4097, 4096] if TWO in env else [4096])


@pytest.mark.parametrize(
    ("env", "match"),
    [
        ((f"{PERCENT}=30",), "kubelet gave no memory"),
        ((f"{COUNT}=1",), "kubelet gave no memory"),
        ((SHARE, f"{PERCENT}=30"), "sets the compute of an equal share"),
        ((GIVEN, f"{PERCENT}=101"), "not 1 to 100 percent of each of 1 devices"),
        ((TWO, f"{PERCENT}=1"), "not 1 to 100 percent of each of 2 devices"),
        ((GIVEN, f"{PERCENT}=0"), "not 1 to 100"),
        ((GIVEN, f"{PERCENT}=x"), "remove it: only kubelet sets it"),
        ((GIVEN, f"{PERCENT}=30", "GPUSHARE_COMPUTE=40"), 'GPUSHARE_COMPUTE="40", and kubelet gave "30": they contr'),
        ((GIVEN, f"{COUNT}=2"), "kubelet gave memory of 1 devices"),
        ((GIVEN, "GPUSHARE_DEVICES=any:2,model=Test"), "contradict"),
        ((GIVEN, "GPUSHARE_DEVICES=any,colour=red"), "is not a condition"),
    ],
)
def test_contradicting_choices_of_kubelet_are_refused(env: Any, match: str) -> None:
    for order in (env, env[::-1]):
        with pytest.raises(RequestError, match=match):
            asked(*order)


def test_pod_may_add_conditions_on_the_device() -> None:
    """Kubelet's device must meet them, as each device of `any` must."""
    found = asked(GIVEN, "GPUSHARE_DEVICES=any,model=A100")
    assert found.selection.names == (SECOND,)
    assert [one.text for one in found.selection.conditions] == ["model=A100"]
    with pytest.raises(DeviceError, match="model=A100 requested"):
        placement.grant(found, pure.node(), pure.ledger())
    met = asked(GIVEN, "GPUSHARE_DEVICES=any,model=Test")
    assert [one.device.uuid for one in placement.grant(met, pure.node(), pure.ledger())] == [SECOND]


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
        ((f"{constants.ENV_ALLOCATED_GPU}={FIRST}",), None, "one of these"),
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
    "value",
    ["", "=", "=4Gi", f"{FIRST}=", f"{FIRST}=x", f"{FIRST}=1Gi,{SECOND}", f"{FIRST}=1Gi,{FIRST}=1Gi", f"{FIRST},,"],
)
def test_invalid_plugin_value_is_refused(value: str) -> None:
    with pytest.raises(RequestError):
        asked(f"{constants.ENV_ALLOCATED_MEMORY}={value}")


def test_allocation_obeys_policy() -> None:
    with pytest.raises(PolicyError, match=r"policy\.accept\.env"):
        asked(GIVEN, accept_env="never")
    with pytest.raises(RequestError, match="unknown name"):
        asked(GIVEN, "GPUSHARE_ALLOCATED_CORES=1")
