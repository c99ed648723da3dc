"""Shares of MIG devices in real containers: limits, NVML, activity files and leases, judged by each device's ledger."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simulator.ledger import Ledger
from tests.support import driverhost
from tests.support.driverhost import MIG_UUIDS
from tests.support.host import PYTHON, TREE, Node, python_mounts
from tests.support.runc import Container, RuntimeFailed
from tests.support.tenant import PROGRAM

MakeContainer = Callable[..., Container]
GIB = 1 << 30
PART = TREE / "tests" / "integration" / "programs" / "part.py"


@pytest.fixture
def parts(simhost: Path) -> tuple[Path, Path]:
    """The device files of two MIG devices of 4 GiB."""
    return driverhost.divide(simhost)


def start(container: MakeContainer, node: Node, way: str, devices: str, **limits: str) -> Container:
    env = {"GPUSHARE_DEVICES": devices, **{f"GPUSHARE_{name.upper()}": value for name, value in limits.items()}}
    return container(["sleep", "100"], env=env, mounts=python_mounts(PROGRAM, PART), **node.way(way)).start()


def seen(one: Container) -> dict[str, Any]:
    done = one.exec(PYTHON, f"/opt/{PART.name}")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def peaks(part: Path) -> dict[int, int]:
    with Ledger(str(part)) as ledger:
        return {group.pidns: group.peak_bytes for group in ledger.groups()}


def test_containers_share_one_mig_device(
    container: MakeContainer, node: Node, simhost: Path, parts: tuple[Path, Path], way: str
) -> None:
    """A percentage is of the MIG device; each container sees only its share, not the GPU or its other MIG devices."""
    half = start(container, node, way, "0:1", memory="50%")
    quarter = start(container, node, way, MIG_UUIDS[1], memory="1Gi", compute="20%")
    for one, limit in ((half, 2 * GIB), (quarter, GIB)):
        said = seen(one)
        assert (said["count"], said["uuid"], said["totals"]) == (1, MIG_UUIDS[1], [limit, limit])
        assert said["refusal"] == "CUDA_ERROR_OUT_OF_MEMORY" and limit // 2 < said["got"] < limit
        ((name, instance, total, used, processes),) = said["parts"]
        assert (name, instance, total) == (MIG_UUIDS[1], 2, limit) and said["got"] < used <= limit
        assert processes == [used]
        assert (said["mode"], said["whole"]) == (1, "NVMLError_NoPermission")
        pidns = os.stat(f"/proc/{one.pid}/ns/pid").st_ino
        assert said["got"] < peaks(parts[1])[pidns] <= limit
        assert one.exec("ls", "/usr/lib/gpushare/pages", "/dev/nvidia-caps").stdout.split() == [
            *("/dev/nvidia-caps:", "nvidia-cap21", "nvidia-cap22"),
            *("/usr/lib/gpushare/pages:", MIG_UUIDS[1]),
        ]
    assert not peaks(parts[0]) and not peaks(simhost / "dev/nvidia0")
    with pytest.raises(RuntimeFailed, match="device 0:1: 1025 MiB requested, 1 GiB free of 4 GiB"):
        start(container, node, way, "0:1", memory="1025Mi")
    other = start(container, node, way, "any", memory="4Gi")
    assert seen(other)["uuid"] == MIG_UUIDS[0] and peaks(parts[0])


def test_injected_mig_device_is_granted(
    container: MakeContainer, node: Node, simhost: Path, parts: tuple[Path, Path]
) -> None:
    """As NVIDIA's device plugin does with MIG strategy `mixed`: CDI adds the GPU's node and two capabilities."""

    def injected(spec: dict[str, Any]) -> None:
        for name in ("nvidia0", "nvidiactl", "nvidia-caps/nvidia-cap21", "nvidia-caps/nvidia-cap22"):
            node = {"destination": f"/dev/{name}", "type": "bind", "source": f"{simhost}/dev/{name}"}
            spec["mounts"].append({**node, "options": ["bind"]})

    env = {"NVIDIA_VISIBLE_DEVICES": "void", "GPUSHARE_MEMORY": "1Gi"}
    mounts = python_mounts(PROGRAM, PART)
    one = container(["sleep", "100"], env=env, mounts=mounts, edit=injected, **node.way("runtime")).start()
    said = seen(one)
    assert (said["count"], said["uuid"], said["totals"]) == (1, MIG_UUIDS[1], [GIB, GIB])
    assert one.exec("ls", "/dev/nvidia-caps").stdout.split() == ["nvidia-cap21", "nvidia-cap22"]
    (listed,) = json.loads(node.cli("list", "--format", "json").stdout)
    assert [share["uuid"] for share in listed["shares"]] == [MIG_UUIDS[1]]
    assert not peaks(parts[0])


def test_mig_device_can_be_oversubscribed(
    container: MakeContainer, make_node: Callable[..., Node], simhost: Path, parts: tuple[Path, Path]
) -> None:
    """Half of a MIG device, plus half as much on the host, beside a container that fills the other half."""
    node = make_node(simhost, oversubscription={"host_memory": "3Gi", "scaling": 1.5})
    beside = start(container, node, "runtime", "0:1", memory="50%")
    one = start(container, node, "runtime", "0:1", memory="50%", oversubscribe="true")
    for filled, limit, whole in ((beside, 2 * GIB, 2 * GIB), (one, 2 * GIB, 3 * GIB)):
        said = seen(filled)
        assert said["totals"] == [whole, whole] and limit // 2 < said["got"] < whole
        ((_, _, total, used, processes),) = said["parts"]
        assert total == whole and said["got"] < used <= whole and processes == [used]
        assert peaks(parts[1])[os.stat(f"/proc/{filled.pid}/ns/pid").st_ino] <= limit
    assert said["got"] > 2 * GIB
    with pytest.raises(RuntimeFailed, match="oversubscribed shares: 1.50 GiB requested, 0 B free of 3 GiB"):
        start(container, node, "runtime", "0:0", memory="1Gi", oversubscribe="true")


def test_whole_mig_device_is_enforced_by_the_hardware(
    container: MakeContainer, node: Node, parts: tuple[Path, Path]
) -> None:
    way = "hook"
    one = start(container, node, way, "0:0")
    said = seen(one)
    assert said["totals"] == [4 * GIB, 4 * GIB] and 3 * GIB < said["got"] < 4 * GIB
    told = node.cli("explain", str(one.bundle))
    assert "memory by the hardware (all of a MIG device)" in told.stdout, told
    with pytest.raises(RuntimeFailed, match="device 0:0 is in exclusive use"):
        start(container, node, way, "0:0", memory="1Gi")


def test_limits_change_inside_a_mig_device(container: MakeContainer, node: Node, parts: tuple[Path, Path]) -> None:
    one = start(container, node, "runtime", "0:1", memory="25%")
    assert seen(one)["totals"] == [GIB, GIB]
    done = node.cli("limit", "set", one.id, "--memory", "75%", "--device", MIG_UUIDS[1])
    assert done.returncode == 0, done.stderr
    said = seen(one)
    assert said["totals"] == [3 * GIB, 3 * GIB] and 2 * GIB < said["got"] < 3 * GIB
    listed = json.loads(node.cli("devices", "--format", "json").stdout)
    assert [(row["name"], row["uuid"]) for row in listed[1:]] == [("0:0", MIG_UUIDS[0]), ("0:1", MIG_UUIDS[1])]


@pytest.mark.parametrize("name", ["0", "GPU-"])
def test_gpu_with_mig_devices_lists_them(
    container: MakeContainer, node: Node, parts: tuple[Path, Path], name: str
) -> None:
    """CUDA uses one of them, NVML shows both."""
    listed = json.loads(node.cli("devices", "--format", "json").stdout)
    one = start(container, node, "runtime", listed[0]["uuid"] if name == "GPU-" else name, memory="1Gi")
    said = seen(one)
    assert said["count"] == 1 and said["totals"] == [GIB, GIB]
    assert [part[0] for part in said["parts"]] == list(MIG_UUIDS)
    assert len(peaks(parts[0])) + len(peaks(parts[1])) == 1
