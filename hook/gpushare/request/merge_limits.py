"""Merge the limits of several schedulers into one limit for each device. Pure.

    DialectLimits                                            the limits of one dialect for one resource
    merged(resource, dialect_limits, devices, everywhere, disagree)  -> (as in Request, the values that were used)
    scaled(parsed_requests, memory, devices, most) -> (Request.scalings, the values used, the values ignored)

`devices`: the device of each slot; None if placement will choose one of `everywhere`. Loaded only if a variable of
another scheduler occurs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

from ..core.errors import RequestError
from ..core.model import Amount, Device
from ..core.quoting import setting
from ..gpu.selectors import device_name
from .dialects.parsed_request import Beyond, Limit, ParsedRequest
from .dialects.registry import MEMORY, Value

_TOLERANCE = 100  # fractions have two decimals: they may differ from an amount by less than 1/100 of the device
_MICRO = 10**6  # decimals of a percentage in an Amount
Disagree = Callable[[Value, Value, str], RequestError]


class DialectLimits(NamedTuple):
    """The limits of one dialect. A limit for one device wins over a limit for all."""

    dialect: str
    limits: tuple[Limit, ...]


def _text(size: int) -> str:
    """Format a size as GPUSHARE_MEMORY would have it."""
    unit = next((unit for unit, factor in (("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)) if not size % factor), "")
    return f"{size // {'Gi': 1 << 30, 'Mi': 1 << 20, 'Ki': 1 << 10, '': 1}[unit]}{unit}"


def _bytes(limit: Limit, device: Device) -> int:
    if limit.part is None:
        return limit.size or 0
    top, bottom = limit.part
    size = device.memory_bytes * top // bottom
    return size - size % device.granularity_bytes


def _same(one: Limit, other: Limit, places: Sequence[Device]) -> bool:
    """Return whether two limits are equal on every device that may be chosen."""
    if one.part is None and other.part is None:  # a single value may equal the other's request or its limit
        return one.size in (other.size, other.ceiling) or other.size in (one.size, one.ceiling)
    if one.part is not None and other.part is not None:
        return one.part[0] * other.part[1] == other.part[0] * one.part[1]
    known = [device for device in places if device.memory_bytes]  # the admission check reports a device of unknown size
    # an amount can be a part of NVML's total, which includes the reserved memory
    return all((abs(_bytes(one, d) - _bytes(other, d)) - d.reserved_bytes) * _TOLERANCE < d.memory_bytes for d in known)


def _smaller(one: Limit, other: Limit, places: Sequence[Device]) -> Limit:
    known = [device for device in places if device.memory_bytes]
    if one.part is None and other.part is None:
        found = min(one, other, key=lambda limit: limit.size or 0)
    elif not known:
        found = other if one.part is None and other.part is not None else one
    else:
        found = min(one, other, key=lambda limit: max(_bytes(limit, device) for device in known))
    return found._replace(ceiling=one.ceiling or other.ceiling)


def _of(dialect_limits: DialectLimits, slot: int, device: Optional[Device]) -> list[Limit]:
    """Return the limits for one slot."""
    keys = {slot} | ({device.uuid, device.parent} - {""} if device else set())
    own = [limit for limit in dialect_limits.limits if limit.device is not None and limit.device in keys]
    return own or [limit for limit in dialect_limits.limits if limit.device is None]


def _refuse_gaps(dialect_limits: DialectLimits, devices: Sequence[Optional[Device]]) -> None:
    """Refuse a number without a device and a device without a limit: that limit would not be enforced."""
    covered = [_of(dialect_limits, slot, device) for slot, device in enumerate(devices)]
    used = {limit for some in covered for limit in some}
    known = ", ".join(device_name(device) for device in devices if device is not None)
    count = "1 device" if len(devices) == 1 else f"{len(devices)} devices"
    gets = f"this container gets {count}" + (f" ({known})" if known else "")
    beyond = next((limit for limit in dialect_limits.limits if limit not in used and limit.device is not None), None)
    if beyond is not None:
        source, slot = beyond.source, isinstance(beyond.device, int)
        raise RequestError(
            f"{setting(source.name, source.value)}: a limit for "
            f"{f'slot {beyond.device}' if slot else 'another device'}, but {gets}{', counted from 0' if slot else ''}",
            "leave it out",
        )
    empty = next((slot for slot, some in enumerate(covered) if not some), None)
    if empty is not None:
        source = dialect_limits.limits[0].source
        raise RequestError(
            f"{setting(source.name, source.value)}: no limit for slot {empty}, and {gets}", "give every device a limit"
        )


def _one(
    dialect_limits_list: Sequence[DialectLimits],
    slot: int,
    device: Optional[Device],
    everywhere: Sequence[Device],
    disagree: Disagree,
) -> tuple[Optional[Limit], list[tuple[str, Value]]]:
    """Return (the limit of one slot, the values that set it). A value for "no limit" contradicts no other value."""
    found: Optional[Limit] = None
    used: list[tuple[str, Value]] = []
    places = [device] if device is not None else everywhere
    for dialect_limits in dialect_limits_list:
        for limit in _of(dialect_limits, slot, device):
            used += [(dialect_limits.dialect, source) for source in (limit.source, *limit.beside)]
            if limit.is_none:
                continue
            if found is not None and not _same(found, limit, places):
                raise disagree(found.source, limit.source, "set different limits")
            found = limit if found is None else _smaller(found, limit, places)
    return found, used


def _memory(limit: Optional[Limit], device: Optional[Device]) -> Amount:
    found = _request(limit, device)
    if limit is None or limit.ceiling is None:
        return found
    ceiling = Amount(limit.ceiling, None, _text(limit.ceiling))
    return found._replace(text=f"{found.text}..{ceiling.text}", ceiling=ceiling)


def _request(limit: Optional[Limit], device: Optional[Device]) -> Amount:
    if limit is None:
        return Amount(None, 100.0, "100%")
    if limit.part is not None and device is not None and device.memory_bytes:
        size = _bytes(limit, device)
        if size:
            return Amount(size, None, _text(size), foreign=True)
    if limit.part is not None:
        percent = limit.part[0] * 100 * _MICRO // limit.part[1] / _MICRO
        return Amount(None, percent, f"{percent:.6f}".rstrip("0").rstrip(".") + "%", foreign=True)
    return Amount(limit.size, None, _text(limit.size or 0), foreign=True)


def merged(
    resource: str,
    dialect_limits_list: Sequence[DialectLimits],
    devices: Sequence[Optional[Device]],
    everywhere: Sequence[Device],
    disagree: Disagree,
) -> tuple[tuple[tuple[Optional[int], Any], ...], list[tuple[str, Value]]]:
    """Return the limits as in Request, () for none, and (dialect, value) of all values that were used."""
    dialect_limits_list = [dialect_limits for dialect_limits in dialect_limits_list if dialect_limits.limits]
    for dialect_limits in dialect_limits_list:
        _refuse_gaps(dialect_limits, devices)
    slots = [_one(dialect_limits_list, slot, device, everywhere, disagree) for slot, device in enumerate(devices)]
    used = [pair for _, some in slots for pair in some]
    if all(limit is None for limit, _ in slots):
        return (), used
    found: list[Any] = [
        _memory(limit, device) if resource == MEMORY else (100 if limit is None else limit.size)
        for (limit, _), device in zip(slots, devices)
    ]
    if all(one == found[0] for one in found):
        return ((None, found[0]),), used
    return tuple(enumerate(found)), used


def _beyond(parsed_requests: Sequence[ParsedRequest], device: Optional[Device]) -> Optional[tuple[str, Beyond]]:
    """Return the first setting for this device."""
    own = {device.uuid, device.parent} - {""} if device else set()
    for parsed in parsed_requests:
        by_device = {one.device: one for one in parsed.beyond}
        found = next((by_device[uuid] for uuid in own if uuid in by_device), by_device.get(None))
        if found is not None:
            return parsed.dialect, found
    return None


def scaled(
    parsed_requests: Sequence[ParsedRequest],
    memory: Sequence[tuple[Optional[int], Amount]],
    devices: Sequence[Optional[Device]],
    most: float,
) -> tuple[tuple[tuple[Optional[int], float], ...], list[tuple[str, Value]], list[Value]]:
    """Return the scaling (at most `most`) of each slot whose memory covers device and host, and the values that were
    used and ignored."""
    by_slot, used, idle = dict(memory), [], []
    scalings: list[float] = []
    for slot, device in enumerate(devices):
        asked, found = by_slot.get(slot, by_slot.get(None)), _beyond(parsed_requests, device)
        scalings.append(1.0)
        if found is None or (found[1].scaling or most) <= 1:
            continue
        if asked is None or asked.percent == 100.0:  # no limit to exceed
            idle.append(found[1].source)
            continue
        scalings[slot] = min(found[1].scaling or most, most)
        used.append((found[0], found[1].source))
    if all(scaling <= 1 for scaling in scalings):
        return (), used, idle
    if all(scaling == scalings[0] for scaling in scalings):
        return ((None, scalings[0]),), used, idle
    return tuple(enumerate(scalings)), used, idle
