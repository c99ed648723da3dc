"""Containers as other schedulers describe them, on a host with two GPUs whose index and minor differ: with hook and
runtime the share follows the scheduler's variables, and the device's ledger agrees."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from demo.tenant import LAST_BYTES
from simulator.simhost import default_uuid
from tests.support.host import Node
from tests.support.judge import taken
from tests.support.runc import Container
from tests.support.tenant import Tenant

MINORS = (1, 0)  # by index
MIB = 1 << 20


class Given(NamedTuple):
    """A container of a scheduler, and its expected share."""

    env: dict[str, str]
    annotations: dict[str, str]
    dialect: str
    index: int
    limit_bytes: int
    ignored: str = ""


ALLOCATED = {
    "gpu": [{"minor": 0, "resources": {"koordinator.sh/gpu-memory": "3000Mi", "koordinator.sh/gpu-memory-ratio": "18"}}]
}
GIVEN = {
    "hami": Given(
        {"NVIDIA_VISIBLE_DEVICES": default_uuid(1), "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m", "CUDA_DEVICE_SM_LIMIT": "0"},
        {},
        "nvidia+hami",
        1,
        3000 * MIB,
    ),
    "aliyun": Given(
        {
            "NVIDIA_VISIBLE_DEVICES": "all",
            "ALIYUN_COM_GPU_MEM_IDX": "0",
            "ALIYUN_COM_GPU_MEM_CONTAINER": "2",
            "ALIYUN_COM_GPU_MEM_DEV": "16",
            "CGPU_DISABLE": "true",
        },
        {},
        "aliyun",
        0,
        2048 * MIB,
        'CGPU_DISABLE="true": the limits of aliyun stay',
    ),
    "koordinator": Given(
        {"NVIDIA_VISIBLE_DEVICES": "0"},
        {"scheduling.koordinator.sh/device-allocated": json.dumps(ALLOCATED)},
        "koordinator",
        1,
        3000 * MIB,
        'NVIDIA_VISIBLE_DEVICES="0": scheduling.koordinator.sh/device-allocated names the devices',
    ),
    "nvidia-memory": Given(  # a limit alone
        {"NVIDIA_VISIBLE_DEVICES": default_uuid(1), "NVIDIA_GPU_MEMORY_LIMIT": "3000"},
        {},
        "nvidia+nvidia-memory",
        1,
        3000 * MIB,
    ),
    "fractiond": Given(
        {
            "NVIDIA_VISIBLE_DEVICES": default_uuid(1),
            "NVIDIA_GPU_MEMORY_REQUEST": "3000",
            "NVIDIA_GPU_MEMORY_LIMIT": "8192",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=8192M",
        },
        {},
        "nvidia+nvidia-memory+mps",
        1,
        3000 * MIB,
        "memory 3000 MiB..8 GiB: policy.lending is off, so the limit is the request (3000 MiB, not 8 GiB)",
    ),
}


@pytest.fixture
def simhost(make_host: Callable[..., Path]) -> Path:
    return make_host(gpus=2, memory_bytes=16 << 30, minors=MINORS)


@pytest.mark.parametrize("name", GIVEN)
def test_share_follows_the_scheduler_s_request(
    tenant: Callable[..., Tenant], node: Node, simhost: Path, name: str, way: str
) -> None:
    given = GIVEN[name]
    one = tenant(name, given.env, way=way, annotations=given.annotations)
    one.container.start()
    seen = one.expect("seen")
    assert (seen["nvml_total_bytes"], seen["cuda_total_bytes"], seen["gpus"]) == (
        given.limit_bytes,
        given.limit_bytes,
        1,
    )
    one.go()
    full = one.expect("full")
    assert full["refusal"] == "CUDA_ERROR_OUT_OF_MEMORY"
    assert seen["cuda_free_bytes"] - full["got_bytes"] < LAST_BYTES
    books = [taken(simhost, one.pid_namespace(), minor).peak_bytes for minor in (0, 1)]
    assert full["got_bytes"] < books[MINORS[given.index]] <= given.limit_bytes
    assert books[1 - MINORS[given.index]] == 0
    explained: dict[str, Any] = json.loads(
        node.cli("explain", "--format", "json", "--way", way, str(one.container.bundle)).stdout
    )
    assert explained["request"]["dialect"] == given.dialect
    assert any(line.startswith(given.ignored) for line in explained["request"]["ignored"]) or not given.ignored
    text = node.cli("explain", "--way", way, str(one.container.bundle)).stdout
    assert f"ignored      {given.ignored}" in text or not given.ignored
    one.go()
    one.expect("freed")
    assert one.container.wait() == 0


def test_hook_for_driver_limits_is_removed_before_driver_615(container: Callable[..., Container], node: Node) -> None:
    """It would end the start: this driver has no memory limits."""

    def edit(spec: dict[str, Any]) -> None:
        args = ["nvidia-ctk", "hook", "apply-cuda-memory-limits", "--driver-root", "", "--gpu-id", default_uuid(0)]
        spec["hooks"] = {"createRuntime": [{"path": "/nowhere/nvidia-ctk", "args": args}]}

    env = {"NVIDIA_VISIBLE_DEVICES": default_uuid(0), "NVIDIA_GPU_MEMORY_LIMIT": "4096"}
    one = container(["true"], env=env, edit=edit, runtime=node.runtime())
    assert one.run() == 0
    (granted,) = [line for line in node.decisions() if line["decision"] == "granted"]
    assert granted["memory"] == str(4096 * MIB)
    assert granted["taken_out"].strip('"') == (
        "createRuntime hook /nowhere/nvidia-ctk apply-cuda-memory-limits "
        "(the driver (535.261.03) has no memory limits, 615 or newer has)"
    )


def test_limit_above_request_is_logged(container: Callable[..., Container], node: Node, way: str) -> None:
    one = container(["true"], env={"GPUSHARE_MEMORY": "4Gi..12Gi"}, **node.way(way))
    assert one.run() == 0
    (granted,) = [line for line in node.decisions() if line["decision"] == "granted"]
    assert granted["memory"] == str(4 << 30)
    assert "memory 4 GiB..12 GiB: policy.lending is off, so the limit is the request" in granted["notes"]


def test_variables_without_a_request_change_nothing(container: Callable[..., Container], node: Node, way: str) -> None:
    env = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50", "CGPU_DISABLE": "1"}
    one = container(["sh", "-c", "test ! -e /dev/nvidiactl"], env=env, **node.way(way))
    assert one.run() == 0
    assert node.leases() == []
    assert 'ignored      CGPU_DISABLE="1": no device is requested' in node.cli("explain", str(one.bundle)).stdout
    unused = json.loads(node.cli("explain", "--format", "json", str(one.bundle)).stdout)["unused"]
    assert 'CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="50": mps variables request no device' in unused
