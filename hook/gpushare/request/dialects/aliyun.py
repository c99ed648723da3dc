"""Aliyun's gpushare and cGPU: the part ALIYUN_COM_GPU_MEM_CONTAINER / _DEV of the memory of device _IDX.

    read(values, inventory) -> ParsedRequest

Sources: gpushare-device-plugin (pkg/gpu/nvidia/allocate.go): the values count units. An option of the plugin decides
whether a unit is a GiB or a MiB, so only the ratio is used. If it found no device, the plugin writes IDX=-1.
cGPU's own guide: ALIYUN_COM_GPU_VISIBLE_DEVICES, and CGPU_DISABLE=true or 1. The amount is for each device.
"""

from __future__ import annotations

from typing import Optional

from ...core.errors import CapacityError
from ...core.model import Inventory, Selection
from ...core.quantity import wrong
from ...core.quoting import setting
from . import parse_devices
from .parsed_request import Limit, ParsedRequest, flag, number
from .registry import Value

_MOST = 1 << 40
_CONTAINER, _DEVICE = "ALIYUN_COM_GPU_MEM_CONTAINER", "ALIYUN_COM_GPU_MEM_DEV"


def _part(by_name: dict[str, Value]) -> tuple[Limit, ...]:
    item, of_device = by_name.get(_CONTAINER), by_name.get(_DEVICE)
    if item is None:
        return ()
    if of_device is None:
        raise wrong(item.name, item.value, f"there is no {_DEVICE}, so its unit is unknown", f"set {_DEVICE} too")
    amount, of = (number(one, 1, _MOST, "an amount of memory") for one in (item, of_device))
    if amount > of:
        raise wrong(item.name, item.value, f"more than {setting(of_device.name, of_device.value)}", "ask for less")
    return (Limit(item, part=(amount, of) if amount < of else None, beside=(of_device,)),)


def read(values: tuple[Value, ...], inventory: Inventory) -> ParsedRequest:
    by_name = {one.name: one for one in values}
    named = by_name.get("ALIYUN_COM_GPU_VISIBLE_DEVICES") or by_name.get("ALIYUN_COM_GPU_MEM_IDX")
    devices: Optional[Selection] = None
    if named is not None:
        if named.value.strip() == "-1":
            raise CapacityError(
                f"{setting(named.name, named.value)}: the scheduler found no device for this container",
                "ask for less or free a device",
            )
        devices = parse_devices(named.name, named.value, inventory, any_allowed=False)
    off = by_name.get("CGPU_DISABLE")
    return ParsedRequest(
        "aliyun",
        _part(by_name),
        devices=devices,
        named=named,
        off=((off, "everything"),) if off is not None and flag(off) else (),
    )
