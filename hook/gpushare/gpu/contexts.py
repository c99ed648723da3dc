"""Memory of one process's CUDA context on a device: measured on this host, or estimated.

    key(device, driver, mps)        -> the kind of device: equal ones are measured once
    of(device, inventory, mps)      -> Context | None      the measurement, or why there is none
    with_measured(inventory, found) -> Inventory           its devices with the measured sizes
    under_mps(device, inventory)    -> Device              with the size that a client of MPS has there
    estimated_bytes(model, arch, multiprocessors)

Pure. contextprobe.py measures, at `gpushare refresh` only.

Reported sizes of a bare context: Tesla K80 93 MiB (13 multiprocessors; ollama37 issue 509), RTX 4060 Ti 107 MiB (34)
and RTX PRO 6000 Blackwell 555 MiB (188; both llama.cpp pull request 23604), RTX 3090 256 MiB (82; InvokeAI issue 9413),
RTX 6000 Ada 426 MiB (142), and 616 MiB on an unnamed GPU. All but the first and the last are 2 KiB for each thread that
the multiprocessors can hold, and about 8 MiB. The estimate adds 96 MiB to the 2 KiB, so it exceeds all of them: an
estimate that is too low would let a container exceed its limit.
"""

from __future__ import annotations

from typing import Optional

from ..core import constants
from ..core.model import Context, Device, Inventory

DEFAULT_BYTES = 640 << 20  # where NVML does not report the number of multiprocessors; above all reported sizes
_BASE_BYTES = 96 << 20
_THREAD_BYTES = 2 << 10
_BLOCK_BYTES = 2 << 20  # unit of the driver's allocations
_SIMULATED_BYTES = 300 << 20
# compute capability -> (cores, resident threads) of a multiprocessor: CUDA C++ Programming Guide, chapter "Compute
# Capabilities"
_PROCESSORS = {
    "3.5": (192, 2048), "3.7": (192, 2048), "5.0": (128, 2048), "5.2": (128, 2048), "6.0": (64, 2048),
    "6.1": (128, 2048), "7.0": (64, 2048), "7.5": (64, 1024), "8.0": (64, 2048), "8.6": (128, 1536), "8.7": (128, 1536),
    "8.9": (128, 1536), "9.0": (128, 2048), "10.0": (128, 2048), "10.3": (128, 2048), "12.0": (128, 1536),
    "12.1": (128, 1536),
}  # fmt: skip
_UNKNOWN = (64, 2048)  # the fewest cores and the most threads, so that the estimate is not too low


def multiprocessors(arch: str, cores: int) -> int:
    """Return the number of multiprocessors of a GPU with this number of cores."""
    return cores // _PROCESSORS.get(arch, _UNKNOWN)[0]


def estimated_bytes(model: str, arch: str, processors: int) -> int:
    """Return a size that a context on this hardware should not exceed. `processors`: 0 if unknown."""
    if model.startswith(constants.SIMULATED_MODEL):
        return _SIMULATED_BYTES
    if not processors:
        return DEFAULT_BYTES
    return _BASE_BYTES + processors * _PROCESSORS.get(arch, _UNKNOWN)[1] * _THREAD_BYTES


def rounded(size: int) -> int:
    """Return a measured size in whole blocks."""
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES


def key(device: Device, driver: str, mps: bool = False) -> tuple[str, str, str, bool]:
    """Return what a context's size depends on: the fields of Context before the size."""
    return device.model, driver, device.profile, mps


def of(device: Device, inventory: Inventory, mps: bool = False) -> Optional[Context]:
    """Return the measurement of this kind of device, or why there is none; None: it was not tried."""
    wanted = key(device, inventory.driver_version, mps)
    return next((one for one in inventory.contexts if one[:4] == wanted), None)


def is_measured(device: Device, inventory: Inventory) -> bool:
    found = of(device, inventory)
    return found is not None and found.context_bytes > 0


def _with_size(device: Device, found: Optional[Context]) -> Device:
    return device._replace(context_bytes=found.context_bytes) if found is not None and found.context_bytes else device


def with_measured(inventory: Inventory, found: tuple[Context, ...]) -> Inventory:
    """Return `inventory` with these measurements; those of another driver do not count."""
    mine = inventory._replace(contexts=tuple(one for one in found if one.driver == inventory.driver_version))
    return mine._replace(
        devices=tuple(_with_size(device, of(device, mine)) for device in mine.devices),
        mig=tuple(_with_size(device, of(device, mine)) for device in mine.mig),
    )


def under_mps(device: Device, inventory: Inventory) -> Device:
    """Return `device` for a container whose processes are clients of MPS. Without a measurement the size stays: a
    client needs no more than another process (NVIDIA's MPS guide, "Reduced On-GPU Context Storage")."""
    return _with_size(device, of(device, inventory, mps=True))
