"""The NVIDIA dialect: NVIDIA_VISIBLE_DEVICES, NVIDIA_DRIVER_CAPABILITIES, volume requests.

    read(bundle, inventory)                 -> Request | None
    names_device(bundle)                    -> bool                cheap: whether this container names a device
    device_source(bundle)                   -> (name, value)       that names devices; the value may be empty
    unqualified(value)                      -> str                 devices without the vendor and class of CDI
    conflicts(spec)                         -> tuple[str, ...]     what other tools added to config.json
    memory_hook_gpus(hook)                  -> uuids or None       of a hook that limits memory in the driver
    is_tool_hook, is_driver_mount, is_node_mount, is_device        one entry of config.json

Source: NVIDIA container toolkit documentation; names of its hooks as of 1.20. Runs on the start path.
"""

from __future__ import annotations

import os
from typing import Any, Optional

from ...core import constants
from ...core.errors import RequestError
from ...core.model import Bundle, Inventory, Request
from ...core.quoting import shown
from .. import speckeys
from . import Env, one_value, parse_devices

ENV_DEVICES = "NVIDIA_VISIBLE_DEVICES"
ENV_CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"
VOLUME_ROOT = "/var/run/nvidia-container-devices"
_HOOK_PROGRAMS = frozenset(
    (
        "nvidia-container-runtime-hook",
        "nvidia-container-toolkit",
        "nvidia-container-cli",
        "nvidia-cdi-hook",
        "nvidia-ctk",
    )
)
MEMORY_HOOK = "apply-cuda-memory-limits"  # its subcommand
_DRIVER_LIBRARIES = ("libcuda.so", "libnvidia-ml.so", "libcudadebugger.so", "libnvidia-ptxjitcompiler.so")
_CDI_GPU = "nvidia.com/gpu"
DEVICE_PREFIX = "/dev/nvidia"


def _values(env: Env, name: str) -> list[str]:
    return [value for key, value in env if key == name]


def names_device(bundle: Bundle) -> bool:
    """Return whether the container names a device in this dialect. The names are not checked."""
    value = "".join(_values(bundle.env, ENV_DEVICES)[-1:])  # the last one counts, as in the container's libc
    words = [word.strip() for word in value.split(",")]
    return bool(bundle.volumes) or (value.strip() not in ("", "none") and "void" not in words)


def device_source(bundle: Bundle) -> tuple[str, str]:
    """Return (name, value) that names devices. Volume requests win over the variable, because images cannot add
    them."""
    if bundle.volumes:
        return f"mounts at {VOLUME_ROOT}", ",".join(bundle.volumes)
    return ENV_DEVICES, one_value(ENV_DEVICES, _values(bundle.env, ENV_DEVICES)) or ""


def unqualified(value: str) -> str:
    """Replace CDI names of GPUs by their last part, an index or a uuid. Forms: nvidia.com/gpu=0; with the vendor of a
    device plugin k8s.device-plugin.nvidia.com/gpu=GPU-<uuid>; in a mount cdi/nvidia.com/gpu/0. nvidia-ctk can write
    gpu0 and mig0:1 (--device-name-strategy type-index)."""
    if _CDI_GPU not in value:
        return value
    return ",".join(_cdi_gpu(token.strip()) or token for token in value.split(","))


def _cdi_gpu(token: str) -> str:
    """Return the last part of a CDI name of a GPU; "" for any other name."""
    kind, _, name = token.rpartition("/" if token.startswith("cdi/") else "=")
    if name[:3] in ("gpu", "mig") and name[3:4].isdigit():
        name = name[3:]
    return name if kind.endswith(_CDI_GPU) else ""


def read(bundle: Bundle, inventory: Inventory) -> Optional[Request]:
    """Return the request; None if there is none."""
    variable = one_value(ENV_DEVICES, _values(bundle.env, ENV_DEVICES))
    cdi = next((name for name in bundle.volumes if name.startswith("cdi/") and not _cdi_gpu(name)), None)
    if cdi is not None:
        raise RequestError(
            f"the mount at {VOLUME_ROOT}/{cdi} does not name an NVIDIA GPU",
            "put a GPU's index or uuid into the mount's path",
        )
    name, value = device_source(bundle)
    ignored = []
    if name != ENV_DEVICES and variable:
        ignored.append(f"{ENV_DEVICES}={shown(variable)}: {name} name the devices")
    chosen = parse_devices(name, unqualified(value), inventory, any_allowed=False)
    if chosen is None:
        return None
    sources = [(name, value)]
    named = _values(bundle.env, ENV_CAPABILITIES)
    if named and named[-1]:
        sources.append((ENV_CAPABILITIES, named[-1]))
    return Request("nvidia", chosen, sources=tuple(sources), ignored=tuple(ignored))


def target_of(path: object) -> str:
    """Normalise a path of config.json as runtimes do: "dev//nvidia0" is "/dev/nvidia0". "" if it is no path."""
    return "/" + os.path.normpath(f"/{path}").lstrip("/") if isinstance(path, str) and path else ""


def is_tool_hook(hook: Any) -> bool:
    """Return whether an entry of `hooks` is one of NVIDIA's tools."""
    path = hook.get("path") if isinstance(hook, dict) else None
    return isinstance(path, str) and path.rpartition("/")[2].partition(".")[0] in _HOOK_PROGRAMS


def memory_hook_gpus(hook: Any) -> Optional[tuple[str, ...]]:
    """Return the GPUs of a hook `nvidia-ctk hook apply-cuda-memory-limits --gpu-id UUID...`; None for any other
    hook."""
    args = hook.get("args") if is_tool_hook(hook) else None
    if not isinstance(args, list) or MEMORY_HOOK not in args[1:3]:
        return None
    words = [word if isinstance(word, str) else "" for word in args]
    values = [after for word, after in zip(words, words[1:]) if word == "--gpu-id"]
    values += [word.partition("=")[2] for word in words if word.startswith("--gpu-id=")]
    return tuple(uuid.strip() for value in values for uuid in value.split(","))


def is_driver_mount(mount: Any) -> bool:
    """Return whether an entry of `mounts` places a driver library where a loader could find it before the shim."""
    path = mount.get("destination") if isinstance(mount, dict) else ""
    return "lib" in str(path) and target_of(path).rpartition("/")[2].startswith(_DRIVER_LIBRARIES)


def is_node_mount(mount: Any) -> bool:
    """Return whether an entry of `mounts` places a device node of the driver where programs look for it."""
    path = mount.get("destination") if isinstance(mount, dict) else ""
    return "nvidia" in str(path) and target_of(path).startswith(DEVICE_PREFIX)


def is_device(device: Any) -> bool:
    """Return whether an entry of `linux.devices` is the driver's."""
    path = device.get("path") if isinstance(device, dict) else None
    return isinstance(path, str) and (
        device.get("major") == constants.NVIDIA_MAJOR or target_of(path).startswith(DEVICE_PREFIX)
    )


def conflicts(spec: dict[str, Any]) -> tuple[str, ...]:
    """Return NVIDIA hooks, driver mounts and device nodes that other tools added to config.json."""
    found = [
        f"{stage} hook {shown(hook['path'])}"
        for stage, hooks in speckeys.section(spec, "hooks").items()
        for hook in (hooks if isinstance(hooks, list) else ())
        if is_tool_hook(hook)
    ]
    mounts = speckeys.items(spec, "mounts")
    for is_theirs in (is_driver_mount, is_node_mount):
        found += [f"mount at {shown(mount['destination'])}" for mount in mounts if is_theirs(mount)]
    return tuple(
        found + [f"device {shown(d['path'])}" for d in speckeys.items(spec, "linux", "devices") if is_device(d)]
    )
