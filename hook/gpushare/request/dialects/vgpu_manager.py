"""vgpu-manager: CUDA_MEM_LIMIT_i, CUDA_CORE_LIMIT_i, CUDA_CORE_SOFT_LIMIT_i, where i is a device.

    read(values, inventory) -> ParsedRequest

Sources: vgpu-manager's library (loader: iec_to_bytes, get_mem_limit and the others): decimals; k, m, g and t are
1024-based; the numbered variable wins over the one without a number; i is the place in the list of devices. Its
device plugin (vnum) sets CUDA_CORE_LIMIT_i only below 100, and lists devices in GPU_DEVICES_UUID, by now in
MANAGER_VISIBLE_DEVICES with a place for each device of the host; its DRA driver writes MANAGER_VISIBLE_DEVICE_i, and
empty values for no limit. A soft limit above the limit is its policy "balance": more while others are idle. With
CUDA_MEM_OVERSOLD[_i], which earlier versions leave out, a limit divided by CUDA_MEM_RATIO[_i] is what it may take of
the device, and the rest is managed memory.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Union

from ...core.errors import DeviceError
from ...core.model import Device, Inventory
from ...core.quantity import wrong
from ...core.quoting import setting
from ...gpu.selectors import find_devices
from . import parse_devices
from .parsed_request import BINARY, Beyond, Limit, ParsedRequest, flag, fraction, memory, percent
from .registry import DEVICES, Value

_NONE = "GPU-00000000-0000-0000-0000-000000000000"  # a device of another container


class Numbers(NamedTuple):
    """The meaning of NAME_i: i -> name of the device. `named`: the value that defines it."""

    devices: dict[int, str]
    named: Optional[Value]


def _places(one: Value) -> dict[int, str]:
    """Return place in the list -> device. MANAGER_VISIBLE_DEVICES has a place for each device of the host."""
    names = (name.strip(" '\"") for name in one.value.split(","))
    return {place: name for place, name in enumerate(names) if name not in ("", _NONE)}


def _numbers(values: tuple[Value, ...], inventory: Inventory) -> Numbers:
    by_name = {one.key.name: one for one in values if one.number is None and one.key.about == DEVICES}
    each = {one.number: one for one in values if one.key.name == "MANAGER_VISIBLE_DEVICE" and one.value.strip()}
    if each:
        return Numbers({n: one.value.strip() for n, one in each.items() if n is not None}, next(iter(each.values())))
    whole = by_name.get("MANAGER_VISIBLE_DEVICES")
    if whole is not None and _places(whole):
        return Numbers(_places(whole), whole)
    older = by_name.get("GPU_DEVICES_UUID")
    if older is None or not _places(older):
        return Numbers({}, None)
    places = _places(older)
    by_index = {_gpu(older, word, inventory).index: word for word in places.values()}
    used = {one.number for one in values if one.number is not None}
    fits = [numbers for numbers in (places, by_index) if used <= numbers.keys()]
    if len(fits) == 2 and any(places[n] != by_index[n] for n in used):
        problem = f"{_plain(used)} could be a position in this list, or an index on the host"
        raise wrong(older.name, older.value, problem, "name the devices")
    return Numbers(fits[0] if fits else by_index, older)


def _plain(numbers: set[int]) -> str:
    return ", ".join(sorted(str(number) for number in numbers))


def _gpu(one: Value, word: str, inventory: Inventory) -> Device:
    """Return the device, or a part of a divided one."""
    return find_devices(one.name, one.value, word, inventory)[0]


def _device(one: Value, numbers: Numbers, inventory: Inventory) -> Optional[str]:
    """Return the uuid of the GPU of this value; None for all."""
    if one.number is None:
        return None
    if one.number in numbers.devices:
        found = _gpu(numbers.named or one, numbers.devices[one.number], inventory)
        return found.parent or found.uuid
    gpus = [device.uuid for device in inventory.devices if device.index == one.number]
    if not gpus:
        raise DeviceError(
            f"{setting(one.name, one.value)}: this host has no device {one.number}",
            "the number is an index on the host",
        )
    return gpus[0]


def _oversold(values: tuple[Value, ...], numbers: Numbers, inventory: Inventory) -> tuple[Beyond, ...]:
    """Return the oversold settings of each device with its own values, and of all other devices."""
    ratios: dict[Optional[str], tuple[Value, float]] = {}
    sold: dict[Optional[str], tuple[Value, bool]] = {}
    for one in values:
        if one.key.name == "CUDA_MEM_RATIO" and one.value.strip():
            top, bottom = fraction(one, "a ratio")
            ratios[_device(one, numbers, inventory)] = one, top / bottom
        elif one.key.name == "CUDA_MEM_OVERSOLD" and one.value.strip():
            sold[_device(one, numbers, inventory)] = one, flag(one)
    found = []
    for device in dict.fromkeys((*ratios, *sold)):
        ratio, switch = ratios.get(device) or ratios.get(None), sold.get(device) or sold.get(None)
        if switch is not None and not (switch[1] and ratio):
            found.append(Beyond(switch[0], device, None if switch[1] else 1.0))
        elif ratio is not None:
            found.append(Beyond(ratio[0], device, ratio[1]))
    return tuple(found)


def read(values: tuple[Value, ...], inventory: Inventory) -> ParsedRequest:
    numbers = _numbers(values, inventory)
    limits: dict[str, list[Limit]] = {"CUDA_MEM_LIMIT": [], "CUDA_CORE_LIMIT": [], "CUDA_CORE_SOFT_LIMIT": []}
    for one in values:
        if one.key.name in limits and not one.value.strip():
            limits[one.key.name].append(Limit(one, _device(one, numbers, inventory)))
        elif one.key.name == "CUDA_MEM_LIMIT":
            size = memory(one, BINARY, decimals=True, hint="write a number with k, m, g or t, such as 1.5g")
            limits["CUDA_MEM_LIMIT"].append(Limit(one, _device(one, numbers, inventory), size))
        elif one.key.name in limits:
            limits[one.key.name].append(percent(one, _device(one, numbers, inventory)))
    hard = tuple(limits["CUDA_CORE_LIMIT"])
    may = {limit.device: limit.size for limit in limits["CUDA_CORE_SOFT_LIMIT"]}
    limited = [limit for limit in hard if not limit.is_none]
    soft = bool(limited) and all(_is_soft(limit, may) for limit in limited)
    beside = tuple(limit.source for limit in limits["CUDA_CORE_SOFT_LIMIT"]) if soft else ()
    if limited and None not in {limit.device for limit in hard}:
        hard += (Limit(limited[0].source),)  # other devices have no compute limit
    text = ",".join(numbers.devices.values())
    devices = parse_devices(numbers.named.name, text, inventory, any_allowed=False) if numbers.named else None
    off = tuple((one, "everything") for one in values if one.key.name == "DISABLE_VGPU_CONTROL" and flag(one))
    return ParsedRequest(
        "vgpu-manager",
        tuple(limits["CUDA_MEM_LIMIT"]),
        tuple(limit._replace(beside=beside) for limit in hard) or tuple(limits["CUDA_CORE_SOFT_LIMIT"]),
        soft=soft,
        devices=devices,
        named=numbers.named,
        off=off,
        beyond=_oversold(values, numbers, inventory),
    )


def _is_soft(limit: Limit, may: dict[Union[None, int, str], Optional[int]]) -> bool:
    """Return whether the container may exceed this limit while others are idle. A soft limit of 100 counts."""
    if limit.device not in may and None not in may:
        return False
    top = may.get(limit.device, may.get(None))
    return top is None or top > (limit.size or 0)
