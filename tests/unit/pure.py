"""Plain values for tests without effects: a host with two GPUs, containers, images."""

from __future__ import annotations

from typing import Any

from gpushare.allocation import placement
from gpushare.core import errors
from gpushare.core.model import Bundle, Config, Device, Image, Inventory, Lease, Node, Policy, Share
from gpushare.gpu.driverfiles import DriverFiles, Library
from gpushare.gpu.driverroot import HostNode
from gpushare.request import oci

VERSION = "535.261.03"
UUIDS = ("GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-1111-1111-1111-111111111111")


def kind(error: errors.GpushareError) -> str:
    """The name of its class in core/errors.py, which has one class for each exit code."""
    return next(one.__name__ for one in type(error).__mro__ if one.__module__ == errors.__name__)


def device(index: int, **changes: Any) -> Device:
    fixed = Device(index, UUIDS[index], index, f"0000:0{index + 1}:00.0", "Test GPU", 16 << 30, 512 << 20)
    return fixed._replace(**changes)


def node(devices: int = 2, memory_bytes: int = 16 << 30, overcommit: float = 1.0, **policy: Any) -> Node:
    inventory = Inventory("/", VERSION, tuple(device(i, memory_bytes=memory_bytes) for i in range(devices)))
    config = Config(memory_overcommit=overcommit, policy=Policy(**policy), usage_journal="none")
    return Node(config, inventory)


def bundle(*env: str, annotations: Any = None, container_id: str = "c1", cri: bool = True, **spec: Any) -> Bundle:
    """A container with these `NAME=value` lines; keyword arguments are further keys of config.json."""
    spec = {"root": {"path": "rootfs"}, "annotations": annotations, **spec}
    spec["process"] = {"env": list(env), **spec.get("process", {})}
    return oci.bundle_of(oci.State(container_id, 0, "created", "/bundle", {}), spec, cri)


def library(stem: str, *endings: str) -> Library:
    name = f"{stem}.so.{VERSION}"
    chain = (name, *(f"{stem}.{ending}" for ending in endings))
    links = tuple((chain[i + 1], chain[i]) for i in range(len(endings)))
    return Library(stem, name, f"/usr/lib/x86_64-linux-gnu/{name}", links)


def files(**changes: Any) -> DriverFiles:
    fixed = DriverFiles(
        version=VERSION,
        cuda=library("libcuda", "so.1", "so"),
        nvml=library("libnvidia-ml", "so.1", "so"),
        asked_cuda=True,
        asked_nvml=True,
        libraries=(library("libnvidia-ptxjitcompiler", "so.1"), library("libnvidia-gpucomp")),
        programs=(("nvidia-smi", "/usr/bin/nvidia-smi"),),
        nodes=(HostNode("nvidiactl", "/dev/nvidiactl", 195, 255), HostNode("nvidia-uvm", "/dev/nvidia-uvm", 511, 0)),
        missing_nodes=("nvidia-uvm-tools",),
    )
    return fixed._replace(**changes)


def image(**changes: Any) -> Image:
    return Image("/usr/lib/x86_64-linux-gnu", "x86_64", True, "")._replace(**changes)


def share(slot: int, index: int, limit_bytes: Any) -> Share:
    return Share(slot, device(index), limit_bytes)


def lease(*shares: Share, container_id: str = "c1") -> Lease:
    return Lease(container_id, "reserved", "boot", "/bundle", shares, 1, 1)


def ledger(*leases: Lease, blocked: Any = (), **policy: Any) -> placement.Ledger:
    return placement.ledger_of(leases, Policy(**policy), blocked)
