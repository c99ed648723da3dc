"""Dialects: the languages in which a container can ask for a share. One row each, pure functions.

    read(env, annotations, spec, inventory) -> Request | None      (own.read, nvidia.read)
    parse_devices(name, value, inventory, any_allowed) -> Selection | None
    find_devices(name, value, token, inventory)        -> tuple[Device, ...]   several: MIG devices of one GPU
    device_name(device)                                -> str                  0, or 0:1
    usable_devices(inventory)                          -> tuple[Device, ...]   what can be granted
    one_value(name, values)                            -> str | None
    expand_capabilities(name, value)                   -> sorted, expanded capabilities

They raise RequestError for text that makes no sense and DeviceError for devices that are not there.
Start path: standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Optional

from ...core.errors import DeviceError, RequestError
from ...core.model import Device, Inventory, Selection
from ...core.quantity import MAX_SLOTS, wrong
from ...core.quoting import setting, shown

Env = tuple[tuple[str, str], ...]

DEFAULT_CAPABILITIES = ("compute", "utility")
# capability -> what it also brings
CAPABILITIES: dict[str, tuple[str, ...]] = {
    "compat32": (),
    "compute": (),
    "display": ("graphics",),
    "graphics": (),
    "ngx": (),
    "utility": (),
    "video": ("compute",),
}
_MIN_UUID_PREFIX = len("GPU-") + 8  # as in the examples of NVIDIA's own documentation
_DEVICES = "all, none, an index, a GPU-<uuid>, a MIG-<uuid>, <gpu>:<mig>, or several of them with commas"
_DEVICES_HINT = f"write {_DEVICES}"
_OR_ANY_HINT = f"write any, {_DEVICES}"


def one_value(name: str, values: list[str]) -> Optional[str]:
    """The value of a name that may occur more than once. Equal duplicates are harmless; others are refused,
    since which one counts would depend on the reader."""
    different = list(dict.fromkeys(values))
    if len(different) > 1:
        raise RequestError(
            f"{name} is given twice: {shown(different[0])} and {shown(different[1])}", "keep one of them"
        )
    return different[0] if different else None


def expand_capabilities(name: str, value: Optional[str]) -> tuple[str, ...]:
    """NVIDIA_DRIVER_CAPABILITIES: unset and empty mean compute and utility."""
    asked = [word.strip() for word in (value or "").split(",") if word.strip()]
    if not asked:
        return DEFAULT_CAPABILITIES
    if "all" in asked:
        asked = list(CAPABILITIES)
    unknown = next((word for word in asked if word not in CAPABILITIES), None)
    if unknown is not None:
        raise wrong(name, value or "", f"unknown capability {shown(unknown)}", f"use all, {', '.join(CAPABILITIES)}")
    return tuple(sorted({*asked, *(extra for word in asked for extra in CAPABILITIES[word])}))


def _there(inventory: Inventory) -> str:
    """What the host has, for an error."""
    if not inventory.devices:
        return "this host has no device"
    some = (*inventory.devices[:8], *inventory.mig[:8])
    return "this host has " + ", ".join(f"{device_name(device)} ({device.uuid})" for device in some)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def device_name(device: Device) -> str:
    """Its short name, as a request can write it: 0, or 0:1 for a MIG device."""
    return f"{device.index}:{device.mig_index}" if device.parent else str(device.index)


def is_among(device: Device, listed: Iterable[str]) -> bool:
    """Whether one of `listed` is this device: index, `<gpu>:<mig>`, uuid in any case, or the uuid of its GPU."""
    own = {name.lower() for name in (device.uuid, str(device.index), device.parent, device_name(device)) if name}
    return not own.isdisjoint(name.lower() for name in listed)


def usable_devices(inventory: Inventory) -> tuple[Device, ...]:
    """What can be granted, in the order in which a container counts it: GPUs, or in the place of a GPU with MIG devices
    those. CUDA sees nothing of such a GPU but them."""
    divided = {device.parent for device in inventory.mig}
    whole = [device for device in inventory.devices if device.uuid not in divided]
    return tuple(sorted((*whole, *inventory.mig), key=lambda device: (device.index, device.mig_index)))


def _named_gpu(token: str, inventory: Inventory) -> list[Device]:
    """GPUs by index, or by uuid (any case, or its beginning)."""
    if _is_number(token):
        index = int(token) if len(token) <= 6 else -1
        return [device for device in inventory.devices if device.index == index]
    return [device for device in inventory.devices if device.uuid.lower().startswith(token.lower())]


def _named_mig(token: str, inventory: Inventory) -> list[Device]:
    """MIG devices by `<gpu>:<mig>`, by uuid, or as drivers before 470 named them: MIG-GPU-<uuid>/<gi>/<ci>."""
    gpu, colon, instance = token.partition(":")
    if colon and _is_number(gpu) and _is_number(instance):
        numbers = (int(gpu), int(instance)) if len(token) <= 12 else (-1, -1)
        return [device for device in inventory.mig if (device.index, device.mig_index) == numbers]
    if token[4:8].upper() == "GPU-":
        return [
            device
            for device in inventory.mig
            if token.lower() == f"mig-{device.parent}/{device.gpu_instance}/{device.compute_instance}".lower()
        ]
    return [device for device in inventory.mig if device.uuid.lower().startswith(token.lower())]


def find_devices(
    name: str, value: str, token: str, inventory: Inventory, hint: str = _DEVICES_HINT
) -> tuple[Device, ...]:
    """What `token` names: one device, or all MIG devices of one GPU. Raises when it names nothing, or two things;
    `hint`: what may be written there."""
    gpu, colon, instance = token.partition(":")
    is_mig = len(token) >= _MIN_UUID_PREFIX and token[:4].upper() == "MIG-"
    if _is_number(token) or (token[:4].upper() == "GPU-" and len(token) >= _MIN_UUID_PREFIX):
        found, what = _named_gpu(token, inventory), "device"
    elif token[:4].upper() == "MIG-" or (colon and _is_number(gpu) and _is_number(instance)):
        found, what = _named_mig(token, inventory) if is_mig or colon else [], "MIG device"
    else:
        raise wrong(name, value, f"{shown(token)} does not name a device", hint)
    if len(found) > 1:
        raise wrong(name, value, f"{shown(token)} names more than one device", "write the whole uuid")
    if not found:
        raise DeviceError(f"{setting(name, value)}: no {what} {shown(token)}", _there(inventory))
    return tuple(device for device in inventory.mig if device.parent == found[0].uuid) or (found[0],)


def _parse_any(name: str, value: str, tokens: list[str]) -> Selection:
    """`any`, `any:2`, `any:2,model=A100,free>=20Gi`."""
    first, *words = tokens
    count = first[4:] if first.startswith("any:") else "1"
    if "=" in count:
        raise wrong(name, value, f"{shown(first)} is not a number of devices", f"write {shown('any,' + first[4:])}")
    if not _is_number(count) or len(count) > 3 or not 1 <= int(count) <= MAX_SLOTS:
        raise wrong(name, value, f"{shown(first)} is not a number of devices", f"write any:1 to any:{MAX_SLOTS}")
    if not words:
        return Selection("any", count=int(count))
    from . import conditions

    return Selection("any", count=int(count), conditions=conditions.parse(name, value, words))


def _unreplicated(token: str) -> str:
    """`GPU-<uuid>::3` without the number of a replica, which NVIDIA's device plugin adds where it shares a device by
    time-slicing (AnnotatedID in its source). All replicas are one device."""
    device, sign, replica = token.partition("::")
    return device if sign and _is_number(replica) and device else token


def parse_devices(name: str, value: str, inventory: Inventory, any_allowed: bool) -> Optional[Selection]:
    """The grammar of NVIDIA_VISIBLE_DEVICES, and `any[:N][,conditions]` where it is ours. None: empty or void, nothing
    asked.

    `void` anywhere wins, `all` next; duplicates collapse. Source: NVIDIA container toolkit, "Environment
    variables (OCI spec)"; `no-gpu-has-...` is what a scheduler writes when it found no room.
    """
    hint = _OR_ANY_HINT if any_allowed else _DEVICES_HINT
    tokens = [token.strip() for token in value.split(",")]
    refused = next((token for token in tokens if token.startswith("no-gpu-has")), None)
    if refused is not None:
        raise wrong(name, value, "the scheduler found no device for this container", "ask for less or free a device")
    if value.strip() == "" or "void" in tokens:
        return None
    if any(token == "any" or token.startswith("any:") for token in tokens) and any_allowed:
        if tokens[0] != "any" and not tokens[0].startswith("any:"):
            raise wrong(name, value, "any cannot be combined with other devices", "write any, or any:2 for two")
        return _parse_any(name, value, tokens)
    if "all" in tokens and "none" not in tokens:
        return Selection("all")
    if tokens == ["none"]:
        return Selection("none")
    if "none" in tokens:
        raise wrong(name, value, "none cannot be combined with devices", hint)
    if "" in tokens:
        raise wrong(name, value, "an empty device name", hint)
    chosen: dict[str, str] = {}
    for token in dict.fromkeys(map(_unreplicated, tokens)):
        for device in find_devices(name, value, token, inventory, hint):
            chosen.setdefault(device.uuid, token)
    if len(chosen) > MAX_SLOTS:
        raise wrong(name, value, f"more than {MAX_SLOTS} devices", f"name at most {MAX_SLOTS}")
    return Selection("list", names=tuple(dict.fromkeys(chosen.values())))
