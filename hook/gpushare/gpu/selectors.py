"""Device selectors of requests and configurations: index, uuid, or <gpu>:<mig>. Pure (start path).

find_devices(name, value, token, inventory) -> tuple[Device, ...]   several: MIG devices of one GPU
device_name(device)                         -> str                  0, or 0:1
usable_devices(inventory)                   -> tuple[Device, ...]   devices that can be granted
is_among(device, listed)                    -> bool
no_device(inventory)                        -> DeviceError          a driver that has no GPU
same_gpus(one, other, inventory)            -> bool                 whether two selections name the same GPUs
narrowest(one, other, inventory)            -> Selection | None     of two that do: what both name
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Optional

from ..core.errors import DeviceError
from ..core.model import Device, Inventory, Selection
from ..core.quantity import wrong
from ..core.quoting import setting, shown

_MIN_UUID_PREFIX = len("GPU-") + 8  # as in the examples of NVIDIA's own documentation
SELECTORS = "all, none, or a comma-separated list of indexes, GPU-<uuid>, MIG-<uuid> and <gpu>:<mig>"
HINT = f"write {SELECTORS}"


def is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def device_name(device: Device) -> str:
    """The short selector of a device: 0, or 0:1 for a MIG device."""
    return f"{device.index}:{device.mig_index}" if device.parent else str(device.index)


def is_among(device: Device, listed: Iterable[str]) -> bool:
    """Whether one of `listed` selects this device: index, `<gpu>:<mig>`, uuid in any case, or the uuid of its GPU."""
    own = {name.lower() for name in (device.uuid, str(device.index), device.parent, device_name(device)) if name}
    return not own.isdisjoint(name.lower() for name in listed)


def no_device(inventory: Inventory) -> DeviceError:
    """The error on a host whose driver has no GPU."""
    return DeviceError(
        f"no NVIDIA device on this host (driver root {inventory.root})",
        "see the kernel's log for the reason: dmesg | grep -i nvrm",
    )


def usable_devices(inventory: Inventory) -> tuple[Device, ...]:
    """Devices that can be granted, in the order of a container's slots. MIG devices replace their GPU, because CUDA
    shows only the MIG devices of such a GPU."""
    divided = {device.parent for device in inventory.mig}
    whole = [device for device in inventory.devices if device.uuid not in divided]
    return tuple(sorted((*whole, *inventory.mig), key=lambda device: (device.index, device.mig_index)))


def _present(inventory: Inventory) -> str:
    """The host's devices, for an error."""
    if not inventory.devices:
        return "this host has no device"
    some = (*inventory.devices[:8], *inventory.mig[:8])
    return "this host has " + ", ".join(f"{device_name(device)} ({device.uuid})" for device in some)


def _named_gpu(token: str, inventory: Inventory) -> list[Device]:
    """GPUs by index, or by uuid (any case, or a prefix)."""
    if is_number(token):
        index = int(token) if len(token) <= 6 else -1
        return [device for device in inventory.devices if device.index == index]
    return [device for device in inventory.devices if device.uuid.lower().startswith(token.lower())]


def _named_mig(token: str, inventory: Inventory) -> list[Device]:
    """MIG devices by `<gpu>:<mig>`, by uuid, or by the name of drivers before 470: MIG-GPU-<uuid>/<gi>/<ci>."""
    gpu, colon, instance = token.partition(":")
    if colon and is_number(gpu) and is_number(instance):
        numbers = (int(gpu), int(instance)) if len(token) <= 12 else (-1, -1)
        return [device for device in inventory.mig if (device.index, device.mig_index) == numbers]
    if token[4:8].upper() == "GPU-":
        return [
            device
            for device in inventory.mig
            if token.lower() == f"mig-{device.parent}/{device.gpu_instance}/{device.compute_instance}".lower()
        ]
    return [device for device in inventory.mig if device.uuid.lower().startswith(token.lower())]


def find_devices(name: str, value: str, token: str, inventory: Inventory, hint: str = HINT) -> tuple[Device, ...]:
    """The device that `token` selects, or all MIG devices of that GPU. Raises if it selects no device or several.
    `hint`: the allowed values."""
    gpu, colon, instance = token.partition(":")
    is_mig = len(token) >= _MIN_UUID_PREFIX and token[:4].upper() == "MIG-"
    if is_number(token) or (token[:4].upper() == "GPU-" and len(token) >= _MIN_UUID_PREFIX):
        found, what = _named_gpu(token, inventory), "device"
    elif token[:4].upper() == "MIG-" or (colon and is_number(gpu) and is_number(instance)):
        found, what = _named_mig(token, inventory) if is_mig or colon else [], "MIG device"
    else:
        raise wrong(name, value, f"{shown(token)} does not name a device", hint)
    if len(found) > 1:
        raise wrong(name, value, f"{shown(token)} names more than one device", "write the whole uuid")
    if not found:
        raise DeviceError(f"{setting(name, value)}: no {what} {shown(token)}", _present(inventory))
    return tuple(device for device in inventory.mig if device.parent == found[0].uuid) or (found[0],)


def _devices(selection: Selection, inventory: Inventory) -> list[Device]:
    """Return GPUs, and MIG devices of divided ones."""
    return [device for name in selection.names for device in find_devices("", "", name, inventory)]


def same_gpus(one: Selection, other: Selection, inventory: Inventory) -> bool:
    """Compare by GPU, not by name: an index and a uuid can be the same one, and a MIG device has its GPU's node."""
    ones, others = ({device.parent or device.uuid for device in _devices(names, inventory)} for names in (one, other))
    return ones == others


def narrowest(one: Selection, other: Selection, inventory: Inventory) -> Optional[Selection]:
    """Return what both name; None if that is nothing, or if they name different GPUs. It differs from both only where a
    GPU is divided: a name of one part does not mean the others."""
    allowed = {device.uuid for device in _devices(other, inventory)}
    uuids = (device.uuid for device in _devices(one, inventory) if device.uuid in allowed)
    both = tuple(dict.fromkeys(uuids))
    return one._replace(names=both) if both and same_gpus(one, other, inventory) else None
