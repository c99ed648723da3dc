"""Dialects: the languages in which a container can ask for a share. One row each, pure functions.

    read(bundle, inventory)                            -> Request | None    (gpushare_env, cdi_devices, nvidia)
    parse_devices(name, value, inventory, any_allowed) -> Selection | None
    one_value(name, values)                            -> str | None
    expand_capabilities(name, value)                   -> sorted, expanded capabilities

They raise RequestError for text that makes no sense and DeviceError for devices that are not there.
Runs on the start path, so it imports only the standard library.
"""

from __future__ import annotations

from typing import Optional

from ...core.errors import RequestError
from ...core.model import Inventory, Selection
from ...core.quantity import MAX_SLOTS, wrong
from ...core.quoting import shown
from ...gpu.selectors import HINT, SELECTORS, find_devices, is_number
from . import conditions

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
_OR_ANY_HINT = f"write any, {SELECTORS}"


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
        raise wrong(
            name, value or "", f"unknown capability {shown(unknown)}", f"valid values: all, {', '.join(CAPABILITIES)}"
        )
    return tuple(sorted({*asked, *(extra for word in asked for extra in CAPABILITIES[word])}))


def _parse_any(name: str, value: str, tokens: list[str]) -> Selection:
    """`any`, `any:2`, `any:2,model=A100,free>=20Gi`."""
    first, *words = tokens
    count = first[4:] if first.startswith("any:") else "1"
    if "=" in count:
        raise wrong(name, value, f"{shown(first)} is not a number of devices", f"write {shown('any,' + first[4:])}")
    if not is_number(count) or len(count) > 3 or not 1 <= int(count) <= MAX_SLOTS:
        raise wrong(name, value, f"{shown(first)} is not a number of devices", f"write any:1 to any:{MAX_SLOTS}")
    if not words:
        return Selection("any", count=int(count))
    return Selection("any", count=int(count), conditions=conditions.parse(name, value, words))


def _unreplicated(token: str) -> str:
    """`GPU-<uuid>::3` without the number of a replica, which NVIDIA's device plugin adds where it shares a device by
    time-slicing (AnnotatedID in its source). All replicas are one device."""
    device, sign, replica = token.partition("::")
    return device if sign and is_number(replica) and device else token


def parse_devices(name: str, value: str, inventory: Inventory, any_allowed: bool) -> Optional[Selection]:
    """The grammar of NVIDIA_VISIBLE_DEVICES, and `any[:N][,conditions]` where it is ours. None: empty or void, nothing
    asked.

    `void` anywhere wins, `all` next; duplicates collapse. Source: NVIDIA container toolkit, "Environment
    variables (OCI spec)"; `no-gpu-has-...` is what a scheduler writes when it found no room.
    """
    hint = _OR_ANY_HINT if any_allowed else HINT
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
