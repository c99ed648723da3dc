"""Real containers of 4..12 GiB on one simulated device of 12 GiB. One borrows all of it, the other gets its request."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from gpushare.state import leases, storage

from demo.tenant import LAST_BYTES
from simulator.ledger import Ledger
from tests.support.host import Node
from tests.support.judge import peak_bytes
from tests.support.lending import agent, wait_until_lent
from tests.support.tenant import PROGRAM, Tenant

GIB = 1 << 30
REQUEST, LIMIT = 4 * GIB, 12 * GIB
BOTH = {"GPUSHARE_MEMORY": "4Gi..12Gi"}
BORROW = Path(__file__).parent / "programs" / "borrow.py"
RECLAIM_S = 10  # docs/lending.md


@pytest.fixture
def simhost(make_host: Callable[..., Path]) -> Path:
    return make_host(memory_bytes=LIMIT)


@pytest.fixture
def tenants(tmp_path: Path) -> Iterator[Callable[..., Tenant]]:
    made: list[Tenant] = []

    def make(name: str, node: Node, way: str, env: dict[str, str], program: Path = PROGRAM) -> Tenant:
        made.append(Tenant(tmp_path / "tenants", name, env, node, way=way, program=program))
        made[-1].container.start()
        return made[-1]

    yield make
    for one in made:
        one.close()


def shares(node: Node) -> dict[str, dict[str, Any]]:
    return {row["id"]: row["shares"][0] for row in json.loads(node.cli("list", "--format", "json").stdout)}


def borrow_everything(one: Tenant) -> None:
    seen = one.expect("seen")
    assert (seen["nvml_total_bytes"], seen["cuda_total_bytes"]) == (LIMIT, LIMIT)
    one.go()
    full = one.expect("full")
    assert seen["cuda_free_bytes"] - full["got_bytes"] < LAST_BYTES and full["got_bytes"] > LIMIT - GIB


def test_movable_memory_is_lent_beside_another_request(
    make_node: Callable[..., Node], tenants: Callable[..., Tenant], simhost: Path, way: str
) -> None:
    node = make_node(simhost, policy={"lending": "movable"}, oversubscription={"host_memory": "24Gi"})
    first = tenants("first", node, way, BOTH)
    borrow_everything(first)
    second = tenants("second", node, way, BOTH)
    borrow_everything(second)
    for one in (first, second):
        share = shares(node)[one.container.id]
        sizes = [share[f"memory_{name}_bytes"] for name in ("request", "limit", "host")]
        assert sizes == [REQUEST, LIMIT, 0] and share["lending"] == "movable"
        assert 8 * GIB - LAST_BYTES < share["memory_borrowed_bytes"] <= 8 * GIB
        assert share["memory_used_bytes"] <= LIMIT
        assert REQUEST - GIB < peak_bytes(simhost, one.pid_namespace()) <= REQUEST
    assert "4 GiB..12 GiB" in node.cli("list").stdout
    granted = [line for line in node.decisions() if line["decision"] == "granted"]
    assert [(line["memory"], line["limit"], line["lending"]) for line in granted] == [
        (str(REQUEST), str(LIMIT), "movable")
    ] * 2
    changed = node.cli("limit", "set", first.container.id, "--memory", "4Gi..6Gi")
    assert changed.returncode == 0 and "4 GiB..12 GiB -> 4 GiB..6 GiB" in changed.stdout
    assert shares(node)[first.container.id]["memory_limit_bytes"] == 6 * GIB
    lines = node.cli("export", "--once").stdout.splitlines()
    for name, size in (("request", REQUEST), ("limit", LIMIT)):
        found = [line for line in lines if line.startswith(f"gpushare_memory_{name}_bytes{{") and "second" in line]
        assert [float(line.rpartition(" ")[2]) for line in found] == [size]


@pytest.mark.parametrize("lending", ["movable", "evict"])
def test_both_get_their_part_of_16_gib(
    make_node: Callable[..., Node], make_host: Callable[..., Path], tenants: Callable[..., Tenant], lending: str
) -> None:
    """One borrows up to 12 GiB; the other then has its 4 GiB in time, and the first goes on."""
    node = make_node(
        make_host(memory_bytes=16 * GIB), policy={"lending": lending}, oversubscription={"host_memory": "24Gi"}
    )
    with agent(node, []) if lending == "evict" else nullcontext():
        first = tenants("first", node, "hook", BOTH)
        first.expect("seen")
        if lending == "evict":
            wait_until_lent(node)
        first.go()
        assert first.expect("full")["got_bytes"] > LIMIT - GIB
        second = tenants("second", node, "hook", BOTH)
        second.expect("seen")
        began = time.monotonic()
        second.go()
        got = second.expect("full")["got_bytes"]
        assert time.monotonic() - began < RECLAIM_S and got > REQUEST - GIB
        assert shares(node)[first.container.id]["memory_borrowed_bytes"] > 8 * GIB - GIB
        first.go()
        first.expect("freed")


@pytest.mark.parametrize("env", [BOTH, {"GPUSHARE_MEMORY": "4Gi"}], ids=["borrower", "plain"])
def test_agent_ends_a_borrower_for_another_request(
    make_node: Callable[..., Node], tenants: Callable[..., Tenant], simhost: Path, way: str, env: dict[str, str]
) -> None:
    """The device is full of borrowed memory. A container that starts then has its context and its request in time."""
    node = make_node(simhost, policy={"lending": "evict"})
    said: list[str] = []
    with agent(node, said):
        first = tenants("first", node, way, BOTH)
        seen = first.expect("seen")
        assert seen["cuda_total_bytes"] == LIMIT
        wait_until_lent(node)
        first.go()
        assert first.expect("full")["got_bytes"] > LIMIT - GIB
        assert shares(node)[first.container.id]["memory_borrowed_bytes"] > 8 * GIB - GIB
        began = time.monotonic()
        second = tenants("second", node, way, env)
        second.expect("seen")
        second.go()
        got = second.expect("full")["got_bytes"]
        assert time.monotonic() - began < RECLAIM_S
        assert REQUEST - GIB < got <= REQUEST
        assert first.container.wait() != 0
        (evicted,) = [line for line in node.decisions() if line["decision"] == "evicted"]
        assert (evicted["id"], evicted["needed_by"]) == (first.container.id, second.container.id)
        assert "last refusal" in node.cli("inspect", first.container.id).stdout
        shown = json.loads(node.cli("inspect", "--format", "json", first.container.id).stdout)["last_refusal"]
    assert "needs its own request; request more memory for it" in shown and f"gpushare: {shown}" in said[0].splitlines()


def borrower(node: Node, tenants: Callable[..., Tenant]) -> Tenant:
    """Return a container that the agent lets borrow, when it has all of its limit."""
    one = tenants("first", node, "hook", BOTH)
    one.expect("seen")
    wait_until_lent(node)
    one.go()
    assert one.expect("full")["got_bytes"] > LIMIT - GIB
    return one


@pytest.mark.parametrize("how", ["stopped", "paused", "damages its usage file"])
def test_borrower_that_does_not_cooperate_is_ended(
    make_node: Callable[..., Node], tenants: Callable[..., Tenant], simhost: Path, how: str
) -> None:
    """Its process is stopped, or its cgroup is frozen, as by `docker pause`, or it overwrites the file in which it
    reports its use: the other has its request in time."""
    node = make_node(simhost, policy={"lending": "evict"})
    with agent(node, []):
        first = borrower(node, tenants)
        if how == "stopped":
            os.kill(first.container.pid, signal.SIGSTOP)
        elif how.startswith("damages"):
            with open(storage.container_dir(str(node.state), first.container.id) + "/rw/usage", "r+b") as usage:
                usage.write(bytes(64))
        else:
            first.container.command("pause", first.container.id)
        began = time.monotonic()
        second = tenants("second", node, "hook", BOTH)
        second.expect("seen")
        second.go()
        assert second.expect("full")["got_bytes"] > REQUEST - GIB
        assert time.monotonic() - began < RECLAIM_S
        assert first.container.wait() == 128 + signal.SIGKILL


def test_borrower_with_processes_on_two_devices_is_ended_as_a_whole(
    make_node: Callable[..., Node], make_host: Callable[..., Path], tenants: Callable[..., Tenant]
) -> None:
    """Another container needs one of the devices. Both are free of the borrower then, and it is reported once."""
    host = make_host(gpus=2, memory_bytes=LIMIT)
    node = make_node(host, policy={"lending": "evict"})

    def used_bytes(device: int) -> int:
        with Ledger(str(host / "dev" / f"nvidia{device}")) as ledger:
            return ledger.used_bytes

    with agent(node, []):
        env = {**BOTH, "GPUSHARE_DEVICES": "0,1", "PROCESSES": "2"}
        first = tenants("first", node, "hook", env, program=BORROW)
        first.expect("seen")
        wait_until_lent(node)
        first.go()
        first.expect("full")
        assert min(used_bytes(0), used_bytes(1)) > LIMIT - GIB
        began = time.monotonic()
        second = tenants("second", node, "hook", {"GPUSHARE_MEMORY": "4Gi", "GPUSHARE_DEVICES": "1"})
        second.expect("seen")
        second.go()
        assert second.expect("full")["got_bytes"] > REQUEST - GIB
        assert time.monotonic() - began < RECLAIM_S
        assert first.container.wait() == 128 + signal.SIGKILL
        assert used_bytes(0) == 0 and used_bytes(1) <= REQUEST
        (evicted,) = [line for line in node.decisions() if line["decision"] == "evicted"]
        assert evicted["id"] == first.container.id
        assert [lease.id for lease in leases.view(str(node.state)).live] == [second.container.id]


def test_limit_can_change_while_memory_is_borrowed(
    make_node: Callable[..., Node], tenants: Callable[..., Tenant], simhost: Path
) -> None:
    """Below what is borrowed, also to one amount: the request counts at once, and the rest can be taken back."""
    node = make_node(simhost, policy={"lending": "evict"})
    with agent(node, []):
        first = borrower(node, tenants)
        for memory, request_bytes, limit_bytes in (("4Gi..6Gi", REQUEST, 6 * GIB), ("2Gi", 2 * GIB, 2 * GIB)):
            changed = node.cli("limit", "set", first.container.id, "--memory", memory)
            assert changed.returncode == 0, changed.stderr
            share = shares(node)[first.container.id]
            assert [share[f"memory_{name}_bytes"] for name in ("request", "limit")] == [request_bytes, limit_bytes]
            assert share["memory_borrowed_bytes"] > LIMIT - GIB - request_bytes
        second = tenants("second", node, "hook", {"GPUSHARE_MEMORY": "10Gi"})  # with 2 GiB exactly the device
        second.expect("seen")
        second.go()
        assert second.expect("full")["got_bytes"] > 9 * GIB
        assert first.container.wait() == 128 + signal.SIGKILL


def test_fractiond_pod_starts_as_request_and_limit(
    make_node: Callable[..., Node], tenants: Callable[..., Tenant], simhost: Path, way: str
) -> None:
    node = make_node(simhost, policy={"lending": "movable"}, oversubscription={"host_memory": "24Gi"})
    env = {
        "NVIDIA_VISIBLE_DEVICES": "0",
        "NVIDIA_GPU_MEMORY_REQUEST": "4096",
        "NVIDIA_GPU_MEMORY_LIMIT": "8192",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4096M",
    }
    assert tenants("fraction", node, way, env).expect("seen")["cuda_total_bytes"] == 8 * GIB
    (share,) = shares(node).values()
    assert (share["memory_request_bytes"], share["memory_limit_bytes"]) == (REQUEST, 8 * GIB)
