"""Recognise hosts that gpushare does not support, after something that a start needs was not found.

    of_kind(root)      -> DeviceError or None   a kind of host whose driver has no devices or no CUDA to share
    of_driver(version) -> DeviceError or None   a driver that is too old

docs/support.md lists them. Sources: NVIDIA's "CUDA on WSL" guide (/dev/dxg in place of NVIDIA's devices), the file
/etc/nv_tegra_release and the device /dev/nvmap of Jetson Linux, and NVIDIA's vGPU guide (the module nvidia_vgpu_vfio
of the host's driver, which comes without CUDA).
"""

from __future__ import annotations

import os
from typing import NamedTuple, Optional

from ..core.errors import DeviceError

OLDEST_DRIVER = 470  # drivertable.py has the names of the files since this branch


class _Kind(NamedTuple):
    """One kind of host. It has one of `paths`, which are below the driver root."""

    paths: tuple[str, ...]
    why: str
    hint: str


_LINUX = "use a Linux host with NVIDIA's driver for data centre, workstation or GeForce GPUs"
_KINDS = (
    _Kind(("dev/dxg",), "WSL2 is not supported: its GPU has no NVIDIA device that a container could be given", _LINUX),
    _Kind(
        ("etc/nv_tegra_release", "dev/nvmap"),
        "Jetson (Tegra) is not supported: its GPU has no NVIDIA device that a container could be given",
        _LINUX,
    ),
    _Kind(
        ("sys/module/nvidia_vgpu_vfio",),
        "a vGPU host is not supported: the driver of NVIDIA's vGPU manager has no CUDA",
        "install gpushare in the virtual machines",
    ),
)


def of_kind(root: str) -> Optional[DeviceError]:
    """Return the refusal for the kind of host with this driver root. A host can have these files and a supported GPU
    too, so only a caller that found no driver, device or libcuda may ask."""
    for kind in _KINDS:
        if any(os.path.lexists(os.path.join(root, path)) for path in kind.paths):
            return DeviceError(kind.why, kind.hint)
    return None


def of_driver(version: str) -> Optional[DeviceError]:
    """Return the refusal for a driver whose files gpushare does not know."""
    branch = version.partition(".")[0]
    if not branch.isdigit() or int(branch) >= OLDEST_DRIVER:
        return None
    return DeviceError(f"driver {version} is not supported", f"install driver {OLDEST_DRIVER} or newer")
