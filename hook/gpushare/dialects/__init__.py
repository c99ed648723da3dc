"""Dialects: the languages in which a container can ask for a share. One row each, pure functions.

    read(env, annotations, spec, inventory) -> Request | None      (own.read, nvidia.read)
    parse_devices(name, value, inventory, any_allowed) -> Selection | None
    find_device(name, value, token, inventory)         -> Device
    one_value(name, values)                            -> str | None
    expand_capabilities(name, value)                   -> sorted, expanded capabilities

They raise RequestError for text that makes no sense and DeviceError for devices that are not there.
Start path: standard library only.
"""

from __future__ import annotations

from typing import Optional

from ..errors import DeviceError, RequestError
from ..model import Device, Inventory, Selection
from ..quantity import MAX_SLOTS, shown, wrong

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
_DEVICES_HINT = "write all, none, an index, a GPU-<uuid>, or several of them with commas"


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
    return "this host has " + ", ".join(f"{d.index} ({d.uuid})" for d in inventory.devices[:8])


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def find_device(name: str, value: str, token: str, inventory: Inventory) -> Device:
    """The device that `token` names: an index, or a uuid (any case, or its unambiguous beginning)."""
    gpu, colon, instance = token.partition(":")
    if _is_number(token):
        index = int(token) if len(token) <= 6 else -1
        found = [device for device in inventory.devices if device.index == index]
    elif token[:4].upper() == "GPU-" and len(token) >= _MIN_UUID_PREFIX:
        found = [device for device in inventory.devices if device.uuid.lower().startswith(token.lower())]
    elif token[:4].upper() == "MIG-" or (colon and _is_number(gpu) and _is_number(instance)):
        raise DeviceError(f"{name}={shown(value)}: no MIG device {shown(token)} on this host", _there(inventory))
    else:
        raise wrong(name, value, f"{shown(token)} does not name a device", _DEVICES_HINT)
    if len(found) > 1:
        raise wrong(name, value, f"{shown(token)} names more than one device", "write the whole uuid")
    if not found:
        raise DeviceError(f"{name}={shown(value)}: no device {shown(token)}", _there(inventory))
    return found[0]


def _parse_any(name: str, value: str, token: str) -> Selection:
    """`any` or `any:2`."""
    count = token[4:] if token.startswith("any:") else "1"
    if not _is_number(count) or len(count) > 3 or not 1 <= int(count) <= MAX_SLOTS:
        raise wrong(name, value, f"{shown(token)} is not a number of devices", f"write any:1 to any:{MAX_SLOTS}")
    return Selection("any", count=int(count))


def parse_devices(name: str, value: str, inventory: Inventory, any_allowed: bool) -> Optional[Selection]:
    """The grammar of NVIDIA_VISIBLE_DEVICES, and `any[:N]` where it is ours. None: empty or void, nothing asked.

    `void` anywhere wins, `all` next; duplicates collapse. Source: NVIDIA container toolkit, "Environment
    variables (OCI spec)"; `no-gpu-has-...` is what a scheduler writes when it found no room.
    """
    tokens = [token.strip() for token in value.split(",")]
    refused = next((token for token in tokens if token.startswith("no-gpu-has")), None)
    if refused is not None:
        raise wrong(name, value, "the scheduler found no device for this container", "ask for less or free a device")
    if value.strip() == "" or "void" in tokens:
        return None
    if any(token == "any" or token.startswith("any:") for token in tokens) and any_allowed:
        if len(tokens) > 1:
            raise wrong(name, value, "any cannot be combined with other devices", "write any, or any:2 for two")
        return _parse_any(name, value, tokens[0])
    if "all" in tokens and "none" not in tokens:
        return Selection("all")
    if tokens == ["none"]:
        return Selection("none")
    if "none" in tokens:
        raise wrong(name, value, "none cannot be combined with devices", _DEVICES_HINT)
    if "" in tokens:
        raise wrong(name, value, "an empty device name", _DEVICES_HINT)
    chosen: dict[str, str] = {}
    for token in dict.fromkeys(tokens):
        chosen.setdefault(find_device(name, value, token, inventory).uuid, token)
    if len(chosen) > MAX_SLOTS:
        raise wrong(name, value, f"more than {MAX_SLOTS} devices", f"name at most {MAX_SLOTS}")
    return Selection("list", names=tuple(chosen.values()))
