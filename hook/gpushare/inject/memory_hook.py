"""NVIDIA's hook apply-cuda-memory-limits in config.json: whether it stays (start path, only if there is one).

    reason(hook, request, shares, inventory) -> why it is removed; "": it stays

It sets NVIDIA_GPU_MEMORY_REQUEST and NVIDIA_GPU_MEMORY_LIMIT as limits of the container's cgroup in the driver. Where
these variables set the container's limit, the driver then enforces it too, below the shim. A hook that fails ends the
start of the container, so it is removed where the driver has no such limits.
Source: NVIDIA container toolkit 1.20.1, which gives the hook to whole GPUs, and refuses a host without cgroup v2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..allocation import backends
from ..allocation.backends.dmem import regions
from ..core.model import Inventory, Request, Share
from ..core.quoting import shown
from ..request.dialects import nvidia
from ..system import rootless

_VARIABLES = ("NVIDIA_GPU_MEMORY_REQUEST", "NVIDIA_GPU_MEMORY_LIMIT")


def reason(hook: Any, request: Request, shares: Sequence[Share], inventory: Inventory) -> str:
    if not any(name in _VARIABLES for name, _ in request.sources):
        return "its variables do not set the limit"
    gpus = nvidia.memory_hook_gpus(hook) or ("",)
    by_gpu = {share.device.parent or share.device.uuid: share for share in shares}
    other = next((gpu for gpu in gpus if gpu not in by_gpu), None)
    if other is not None:
        return f"device {shown(other)} is not granted"
    if any(by_gpu[gpu].device.parent for gpu in gpus):
        return "the driver has no memory limits for MIG devices"
    own = next((by_gpu[gpu] for gpu in gpus if backends.limits_cgroup(by_gpu[gpu])), None)
    if own is not None:
        return f"the backend {own.memory_backend} sets the limit of the cgroup"
    if rootless.is_rootless():
        return "it needs rights over cgroups, and this is rootless"
    return regions.no_driver_limits(inventory) or ""
