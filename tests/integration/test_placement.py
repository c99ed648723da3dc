"""Containers that request any device, with real runc. tests/unit/test_leases.py and tests/soak have concurrent starts,
and starts that are killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from gpushare.state import storage

from tests.support.host import Node
from tests.support.runc import Container, RuntimeFailed

MakeContainer = Callable[..., Container]
GIB = 1 << 30


@pytest.mark.parametrize("way", ["hook", "runtime"])
def test_equal_shares_are_spread_and_reported(
    make_host: Callable[..., Path], make_node: Callable[..., Node], container: MakeContainer, way: str
) -> None:
    """A container that names a device by its replica, as NVIDIA's device plugin does, and three that request any."""
    slicing = {"timeSlicing": {"resources": [{"name": "nvidia.com/gpu", "replicas": 2}]}}
    node = make_node(
        make_host(gpus=2, memory_bytes=16 * GIB), placement={"strategy": "spread"}, sharing=slicing, name=f"equal-{way}"
    )
    uuids = [one["uuid"] for one in json.loads(node.cli("devices", "--format", "json").stdout)]
    any_of_them = {"GPUSHARE_DEVICES": "any,model=simulated,free>=8Gi"}
    asked = [{"NVIDIA_VISIBLE_DEVICES": f"{uuids[1]}::1"}, *[any_of_them] * 3]
    for env, index in zip(asked, (1, 0, 0, 1)):
        one = container(["sleep", "inf"], env=env, **node.way(way))
        told = node.cli("explain", str(one.bundle)).stdout
        assert "an equal share (1 of 2)" in told and f"placed       GPU {index}: " in told
        one.start()
        (device,) = storage.read_limits(str(node.state / "containers" / one.id / "share" / "limits")).devices
        assert (device.uuid, device.memory_limit_bytes, device.compute_percent) == (uuids[index], 8 * GIB, 50)
    last = container(["true"], env={"GPUSHARE_DEVICES": "any,mig=no"}, **node.way(way))
    with pytest.raises(RuntimeFailed, match=r"no device fits .*: GPU 0: 0 B of 16 GiB free; GPU 1: 0 B of 16 GiB free"):
        last.create()
    small = container(["true"], env={"GPUSHARE_MEMORY": "1Gi"}, **node.way(way))
    with pytest.raises(RuntimeFailed, match="GPU 0: 0 B of 16 GiB free"):
        small.create()
