"""Compute requests: the container's limits file, refusals of requests that do not fit, and the CLI's output."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from gpushare.state import shm_abi

from tests.support import programs
from tests.support.host import Node
from tests.support.runc import Container, RuntimeFailed

MakeContainer = Callable[..., Container]
MakeNode = Callable[..., Node]


@pytest.fixture
def start(container: MakeContainer, node: Node) -> Callable[..., Container]:
    """start(way, **variables without GPUSHARE_) -> a started container with 1 GiB."""

    def make(way: str, host: Node = node, **words: str) -> Container:
        env = {"GPUSHARE_MEMORY": "1Gi", **{f"GPUSHARE_{name}": value for name, value in words.items()}}
        return container(["sleep", "inf"], env=env, **host.way(way)).start()

    return make


def limit_of(node: Node, one: Container) -> shm_abi.Limit:
    """The limit as the container itself reads it."""
    data = (node.state / "containers" / one.id / "share" / "limits").read_bytes()
    assert one.exec("sha256sum", "/usr/lib/gpushare/limits").stdout.split()[0] == hashlib.sha256(data).hexdigest()
    (limit,) = shm_abi.read_limits(data).devices
    return limit


def shares(node: Node) -> dict[str, Any]:
    return {one["id"]: one["shares"][0] for one in json.loads(node.cli("list", "--format", "json").stdout)}


def test_requests_are_written_to_the_limits_file(start: Callable[..., Container], node: Node, way: str) -> None:
    hard = start(way, COMPUTE="30%")
    soft = start(way, COMPUTE="60%", COMPUTE_MODE="soft", PRIORITY="high")
    free = start(way)
    assert limit_of(node, hard)[3:6] == (30, 0, 0)
    assert limit_of(node, soft)[3:6] == (60, 1, shm_abi.DEVICE_COMPUTE_SOFT)
    assert limit_of(node, free)[3:6] == (None, 0, 0)
    found = shares(node)
    assert [found[one.id]["compute_percent"] for one in (hard, soft, free)] == [30, 60, None]
    assert [found[one.id]["compute_mode"] for one in (hard, soft, free)] == ["hard", "soft", "hard"]
    assert "0% of 30%" in node.cli("list").stdout and "0% of 60% soft" in node.cli("inspect", soft.id).stdout
    (device,) = json.loads(node.cli("devices", "--format", "json").stdout)
    assert device["compute_granted_percent"] == 30


def test_hard_limit_that_does_not_fit_is_refused_with_the_free_percentage(
    start: Callable[..., Container], node: Node, way: str
) -> None:
    first = start(way, COMPUTE="60%")
    with pytest.raises(RuntimeFailed) as refused:
        start(way, COMPUTE="50%")
    line = refused.value.last_line
    assert f"device 0: 50% of compute requested, 40% free of 100%, held by {first.id} (60%); " in line
    second = start(way, COMPUTE="40%")
    start(way, COMPUTE="50%", COMPUTE_MODE="soft")
    start(way)
    first.delete()
    third = start(way, COMPUTE="60%")
    assert {one.id for one in (second, third)} < set(node.leases())


def test_configured_maximum_and_overcommit_are_enforced(
    start: Callable[..., Container], make_node: MakeNode, simhost: Any
) -> None:
    clamped = make_node(
        simhost, "clamped", compute_overcommit=2, policy={"max_compute": "70%", "over_maximum": "clamp"}
    )
    found = [
        limit_of(clamped, start("hook", clamped, **words)) for words in ({}, {"COMPUTE": "80%"}, {"COMPUTE": "60%"})
    ]
    assert [limit.compute_percent for limit in found] == [70, 70, 60]
    with pytest.raises(RuntimeFailed, match="1% of compute requested, 0% free of 200%"):
        start("hook", clamped, COMPUTE="1%")
    strict = make_node(simhost, "strict", policy={"max_compute": "70%"})
    for words in ({}, {"COMPUTE": "71%"}):
        with pytest.raises(RuntimeFailed, match=r"more than policy.max_compute \(70%\) allows"):
            start("hook", strict, **words)
    assert limit_of(strict, start("hook", strict, COMPUTE="70%")).compute_percent == 70


def test_gpushare_run_writes_its_compute_limit(start: Callable[..., Container], node: Node) -> None:
    start("hook", COMPUTE="60%")
    refused = programs.run(node, "--memory", "1Gi", "--compute", "50%", "--", "true")
    assert refused.returncode == 75 and "40% free of 100%" in refused.stderr
    at = shm_abi.offset("gs_limits", "device") + shm_abi.offset("gs_device_limit", "compute_percent")
    look = (
        "--",
        "od",
        "-An",
        "-tu4",
        f"-j{at}",
        "-N16",
        "/usr/lib/gpushare/limits",
    )  # percent, priority, weight, flags
    done = programs.run(node, "--memory", "1Gi", "--compute", "40%", *look)
    assert (done.returncode, done.stdout.split()) == (0, ["40", "0", "0", "0"]), done.stderr
    soft = ("--compute", "90%", "--compute-mode", "soft", "--priority", "high")
    done = programs.run(node, "--memory", "1Gi", *soft, *look)
    assert (done.returncode, done.stdout.split()) == (0, ["90", "1", "0", "1"]), done.stderr
