"""Tencent's gpu-manager: annotations tencent.com/vcuda-core, -core-limit, -memory and -device.

    read(values, inventory) -> ParsedRequest

Sources: gpu-manager (pkg/types: a block of memory is 256 MiB; pkg/services/virtual-manager: with 100 cores and more
limits are off, with vcuda-core-limit the container may use up to that much while others are idle; vcuda-device holds
names of device nodes). 100 cores are a device; more than one device is a multiple of 100.
"""

from __future__ import annotations

from typing import Optional

from ...core.errors import DeviceError
from ...core.model import Inventory, Selection
from ...core.quantity import wrong
from ...core.quoting import setting, shown
from .parsed_request import Limit, ParsedRequest, memory, number
from .registry import Value

_BLOCK = 256 << 20
_CORE, _CORE_LIMIT, _MEMORY, _DEVICE = (
    f"tencent.com/vcuda-{word}" for word in ("core", "core-limit", "memory", "device")
)
_NODE = "/dev/nvidia"


def _devices(one: Optional[Value], inventory: Inventory) -> Optional[Selection]:
    if one is None:
        return None
    by_minor = {f"{_NODE}{device.minor}": device.uuid for device in inventory.devices}
    nodes = [node.strip() for node in one.value.split(",")]
    odd = next((node for node in nodes if not node[len(_NODE) :].isdigit() or not node.startswith(_NODE)), None)
    if odd is not None:
        raise wrong(one.name, one.value, f"{shown(odd)} is not a device node", "write /dev/nvidia0")
    missing = next((node for node in nodes if node not in by_minor), None)
    if missing is not None:
        raise DeviceError(f"{setting(one.name, one.value)}: this host has no {shown(missing)}", "the number is a minor")
    return Selection("list", names=tuple(dict.fromkeys(by_minor[node] for node in nodes)))


def read(values: tuple[Value, ...], inventory: Inventory) -> ParsedRequest:
    by_name = {one.name: one for one in values}
    parsed = ParsedRequest("tencent", devices=_devices(by_name.get(_DEVICE), inventory), named=by_name.get(_DEVICE))
    core, may, blocks = by_name.get(_CORE), by_name.get(_CORE_LIMIT), by_name.get(_MEMORY)
    cores = number(core, 1, 1600, "a number of hundredths") if core is not None else 0
    if core is not None and cores > 100 and cores % 100:
        raise wrong(core.name, core.value, "neither below 100 nor a multiple of 100", "write 50, 100 or 200")
    if core is not None and cores >= 100:  # whole devices: gpu-manager lifts its limits
        parsed = parsed._replace(compute=(Limit(core),), memory=(Limit(blocks),) if blocks is not None else ())
        return parsed if parsed.devices else parsed._replace(memory=parsed.memory or (Limit(core),))
    if blocks is not None:
        size = memory(blocks, {"": _BLOCK}, hint="write a number of blocks of 256 MiB")
        parsed = parsed._replace(memory=(Limit(blocks, size=size),))
    if core is None:
        return parsed
    parsed = parsed._replace(compute=(Limit(core, size=cores),))
    if may is None:
        return parsed
    most = number(may, 1, 100, "a percentage")
    if most < cores:
        return parsed._replace(compute=(Limit(may, size=most),))
    return parsed._replace(ignored=(f"{setting(may.name, may.value)}: {setting(core.name, core.value)} is the limit",))
