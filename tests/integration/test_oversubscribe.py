"""Real containers on one simulated 16 GiB GPU with more memory than the GPU has: each within its part of the device,
all within the host's budget."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare.state import shm_abi

from demo.tenant import LAST_BYTES
from tests.support.host import Node
from tests.support.judge import peak_bytes
from tests.support.runc import Container, RuntimeFailed
from tests.support.tenant import Tenant

GIB = 1 << 30
ASKED = {"GPUSHARE_MEMORY": "8Gi", "GPUSHARE_OVERSUBSCRIBE": "true"}
DEVICE, WHOLE = 8 * GIB, 12 * GIB


@pytest.fixture
def two(make_node: Callable[..., Node], simhost: Path, tmp_path: Path, way: str) -> Iterator[tuple[Node, list[Tenant]]]:
    """A node that offers 24 GiB of its memory, and two containers that use all of it."""
    node = make_node(simhost, oversubscription={"host_memory": "24Gi", "scaling": 1.5})
    made = []
    try:
        for name in ("a", "b"):
            made.append(Tenant(tmp_path / "tenants", name, ASKED, node, way=way))
            made[-1].container.start()
        yield node, made
    finally:
        for one in made:
            one.close()


def shares(node: Node) -> list[dict[str, Any]]:
    return [row["shares"][0] for row in json.loads(node.cli("list", "--format", "json").stdout)]


def test_two_containers_hold_more_than_the_device(
    two: tuple[Node, list[Tenant]], simhost: Path, container: Callable[..., Container], way: str
) -> None:
    node, both = two
    for one in both:
        seen = one.expect("seen")
        assert (seen["nvml_total_bytes"], seen["cuda_total_bytes"]) == (WHOLE, WHOLE)
        assert seen["nvml_free_bytes"] == seen["cuda_free_bytes"] <= WHOLE
        one.go()
        full = one.expect("full")
        assert full["refusal"] == "CUDA_ERROR_OUT_OF_MEMORY"
        assert seen["cuda_free_bytes"] - full["got_bytes"] < LAST_BYTES
        assert DEVICE - LAST_BYTES - 2 * GIB < peak_bytes(simhost, one.pid_namespace()) <= DEVICE
    for share in shares(node):
        assert (share["memory_limit_bytes"], share["memory_virtual_bytes"]) == (DEVICE, WHOLE)
        assert share["memory_used_bytes"] <= DEVICE
        assert WHOLE - 2 * LAST_BYTES < share["memory_used_bytes"] + share["memory_host_bytes"] <= WHOLE
    assert "4 GiB of 4 GiB" in node.cli("list").stdout
    assert "4 GiB of 4 GiB" in node.cli("inspect", both[0].container.id).stdout

    third = container(["true"], env={"GPUSHARE_MEMORY": "1Gi", "GPUSHARE_OVERSUBSCRIBE": "1"}, **node.way(way))
    with pytest.raises(RuntimeFailed):  # the two device parts are the whole device
        third.create()
    for one in both:
        one.go()
        one.expect("freed")
        assert one.container.wait() == 0


def test_budget_is_released_and_limits_change_within_it(two: tuple[Node, list[Tenant]], way: str) -> None:
    node, both = two
    for one in both:
        one.expect("seen")
    identity = both[0].container.id
    assert node.cli("limit", "set", identity, "--memory", "4Gi").returncode == 0
    both[1].close()  # the device would be full as well
    refused = node.cli("limit", "set", identity, "--memory", "13Gi")
    assert refused.returncode != 0 and "12 GiB on device and host together" in refused.stderr
    both[0].go()
    assert both[0].expect("full")["got_bytes"] > WHOLE - GIB
    used = next(share for share in shares(node) if share["memory_limit_bytes"] == 4 * GIB)
    assert used["memory_used_bytes"] <= 4 * GIB < used["memory_host_bytes"] + LAST_BYTES


@pytest.mark.parametrize(
    ("scaled", "env"),
    [
        ({"sharing": {"split_count": 4, "memory_scaling": 1.5}}, {"GPUSHARE_DEVICES": "any"}),
        ({}, {"CUDA_DEVICE_MEMORY_LIMIT_0": "6144m", "CUDA_OVERSUBSCRIBE": "true", "NVIDIA_VISIBLE_DEVICES": "0"}),
    ],
    ids=["equal shares", "hami"],
)
def test_request_for_the_total_is_split_into_device_and_host(
    make_node: Callable[..., Node],
    simhost: Path,
    tmp_path: Path,
    way: str,
    scaled: dict[str, Any],
    env: dict[str, str],
) -> None:
    """Four shares with a `memory_scaling` of 1.5, and a limit of HAMi's: a quarter of the device, plus half as much on
    the host."""
    node = make_node(simhost, **scaled, oversubscription={"host_memory": "64Gi", "scaling": 1.5})
    one = Tenant(tmp_path / "tenants", "a", env, node, way=way)
    try:
        one.container.start()
        assert one.expect("seen")["cuda_total_bytes"] == 6 * GIB
        (share,) = shares(node)
        assert (share["memory_limit_bytes"], share["memory_virtual_bytes"]) == (4 * GIB, 6 * GIB)
    finally:
        one.close()


def test_migration_slices_are_in_the_limits_and_their_reserve_is_no_share(
    make_node: Callable[..., Node], simhost: Path, container: Callable[..., Container], way: str
) -> None:
    node = make_node(simhost, oversubscription={"host_memory": "64Gi", "turn_ms": 500, "turn_memory": "25%"})
    one = container(["sleep", "inf"], env=ASKED, **node.way(way))
    one.create()
    data = (node.state / "containers" / one.id / "share" / "limits").read_bytes()
    at = shm_abi.offset("gs_limits", "device") + shm_abi.offset("gs_device_limit", "turn_mib")
    assert struct.unpack_from("<I", data, shm_abi.offset("gs_limits", "turn_us")) == (500_000,)
    assert struct.unpack_from("<I", data, at) == (4096,)
    with pytest.raises(RuntimeFailed, match="6 GiB requested, 4 GiB free of 12 GiB"):
        container(["true"], env={"GPUSHARE_MEMORY": "6Gi"}, **node.way(way)).create()
