"""Read the host's inventory: devices from <root>/proc/driver/nvidia; sizes, brands and MIG uuids from NVML.

    driver_version(root)               -> str                 short read; raises DeviceError
    bus_ids(root)                      -> tuple[str, ...]     directory names only; to detect a stale inventory
    read_inventory(root, ...)          -> Inventory           for `refresh`: with NVML in a child process
    mig_instances(root)                -> tuple[str, ...]     MIG instances; to detect a stale inventory

NVML is queried only when the inventory is compiled (nvml.py). The marker file `.gpushare-sim` of a simulated root may
contain JSON with values that its NVML lacks: {"context_bytes": N, "brand": "tesla", "arch": "8.6",
"mig": [[gpu minor, uuid, index, gpu instance, compute instance, memory bytes], ...]}.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Optional

from ..core import constants
from ..core.errors import DeviceError
from ..core.model import Device, Inventory
from ..core.quoting import shown
from . import contexts, driverfiles, mig, nvml, unsupported
from .driverroot import below, short_read

if TYPE_CHECKING:  # not on the start path
    from . import nvml

NVML_DEADLINE_S = 10.0  # well below the time limit of a hook
_PROC = "proc/driver/nvidia"
# driver branch -> supported CUDA version, for hosts whose libcuda does not report it (release notes of CUDA)
CUDA_VERSIONS = {
    "390": "9.1", "396": "9.2", "410": "10.0", "418": "10.1", "440": "10.2", "450": "11.0", "455": "11.1",
    "460": "11.2", "465": "11.3", "470": "11.4", "495": "11.5", "510": "11.6", "515": "11.7", "520": "11.8",
    "525": "12.0", "530": "12.1", "535": "12.2", "545": "12.3", "550": "12.4", "555": "12.5", "560": "12.6",
    "565": "12.7", "570": "12.8", "575": "12.9", "580": "13.0", "590": "13.1",
}  # fmt: skip


def driver_version(root: str) -> str:
    """The version of the loaded kernel module, as in the names of its libraries."""
    text = short_read(os.path.join(root, "sys/module/nvidia/version"))
    if text and text.strip():
        return text.strip()
    text = short_read(os.path.join(root, _PROC, "version"))
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Wed ...
    for field in (text or "").partition("\n")[0].split():
        if field[0].isdigit() and "." in field and field.replace(".", "").isdigit():
            return field
    proc = os.path.join(root, _PROC)
    hint = "load it" if root == "/" else "load it, or set driver.libraries in place of driver.root"
    raise unsupported.of_kind(root) or DeviceError(f"no NVIDIA driver is loaded (no version in {proc})", hint)


def bus_ids(root: str) -> tuple[str, ...]:
    """PCI addresses of all GPUs, in PCI order."""
    try:
        return tuple(sorted(os.listdir(os.path.join(root, _PROC, "gpus")), key=_pci_key))
    except OSError:
        return ()


def _pci_key(bus_id: str) -> tuple[tuple[int, ...], str]:
    """PCI order: domain, bus, device, function as numbers."""
    try:
        return tuple(int(part, 16) for part in bus_id.replace(".", ":").split(":")), bus_id
    except ValueError:
        return (), bus_id


def _information(root: str, bus_id: str) -> dict[str, str]:
    """The `Key: value` lines of one GPU's information file."""
    path = os.path.join(root, _PROC, "gpus", bus_id, "information")
    text = short_read(path, 16384)
    if text is None:
        raise DeviceError(f"cannot read {path}", "check that the driver is loaded")
    lines = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def _device(index: int, bus_id: str, facts: dict[str, str], answer: nvml.Answer, context_bytes: int) -> Device:
    uuid, minor = facts.get("GPU UUID", ""), facts.get("Device Minor", "")
    if not uuid.startswith("GPU-") or "?" in uuid or not minor.isdigit():
        raise DeviceError(
            f"the driver has not initialised the GPU at {bus_id} (uuid {shown(uuid)})", "run nvidia-smi once as root"
        )
    model = facts.get("Model", "unknown")
    gpu = answer.gpus[uuid]
    return Device(
        *(index, uuid, int(minor), bus_id, model, gpu.memory_bytes),
        context_bytes=context_bytes
        or contexts.estimated_bytes(model, gpu.arch, contexts.multiprocessors(gpu.arch, gpu.cores)),
        brand=gpu.brand,
        arch=gpu.arch,
        reserved_bytes=gpu.reserved_bytes,
    )


def mig_instances(root: str) -> tuple[str, ...]:
    """Every MIG instance that the kernel lists; to detect a stale inventory."""
    return tuple(f"gpu{one.gpu_minor}/gi{one.gpu_instance}/ci{one.compute_instance}" for one in mig.instances(root))


def _mig_devices(root: str, devices: tuple[Device, ...], answer: nvml.Answer, context_bytes: int) -> tuple[Device, ...]:
    """The MIG devices of all GPUs: listed by the kernel, named by NVML. A device that NVML does not name gets a name in
    the format of drivers before 470, and cannot be granted."""
    found = []
    for device in devices:
        reported = answer.gpus[device.uuid].mig
        names_of = {(one.gpu_instance, one.compute_instance): one for one in reported}
        instances = [one[1:] for one in mig.instances(root) if one.gpu_minor == device.minor]
        for number, (gi, ci) in enumerate(instances):
            mine = device._replace(parent=device.uuid, gpu_instance=gi, compute_instance=ci)
            one = names_of.get((gi, ci))
            if one is None:
                mine = mine._replace(
                    uuid=f"MIG-{device.uuid}/{gi}/{ci}", mig_index=number, memory_bytes=0, reserved_bytes=0
                )
            else:
                mine = mine._replace(
                    uuid=one.uuid,
                    mig_index=one.index,
                    memory_bytes=one.memory_bytes,
                    reserved_bytes=one.reserved_bytes,
                    profile=one.profile or f"{one.memory_bytes >> 20} MiB",
                )
                if one.multiprocessors and not context_bytes:
                    size = contexts.estimated_bytes(device.model, device.arch, one.multiprocessors)
                    mine = mine._replace(context_bytes=size)
            found.append(mine)
    return tuple(sorted(found, key=lambda device: (device.index, device.mig_index)))


def _marker(root: str) -> Optional[dict[str, Any]]:
    """The marker file of a simulated root; None for a real root."""
    text = short_read(os.path.join(root, constants.SIM_MARKER), 65536)
    if text is None:
        return None
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = {}
    return value if isinstance(value, dict) else {}


def _with_marker(answer: nvml.Answer, marker: dict[str, Any], minors: dict[int, str]) -> nvml.Answer:
    """Add the values of the marker file to NVML's answer. `minors`: uuid of the GPU with that minor."""
    gpus = dict(answer.gpus)
    for uuid, gpu in answer.gpus.items():
        gpus[uuid] = gpu._replace(brand=marker.get("brand", gpu.brand), arch=marker.get("arch", gpu.arch))
    for minor, *fields in marker.get("mig", ()):
        gpu = gpus[minors[minor]]
        gpus[minors[minor]] = gpu._replace(mig=(*gpu.mig, nvml.Mig(*fields)))
    return answer._replace(gpus=gpus)


def _roots(root: str, version: str, libraries: str, dev: str) -> tuple[str, str]:
    """(root of the driver's files, root that has dev): as configured, else where they are."""
    files = libraries or driverfiles.root_of(root, version)
    having = (one for one in (root, files) if os.path.lexists(os.path.join(below(one, "dev"), "nvidiactl")))
    return files, dev or next(having, root)


def _ask(root: str, version: str, facts: list[dict[str, str]], deadline_s: float) -> nvml.Answer:
    """NVML's answer with an entry for each GPU; the entry is empty for a GPU that NVML did not report."""
    answer = nvml.Answer({})
    if facts:
        libraries = driverfiles.nvml_library(root, version), driverfiles.cuda_library(root, version)
        answer = nvml.ask(*libraries, deadline_s)
    uuids = [fact.get("GPU UUID", "") for fact in facts]
    return answer._replace(gpus={uuid: answer.gpus.get(uuid, nvml.Gpu()) for uuid in uuids})


def read_inventory(root: str, deadline_s: float = NVML_DEADLINE_S, libraries: str = "", dev: str = "") -> Inventory:
    """The whole inventory, in PCI order. Without an answer from NVML the sizes are 0 and percentages are refused.
    `libraries`, `dev`: the roots of the driver's files and of dev; "": they are looked for."""
    _refuse_share(root)
    version = driver_version(root)
    marker = _marker(root)
    buses = bus_ids(root)
    refusal = unsupported.of_driver(version) or (None if buses else unsupported.of_kind(root))
    if refusal is not None:
        raise refusal
    facts = [_information(root, bus) for bus in buses]
    files, nodes = _roots(root, version, libraries, dev)
    answer = _ask(files, version, facts, deadline_s)
    if marker:
        minors = {int(fact["Device Minor"]): fact["GPU UUID"] for fact in facts}
        answer = _with_marker(answer, marker, minors)
    context = marker.get("context_bytes", 0) if marker else 0
    context_bytes = context if isinstance(context, int) and context > 0 else 0
    devices = tuple(
        _device(index, bus, fact, answer, context_bytes) for index, (bus, fact) in enumerate(zip(buses, facts))
    )
    cuda_version = answer.cuda_version or CUDA_VERSIONS.get(version.partition(".")[0], "")
    mig = _mig_devices(root, devices, answer, context_bytes)
    found = Inventory(root, version, devices, marker is not None, mig, cuda_version, host_memory_bytes())
    found = found._replace(libraries="" if files == root else files, dev="" if nodes == root else nodes)
    return found._replace(stale_programs=driverfiles.stale_programs(files, version))


def _refuse_share(root: str) -> None:
    """Raise DeviceError in a container that has a share, as with docker in docker: its libcuda is the shim, and its
    limits would apply to the inner containers together, whatever each of them was granted."""
    if os.path.lexists(os.path.join(root, constants.LIMITS[1:])):
        raise DeviceError(
            f"{constants.LIMITS}: this is a container with a share, and a share cannot be divided",
            "start its containers on the host, each with a share of its own",
        )


def host_memory_bytes() -> int:
    """MemTotal of this host; 0 when unknown."""
    found = (line.split() for line in (short_read("/proc/meminfo", 4096) or "").splitlines())
    return next((1024 * int(fields[1]) for fields in found if fields[:1] == ["MemTotal:"] and fields[1].isdigit()), 0)
