"""Containers that fill a GPU of each model to its capacity: the driver refuses none of them within its limit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from demo.tenant import LAST_BYTES
from simulator import models
from simulator.ledger import Ledger
from tests.integration import mps_stage
from tests.support import gpumodels
from tests.support.gpumodels import ModelHost
from tests.support.host import Node
from tests.support.runc import Container
from tests.support.tenant import Tenant

MIB = 1 << 20
EVERY = pytest.mark.parametrize("model", gpumodels.NAMES, indirect=True)
WHOLE = pytest.mark.parametrize("model", [name for name in gpumodels.NAMES if " MIG " not in name], indirect=True)


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> ModelHost:
    return gpumodels.make(tmp_path / "host", request.param, late_return_ms=0)


@pytest.fixture
def simhost(model: ModelHost) -> Path:
    return model.root


def fill(tenants: list[Tenant], model: ModelHost) -> list[int]:
    """Let all tenants allocate until they are refused, and return their limits."""
    limits = []
    for one in tenants:
        one.container.start()
        seen = one.expect("seen")
        limits.append(seen["cuda_total_bytes"])
        assert seen["nvml_total_bytes"] == seen["cuda_total_bytes"]
        one.go()
        full = one.expect("full")
        assert full["refusal"] == "CUDA_ERROR_OUT_OF_MEMORY"
        assert seen["cuda_free_bytes"] - full["got_bytes"] < LAST_BYTES
    with Ledger(str(model.ledger)) as ledger:
        found = ledger.snapshot()
    assert [group.refused for group in found.groups] == [0] * len(found.groups)  # the driver refused nothing
    assert found.total_bytes - found.used_bytes < len(tenants) * (LAST_BYTES + 4 * MIB)
    return limits


@WHOLE
def test_quarters_of_nvml_s_total_all_fit(tenant: Callable[..., Tenant], node: Node, model: ModelHost) -> None:
    """HAMi divides what NVML's version 1 reports. The last container gets the rest, and a note."""
    node.cli("refresh")
    quarter = model.model.total_mib // 4
    env = {"NVIDIA_VISIBLE_DEVICES": model.uuid, "CUDA_DEVICE_MEMORY_LIMIT_0": f"{quarter}m"}
    tenants = [tenant(f"c{number}", env) for number in range(4)]
    limits = fill(tenants, model)
    assert limits[:3] == [quarter * MIB] * 3 and sum(limits) <= model.model.memory_bytes
    listed = json.loads(node.cli("inspect", tenants[3].container.id, "--format", "json").stdout)
    assert listed["shares"][0]["clamped_from"].endswith(" that the driver reserves")
    assert "less is granted" in listed["note"]


@EVERY
def test_refresh_measures_the_context_of_the_model(node: Node, model: ModelHost) -> None:
    def device() -> dict[str, object]:
        found = json.loads(node.cli("devices", "--format", "json").stdout)
        return next(one for one in found if one["uuid"] == model.uuid)

    assert device()["context_source"] == "estimated"
    assert device()["context_bytes"] >= model.model.context_bytes  # type: ignore[operator]
    node.cli("refresh")
    blocks = -(-model.model.context_bytes // LAST_BYTES) * LAST_BYTES
    assert (device()["context_source"], device()["context_bytes"]) == ("measured", blocks)
    assert device()["reserved_bytes"] == model.model.reserved_bytes
    (check,) = (
        one for one in json.loads(node.cli("doctor", "--format", "json").stdout)["checks"] if one["name"] == "contexts"
    )
    assert check["result"] == "ok" and check["detail"].endswith(" measured")


def contexts(node: Node, *arguments: str) -> list[tuple[bool, int, str]]:
    """Return the measurements of `refresh`: (with MPS, bytes, why not)."""
    found = json.loads(node.cli("refresh", "--format", "json", *arguments).stdout)["contexts"]
    return [(one["mps"], one["context_bytes"], one["why"]) for one in found]


@pytest.mark.parametrize("model", [models.DEFAULT], indirect=True)
def test_device_that_a_container_has_is_not_measured(
    container: Callable[..., Container], node: Node, model: ModelHost
) -> None:
    one = container(["sleep", "inf"], env={"GPUSHARE_DEVICES": "0"}, **node.way("hook")).start()
    assert contexts(node) == [(False, 0, "a container has the whole device")]
    one.close()
    assert contexts(node) == [(False, model.model.context_bytes, "")]


@pytest.fixture
def mps_host(make_host: Callable[..., Path], make_node: Callable[..., Node]) -> Iterator[Node]:
    yield from mps_stage.make_mps_host(make_host, make_node)


@pytest.fixture
def mps_container(tmp_path: Path, mps_host: Node) -> Iterator[Callable[..., Container]]:
    yield from mps_stage.make_mps_containers(tmp_path, mps_host)


def test_context_is_measured_apart_for_clients_of_mps(mps_host: Node, mps_container: Callable[..., Container]) -> None:
    """The measuring process connects to gpushare's daemon, and a container with MPS is charged that size."""
    like = models.MODELS[models.DEFAULT]
    assert contexts(mps_host) == [(False, like.context_bytes, "")]
    mps_stage.start(mps_host)
    assert contexts(mps_host) == [(False, like.context_bytes, ""), (True, like.context_bytes, "")]
    served = int(mps_stage.status(mps_host)["pid"])
    mps_container("hook").start()
    assert int(mps_stage.status(mps_host)["pid"]) == served


def test_daemon_of_mps_from_before_the_upgrade_stays(mps_host: Node) -> None:
    """It was started with NVML's total, which was the default."""
    like = models.MODELS[models.DEFAULT]
    mps_stage.start(mps_host, "--memory", f"{like.total_mib}Mi")
    pid = mps_stage.status(mps_host)["pid"]
    assert mps_stage.start(mps_host) == pid
    assert mps_host.cli("mps", "start", "--device", "0", "--memory", "1Gi").returncode != 0
