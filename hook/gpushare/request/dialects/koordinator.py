"""Koordinator: the annotation scheduling.koordinator.sh/device-allocated, JSON.

    read(values, inventory) -> ParsedRequest

Sources: Koordinator's documentation of GPU sharing ({"gpu":[{"minor":1,"resources":{"koordinator.sh/gpu-core":"50",
"koordinator.sh/gpu-memory":"11520Mi","koordinator.sh/gpu-memory-ratio":"50"}}]}; before 1.1 the names began with
kubernetes.io/), and its koordlet (runtimehooks/hooks/gpu): limits only where the ratio is below 100, and the minors,
with commas, in NVIDIA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import json
from typing import Any, Optional

from ...core.errors import DeviceError
from ...core.model import Inventory, Selection
from ...core.quantity import UNITS, wrong
from ...core.quoting import setting, shown
from .parsed_request import Limit, ParsedRequest, memory
from .registry import Value

_PREFIXES = ("koordinator.sh/", "kubernetes.io/")
_HINT = "leave the annotation to Koordinator"


def _gpus(one: Value) -> list[dict[str, Any]]:
    try:
        value = json.loads(one.value)
    except (ValueError, RecursionError):
        raise wrong(one.name, one.value, "not valid JSON", _HINT) from None
    found = value.get("gpu") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(found or [], list):
        raise wrong(one.name, one.value, "not a list of devices by type", _HINT)
    for gpu in found or []:
        minor = gpu.get("minor") if isinstance(gpu, dict) else None
        if not isinstance(minor, int) or isinstance(minor, bool) or not isinstance(gpu.get("resources") or {}, dict):
            raise wrong(one.name, one.value, "a device has no minor number or no resources", _HINT)
    return found or []


def _resource(one: Value, gpu: dict[str, Any], name: str) -> str:
    """A quantity as text, "" when it is not there. Kubernetes also takes bare numbers."""
    resources = gpu.get("resources") or {}
    value: Any = next((resources[prefix + name] for prefix in _PREFIXES if prefix + name in resources), "")
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise wrong(one.name, one.value, f"{name} is not a quantity", _HINT)
    return str(value)


def _percent(one: Value, gpu: dict[str, Any], name: str) -> Optional[int]:
    """Return 1 to 99; None if it is not set, or 100: a whole device has no limit."""
    text = _resource(one, gpu, name)
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 3 or not 1 <= int(text) <= 100:
        raise wrong(one.name, one.value, f"{name} {shown(text)} is not a percentage", _HINT)
    return int(text) if int(text) < 100 else None


def _memory(one: Value, uuid: str, gpu: dict[str, Any]) -> Limit:
    ratio, text = _percent(one, gpu, "gpu-memory-ratio"), _resource(one, gpu, "gpu-memory")
    if text and (ratio is not None or not _resource(one, gpu, "gpu-memory-ratio")):
        unit = text.lstrip("0123456789.")
        if unit not in UNITS:
            raise wrong(one.name, one.value, f"gpu-memory {shown(text)} is not a quantity", _HINT)
        return Limit(one, uuid, memory(one, {unit.lower(): UNITS[unit]}, decimals=True, hint=_HINT, value=text))
    return Limit(one, uuid, part=None if ratio is None else (ratio, 100))


def read(values: tuple[Value, ...], inventory: Inventory) -> ParsedRequest:
    one = values[0]
    gpus = _gpus(one)
    if not gpus:  # only network or other devices
        return ParsedRequest("koordinator")
    by_minor = {device.minor: device.uuid for device in inventory.devices}
    missing = next((gpu["minor"] for gpu in gpus if gpu["minor"] not in by_minor), None)
    if missing is not None:
        raise DeviceError(
            f"{setting(one.name, one.value)}: this host has no device with minor {missing}", "run gpushare refresh"
        )
    uuids = [by_minor[gpu["minor"]] for gpu in gpus]
    return ParsedRequest(
        "koordinator",
        tuple(_memory(one, uuid, gpu) for uuid, gpu in zip(uuids, gpus)),
        tuple(Limit(one, uuid, _percent(one, gpu, "gpu-core")) for uuid, gpu in zip(uuids, gpus)),
        devices=Selection("list", names=tuple(dict.fromkeys(uuids))),
        named=one,
        alias=",".join(str(gpu["minor"]) for gpu in gpus),
    )
