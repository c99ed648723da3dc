"""Devices that other software put into config.json before us: CDI, DRA, NVIDIA's own runtime, a device plugin.

    read(env, annotations, spec, inventory) -> Request | None      names the devices, sets no limit
    minors(spec)                            -> tuple[int, ...]     of the GPUs in the spec
    allows_everything(spec)                 -> bool                --privileged: a rule for all devices
    same_gpus(one, other, inventory)        -> bool                whether two selections name the same GPUs

Often with NVIDIA_VISIBLE_DEVICES=void, which then only means that the devices are there already. A container with
access to every device (--privileged) has the host's whole list in its spec; that is nobody's request. Start path.
"""

from __future__ import annotations

from .. import oci
from ..errors import DeviceError
from ..light import Any, Optional
from ..model import Inventory, Request, Selection
from . import Env, find_devices, nvidia

_MODESET_MINOR = 254  # 254 and 255 are control nodes


def _allows_everything(rule: Any) -> bool:
    """A device rule without type and numbers, as --privileged makes it."""
    return (
        isinstance(rule, dict)
        and rule.get("allow") is True
        and rule.get("type") in (None, "", "a")
        and rule.get("major") in (None, -1)
    )


def allows_everything(spec: dict[str, Any]) -> bool:
    return any(map(_allows_everything, oci.items(spec, "linux", "resources", "devices")))


def same_gpus(one: Selection, other: Selection, inventory: Inventory) -> bool:
    """By GPU, not by name: an index and a uuid can be the same one, and a MIG device has its GPU's node."""

    def gpus(selection: Selection) -> set[str]:
        found = (find_devices("", "", name, inventory) for name in selection.names)
        return {device.parent or device.uuid for some in found for device in some}

    return gpus(one) == gpus(other)


def _minor_of(path: object) -> int:
    """7 for /dev/nvidia7; -1 for anything else."""
    if not isinstance(path, str) or not path.startswith(nvidia.DEVICE_PREFIX):
        return -1
    number = path[len(nvidia.DEVICE_PREFIX) :]
    return int(number) if number.isascii() and number.isdigit() and len(number) <= 3 else -1


def minors(spec: dict[str, Any]) -> tuple[int, ...]:
    """In the order of the spec, each once."""
    if allows_everything(spec):
        return ()
    paths = [device.get("path") for device in oci.items(spec, "linux", "devices") if isinstance(device, dict)]
    paths += [mount.get("destination") for mount in oci.items(spec, "mounts") if isinstance(mount, dict)]
    found = (_minor_of(path) for path in paths)
    return tuple(dict.fromkeys(minor for minor in found if 0 <= minor < _MODESET_MINOR))


def read(env: Env, annotations: dict[str, str], spec: dict[str, Any], inventory: Inventory) -> Optional[Request]:
    """The devices, by uuid. Raises DeviceError for one that this host's driver does not have."""
    by_minor = {device.minor: device for device in inventory.devices}
    found = minors(spec)
    if not found:
        return None
    missing = next((minor for minor in found if minor not in by_minor), None)
    if missing is not None:
        raise DeviceError(
            f"config.json has {nvidia.DEVICE_PREFIX}{missing}, which the driver does not know", "run gpushare refresh"
        )
    text = ",".join(f"{nvidia.DEVICE_PREFIX}{minor}" for minor in found)
    return Request(
        "injected",
        Selection("list", names=tuple(by_minor[minor].uuid for minor in found)),
        nvidia.capabilities(env),
        sources=(("devices in config.json", text),),
    )
