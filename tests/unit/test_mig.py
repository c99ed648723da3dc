"""MIG devices: names, grants and capability nodes from the kernel's directories and NVML."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from gpushare.allocation import placement
from gpushare.core.errors import CapacityError, DeviceError, GpushareError
from gpushare.core.model import Amount, Inventory, Lease, Node, Request, Selection, Share
from gpushare.gpu import inventory, mig, nvml
from gpushare.request import dialects
from gpushare.state import leasefile

from simulator.simhost import make_simhost
from tests.support.driverhost import MIG_UUIDS, add_mig, set_facts
from tests.unit.pure import UUIDS, device, ledger, node

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
PARTS = tuple(
    device(1, uuid=uuid, parent=UUIDS[1], mig_index=i, gpu_instance=i + 1, compute_instance=0, memory_bytes=4 << 30)
    for i, uuid in enumerate(MIG_UUIDS)
)
HOST = Inventory("/", "535.261.03", (device(0), device(1)), mig=PARTS)
NODE = Node(node().config, HOST)


def test_instances_are_read_from_proc(tmp_path: Path) -> None:
    add_mig(tmp_path, minor=3)
    (tmp_path / "proc/driver/nvidia/capabilities/gpu3/mig/gix").mkdir()
    assert mig.instances(str(tmp_path)) == (mig.Instance(3, 1, 0), mig.Instance(3, 2, 0))
    assert inventory.mig_instances(str(tmp_path)) == ("gpu3/gi1/ci0", "gpu3/gi2/ci0")
    assert mig.instances(str(tmp_path / "none")) == ()


@pytest.mark.parametrize("lost", ["", "access file", "table"])
def test_minors_come_from_either_source(tmp_path: Path, lost: str) -> None:
    add_mig(tmp_path)
    path = "gpu0/mig/gi2/ci0/access"
    if lost == "access file":
        (tmp_path / mig.CAPABILITIES / path).write_text("DeviceFileMode: 292\n")
    if lost == "table":
        (tmp_path / mig.MINORS).unlink()
    found = mig.nodes(str(tmp_path), (path, "mig/config"), simulated=True)
    assert [one.name for one in found] == ["nvidia-caps/nvidia-cap22", "nvidia-caps/nvidia-cap1"]


def test_inventory_lists_mig_devices(tmp_path: Path) -> None:
    root = make_simhost(tmp_path / "host", gpus=2)
    add_mig(root, minor=1)
    set_facts(root, brand="tesla", arch="8.0")
    found = inventory.read_inventory(str(root))
    assert [(one.uuid, one.index, one.mig_index, one.memory_bytes, one.parent) for one in found.mig] == [
        (uuid, 1, i, 4 << 30, found.devices[1].uuid) for i, uuid in enumerate(MIG_UUIDS)
    ]
    assert {(one.brand, one.arch) for one in (*found.devices, *found.mig)} == {("tesla", "8.0")}
    assert found.cuda_version == "12.2"


def test_device_unknown_to_nvml_is_not_granted(tmp_path: Path) -> None:
    root = make_simhost(tmp_path / "host")
    add_mig(root)
    set_facts(root, mig=[])
    found = inventory.read_inventory(str(root))
    assert found.mig[1].uuid == f"MIG-{found.devices[0].uuid}/2/0"
    with pytest.raises(DeviceError, match="the uuid of MIG device 0:1 is not known"):
        grant("0:1", host=Node(NODE.config, found))


class FakeNvml(types.ModuleType):
    """pynvml over one GPU with MIG devices 0 and 2; `silent` functions are not supported."""

    class NVMLError(Exception):
        pass

    def __init__(self, *silent: str) -> None:
        super().__init__("pynvml")
        memory = types.SimpleNamespace(total=5 << 30, reserved=1 << 30, free=1 << 30)
        answers: dict[str, Any] = {
            "nvmlMemory_v2": lambda: None,
            "nvmlInit": lambda: None,
            "nvmlDeviceGetCount": lambda: 1,
            "nvmlDeviceGetHandleByIndex": lambda index: "gpu",
            "nvmlDeviceGetMemoryInfo": lambda handle, version=1: memory,
            "nvmlDeviceGetNumGpuCores": lambda handle: 6912,
            "nvmlDeviceGetName": lambda handle: "NVIDIA Test MIG 1g.5gb",
            "nvmlDeviceGetAttributes": lambda handle: types.SimpleNamespace(multiprocessorCount=14),
            "nvmlDeviceGetBrand": lambda handle: 2,
            "nvmlDeviceGetCudaComputeCapability": lambda handle: [8, 0],
            "nvmlDeviceGetUUID": lambda handle: b"GPU-x" if handle == "gpu" else f"MIG-{handle}",
            "nvmlDeviceGetMaxMigDeviceCount": lambda handle: 3,
            "nvmlDeviceGetMigDeviceHandleByIndex": lambda handle, index: self.fail() if index == 1 else index,
            "nvmlDeviceGetGpuInstanceId": lambda handle: handle + 7,
            "nvmlDeviceGetComputeInstanceId": lambda handle: 0,
        }
        for name, answer in answers.items():
            setattr(self, name, self.fail if name in silent else answer)

    def fail(self, *_: Any) -> Any:
        raise self.NVMLError


TOLD = tuple(
    nvml.Mig(f"MIG-{n}", n, n + 7, 0, 4 << 30, 1 << 30, 14, "1g.5gb") for n in (0, 2)
)  # without the reserved memory
WHOLE = (1 << 30, 6912)


@pytest.mark.parametrize(
    ("silent", "expected"),
    [
        ((), nvml.Gpu(4 << 30, "tesla", "8.0", TOLD, *WHOLE)),
        (("nvmlDeviceGetMaxMigDeviceCount",), nvml.Gpu(4 << 30, "tesla", "8.0", (), *WHOLE)),
        (("nvmlDeviceGetBrand", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetMaxMigDeviceCount",
          "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetNumGpuCores"), nvml.Gpu(0)),
    ],
)  # fmt: skip
def test_nvml_facts_become_gpu(monkeypatch: pytest.MonkeyPatch, silent: tuple[str, ...], expected: nvml.Gpu) -> None:
    """NVML's numbers may have gaps; unsupported fields are omitted."""
    import ctypes

    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(*silent))
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: None)
    assert nvml._gpus("library") == {"GPU-x": expected}


def grant(names: str, memory: str = "", host: Node = NODE, held: tuple[Lease, ...] = ()) -> tuple[Share, ...]:
    selection = dialects.parse_devices("N", names, host.inventory, any_allowed=True)
    assert selection
    amounts = ((None, Amount(int(memory) << 30, None, memory)),) if memory else ()
    asked = Request("own", selection, (), memory=amounts)
    return placement.grant(asked, host, ledger(*held))


@pytest.mark.parametrize(
    ("names", "granted"),
    [
        ("1:0", [MIG_UUIDS[0]]),
        ("1:1,1:0", list(MIG_UUIDS)),
        (MIG_UUIDS[1], [MIG_UUIDS[1]]),
        (MIG_UUIDS[1].upper(), [MIG_UUIDS[1]]),
        (f"MIG-{UUIDS[1]}/2/0", [MIG_UUIDS[1]]),
        ("1", list(MIG_UUIDS)),
        (UUIDS[1], list(MIG_UUIDS)),
        ("1:0,1", list(MIG_UUIDS)),
        ("0,1:1", [UUIDS[0], MIG_UUIDS[1]]),
        ("all", [UUIDS[0], *MIG_UUIDS]),
        ("any:3", [UUIDS[0], *MIG_UUIDS]),
    ],
)
def test_name_selects_mig_devices(names: str, granted: list[str]) -> None:
    assert [share.device.uuid for share in grant(names)] == granted


@pytest.mark.parametrize(
    "name", ["0:0", "1:2", "MIG-", "MIG-9f000000", f"MIG-{UUIDS[0]}/1/0", f"MIG-{UUIDS[1]}/9/0", "1:99999999999999"]
)
def test_name_without_mig_device_is_refused(name: str) -> None:
    with pytest.raises(GpushareError, match="no MIG device|does not name a device"):
        grant(name)


def test_ambiguous_uuid_prefix_is_refused() -> None:
    with pytest.raises(GpushareError, match="names more than one device"):
        grant("MIG-0f000000")


def test_limit_counts_against_its_mig_device() -> None:
    held = (Lease("a", "held", "b", "/b", (Share(0, PARTS[0], 3 << 30),), 1, 1),)
    assert [share.memory_limit_bytes for share in grant("1:1", "4", held=held)] == [4 << 30]
    with pytest.raises(CapacityError, match="1 GiB free of 4 GiB"):
        grant("1:0", "2", held=held)


@pytest.mark.parametrize(
    ("allowed", "uuids"), [(("1",), MIG_UUIDS), (("1:1",), MIG_UUIDS[1:]), ((UUIDS[1],), MIG_UUIDS)]
)
def test_policy_allows_gpu_or_mig_device(allowed: tuple[str, ...], uuids: tuple[str, ...]) -> None:
    config = NODE.config._replace(policy=NODE.config.policy._replace(allowed_devices=allowed))
    assert tuple(share.device.uuid for share in grant("all", host=Node(config, HOST))) == uuids


def test_lease_keeps_mig_device() -> None:
    lease = Lease("c", "held", "b", "/b", (Share(0, PARTS[1], 1 << 30),), 1, 1)
    assert leasefile.from_json(leasefile.to_json(lease), "c") == lease


def test_selection_by_gpu_index_is_kept() -> None:
    assert dialects.parse_devices("N", "1", HOST, any_allowed=False) == Selection("list", names=("1",))
