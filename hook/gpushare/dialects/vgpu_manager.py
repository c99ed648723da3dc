"""vgpu-manager: CUDA_MEM_LIMIT_i, CUDA_CORE_LIMIT_i, CUDA_CORE_SOFT_LIMIT_i, where i is the index on the host.

    read(said, inventory) -> Demand

Sources: vgpu-manager's library (loader: iec_to_bytes, get_mem_limit and the others): decimals; k, m, g and t are
1024-based; the numbered variable wins over the one without a number. Its DRA driver writes empty values for no limit,
and MANAGER_VISIBLE_DEVICE_i for each device. A soft limit above the limit is its policy "balance": more while others
are idle.
"""

from __future__ import annotations

from ..errors import DeviceError, RequestError
from ..light import Optional, Union
from ..model import Device, Inventory, Selection
from ..quantity import shown
from . import parse_devices
from .demand import BINARY, Demand, Limit, flag, fraction, memory, percent
from .table import DEVICES, Said


def _device(one: Said, inventory: Inventory) -> Optional[str]:
    """The uuid of the GPU with this index, None without an index."""
    if one.number is None:
        return None
    found: list[Device] = [device for device in inventory.devices if device.index == one.number]
    if not found:
        raise DeviceError(
            f"{one.name}={shown(one.value)}: this host has no device {one.number}", "the number is an index on the host"
        )
    return found[0].uuid


def _oversold(said: tuple[Said, ...]) -> None:
    for one in said:
        if not one.value.strip():
            continue
        sold = one.word.name == "CUDA_MEM_OVERSOLD" and flag(one)
        if one.word.name == "CUDA_MEM_RATIO":
            top, bottom = fraction(one, "a ratio")
            sold = top > bottom
        if sold:
            raise RequestError(
                f"{one.name}={shown(one.value)}: memory beyond what the device has is not available in this version",
                "leave it out, or ask with GPUSHARE_MEMORY",
            )


def _devices(said: tuple[Said, ...], inventory: Inventory) -> tuple[Optional[Selection], Optional[Said]]:
    """By GPU_DEVICES_UUID or MANAGER_VISIBLE_DEVICES, else one variable for each; last by the numbers of the limits."""
    named = [one for one in said if one.word.about == DEVICES and one.value.strip(" '\"")]
    whole = next((one for one in named if one.number is None), None)
    if whole is not None:
        return parse_devices(whole.name, whole.value, inventory, any_allowed=False), whole
    if named:
        text = ",".join(one.value for one in named)
        return parse_devices(named[0].name, text, inventory, any_allowed=False), named[0]
    return None, None


def read(said: tuple[Said, ...], inventory: Inventory) -> Demand:
    _oversold(said)
    limits: dict[str, list[Limit]] = {"CUDA_MEM_LIMIT": [], "CUDA_CORE_LIMIT": [], "CUDA_CORE_SOFT_LIMIT": []}
    for one in said:
        if one.word.name in limits and not one.value.strip():
            limits[one.word.name].append(Limit(one, _device(one, inventory)))
        elif one.word.name == "CUDA_MEM_LIMIT":
            size = memory(one, BINARY, decimals=True, hint="write a number with k, m, g or t, such as 1.5g")
            limits["CUDA_MEM_LIMIT"].append(Limit(one, _device(one, inventory), size))
        elif one.word.name in limits:
            limits[one.word.name].append(percent(one, _device(one, inventory)))
    hard = tuple(limits["CUDA_CORE_LIMIT"])
    may = {limit.device: limit.size for limit in limits["CUDA_CORE_SOFT_LIMIT"]}
    limited = [limit for limit in hard if not limit.is_none]
    soft = bool(limited) and all(_is_soft(limit, may) for limit in limited)
    beside = tuple(limit.said for limit in limits["CUDA_CORE_SOFT_LIMIT"]) if soft else ()
    devices, named = _devices(said, inventory)
    off = tuple((one, "everything") for one in said if one.word.name == "DISABLE_VGPU_CONTROL" and flag(one))
    return Demand(
        "vgpu-manager",
        tuple(limits["CUDA_MEM_LIMIT"]),
        tuple(limit._replace(beside=beside) for limit in hard) or tuple(limits["CUDA_CORE_SOFT_LIMIT"]),
        soft=soft,
        devices=devices,
        named=named,
        off=off,
    )


def _is_soft(limit: Limit, may: dict[Union[None, int, str], Optional[int]]) -> bool:
    """Whether more than this limit is allowed while others are idle. A soft limit of 100 is there, and none."""
    if limit.device not in may and None not in may:
        return False
    top = may.get(limit.device, may.get(None))
    return top is None or top > (limit.size or 0)
