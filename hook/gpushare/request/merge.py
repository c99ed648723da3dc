"""Merge the candidates of all dialects into one request: its devices, then each other setting by one rule of RULES.

    merged(found, node)                    -> Request | None
    larger(own, theirs, node)              -> the variables of gpushare that set more than other schedulers
    OWN_LIMITS                             the variables of gpushare that set limits

GPUSHARE_* wins for each setting. Two schedulers' dialects merge only if one system sets both (registry.Row.beside).
Such dialects may request the same, also if one of them rounds; if they disagree, the error names both. A variable that
policy does not accept never lifts a limit: if it would have limited a device, the container is refused. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Optional

from ..core import constants
from ..core.errors import PolicyError, RequestError
from ..core.model import Amount, Device, Inventory, Node, Request, Selection
from ..core.quantity import bytes_of, unrounded
from ..core.quoting import setting, shown_name
from ..gpu.selectors import device_name, same_gpus, usable_devices
from . import named_devices
from .candidates import Candidates, line
from .dialects import gpushare_env, nvidia, registry
from .dialects.parsed_request import Limit, ParsedRequest
from .dialects.registry import BEYOND, COMPUTE, EVERYTHING, MEMORY, MODE, PRIORITY, Value

_TOLERANCE = 100  # fractions have two decimals: they may differ from an amount by less than 1/100 of the device
OWN_LIMITS = (constants.ENV_MEMORY, constants.ENV_COMPUTE)
_MICRO = 10**6  # decimals of a percentage in an Amount


def merged(found: Candidates, node: Node) -> Optional[Request]:
    """Return the request; None if no dialect requests a device, or GPUSHARE_DEVICES is void."""
    own, request = found.own, None
    if own is None or own.selection == gpushare_env.UNNAMED:
        request = _devices(found, node.inventory)
    if own is not None:
        request = _with_own(own, found.own_limits, request)
    return _limited(request, found, node) if request is not None and found.has_schedulers else request


def _disagree(one: Value, other: Value, what: str) -> RequestError:
    return RequestError(
        f"{setting(one.name, one.value)} and {setting(other.name, other.value)} {what}",
        "leave one of them out, or use GPUSHARE_* variables, which override them",
    )


# Devices


def _devices(found: Candidates, inventory: Inventory) -> Optional[Request]:
    """Return the devices that NVIDIA's variable or config.json names, and a scheduler; both must name the same. If none
    does, limits request devices."""
    base = found.devices
    for parsed in found.schedulers if found.asks else ():
        selection, item = parsed.devices, parsed.named
        if selection is None or item is None:
            continue
        sources = ((item.name, item.value),)
        if base is None or base.selection.kind == "all":  # images set that
            ignored = base.ignored if base else ()
            if base and base.sources:
                ignored += (f"{setting(*base.sources[0])}: {shown_name(item.name)} names the devices",)
            base = Request(parsed.dialect, selection, sources=sources, ignored=ignored)
        elif base.selection.kind != selection.kind or not same_gpus(base.selection, selection, inventory):
            raise _disagree(item, Value(item.key, *base.sources[0]), "name different devices")
        else:
            base = base._replace(dialect=f"{base.dialect}+{parsed.dialect}", sources=base.sources + sources)
    return _asking(found) if base is None and found.asks else base


def _asking(found: Candidates) -> Optional[Request]:
    """Return a request for limits without devices: as many devices as the limits number, of those numbers."""
    asking: dict[str, list[Limit]] = {}
    for parsed in found.schedulers:
        limited = [limit for limit in (*parsed.memory, *parsed.compute) if limit.source.value.strip()]
        off = any(what == EVERYTHING for _, what in parsed.off)  # a container that lifts all limits requests nothing
        if limited and not off:
            asking[parsed.dialect] = limited
    if not asking:
        return None
    limits = [limit for some in asking.values() for limit in some]
    uuids = tuple(dict.fromkeys(limit.device for limit in limits if isinstance(limit.device, str)))
    slots = [limit.device + 1 for limit in limits if isinstance(limit.device, int)]
    count = max(1, *slots, *(parsed.wanted for parsed in found.schedulers))
    return Request(
        "+".join(asking),
        Selection("list", names=uuids) if uuids else Selection("any", count=count),
        sources=tuple(dict.fromkeys((limit.source.name, limit.source.value) for limit in limits)),
    )


def _with_own(own: Request, limits: Sequence[tuple[str, str]], others: Optional[Request]) -> Optional[Request]:
    """Combine requests: GPUSHARE_* wins; the others name the devices if GPUSHARE_* names none."""
    if own.selection.kind in ("void", "none"):
        if limits:
            (name, value), word = limits[0], own.selection.kind
            raise RequestError(
                f"{setting(name, value)}: sets a limit, but {constants.ENV_DEVICES} is {word}",
                "name a device, or leave one out",
            )
        return own if own.selection.kind == "none" else None
    if own.selection != gpushare_env.UNNAMED:
        return own
    if others is not None and others.selection.kind != "none":
        return own._replace(
            dialect=f"own+{others.dialect}" if own.sources else others.dialect,
            selection=others.selection,
            sources=others.sources + own.sources,
            ignored=others.ignored + own.ignored,
        )
    if not limits:  # only how to share: no request
        return others
    ignored = own.ignored
    if others is not None:
        ignored += (f"{nvidia.ENV_DEVICES}=none: {shown_name(limits[0][0])} requests a device",)
    return own._replace(selection=Selection("any", count=1), ignored=ignored)


# Limits of other schedulers


class _Host(NamedTuple):
    """The input of all rules. `devices`: the device of each slot in PCI order; None if placement will choose one
    of `everywhere`."""

    devices: Sequence[Optional[Device]]
    everywhere: Sequence[Device]
    scaling: float


class _Set(NamedTuple):
    """The result of one rule: fields of Request, the dialects and values that set them, and notes."""

    fields: dict[str, Any]
    used: Sequence[tuple[str, Value]] = ()
    notes: Sequence[str] = ()


def _limited(request: Request, found: Candidates, node: Node) -> Request:
    """Return the request with the schedulers' limits for everything that GPUSHARE_* does not set."""
    if request.selection.kind == "none":
        values = [limit.source for parsed in found.schedulers for limit in (*parsed.memory, *parsed.compute)]
        lines = [line(item, "no device is requested") for item in dict.fromkeys(values)]
        return request._replace(ignored=request.ignored + found.ignored + tuple(lines))
    _refuse_refused(found, request)
    for one, other in itertools.combinations(found.rows, 2):
        if not registry.are_together(one.row, other.row):
            raise _disagree(one.values[0], other.values[0], "are of two schedulers")
    late = [registry.parsed(match, node.inventory) for match in found.later]
    parsed_requests = [_switched(parsed, found) for parsed in (*found.schedulers, *late)]
    any_device = request.selection.kind == "any"
    devices = [None] * request.selection.count if any_device else named_devices.named(request, node)
    host = _Host(devices, usable_devices(node.inventory), node.config.oversubscribe_scaling)
    fields: dict[str, Any] = {}
    used: list[tuple[str, Value]] = []
    notes = [note for parsed in parsed_requests for note in parsed.ignored]
    for about, rule in RULES.items():
        if about not in found.taken:
            done = rule(parsed_requests, host, fields)
            fields.update(done.fields)
            used += done.used
            notes += done.notes
    sources = dict.fromkeys((*request.sources, *((item.name, item.value) for _, item in used)))
    limiting = {dialect for dialect, _ in used}
    dialects = dict.fromkeys(
        (*request.dialect.split("+"), *(parsed.dialect for parsed in parsed_requests if parsed.dialect in limiting))
    )
    ignored = (*request.ignored, *found.ignored, *notes)
    return request._replace(dialect="+".join(dialects), sources=tuple(sources), ignored=ignored, **fields)


def _refuse_refused(found: Candidates, request: Request) -> None:
    for item, dialect, key in found.refused:
        field = item.key.about
        if field in (MEMORY, COMPUTE) or (field == EVERYTHING and not {MEMORY, COMPUTE} <= found.taken):
            where = "annotations" if item.is_annotation else "env"
            raise PolicyError(
                f"{setting(item.name, item.value)}: requests in {where} are not accepted on this node ({key}), "
                f"and {shown_name(request.sources[0][0]) if request.sources else 'another variable'} requests a device",
                f"set {key} in the node's config.yaml, or add {dialect} to policy.dialects.disabled",
            )


def _switched(parsed: ParsedRequest, found: Candidates) -> ParsedRequest:
    """Apply the switches of the schedulers. They lift limits, so they count only if policy accepts them."""
    ignored = list(parsed.ignored)
    for item, what in parsed.off if parsed.limits else ():
        if not found.switches:
            ignored.append(line(item, f"the limits of {parsed.dialect} stay (policy.accept.switches)"))
            continue
        ignored.append(line(item, f"limits of {parsed.dialect} are off (policy.accept.switches)"))
        parsed = parsed._replace(compute=(), memory=parsed.memory if what == COMPUTE else ())
    return parsed._replace(ignored=tuple(ignored))


# One rule for each setting: (candidates, host, fields that are set already) -> _Set


def _by_slot(values: Sequence[Any]) -> tuple[tuple[Optional[int], Any], ...]:
    """Return one value for all slots if they are equal, as in Request."""
    return ((None, values[0]),) if all(one == values[0] for one in values) else tuple(enumerate(values))


Rule = Callable[[Sequence[ParsedRequest], _Host, dict[str, Any]], _Set]


def _smallest(about: str) -> Rule:
    """The limit of each slot: that of all dialects, which must agree on it; of rounded ones the smaller."""

    def rule(parsed_requests: Sequence[ParsedRequest], host: _Host, before: dict[str, Any]) -> _Set:
        limits = [(parsed.dialect, getattr(parsed, about)) for parsed in parsed_requests if getattr(parsed, about)]
        for _, some in limits:
            _refuse_gaps(some, host.devices)
        slots = [_one(limits, slot, device, host) for slot, device in enumerate(host.devices)]
        used = [pair for _, some in slots for pair in some]
        if all(limit is None for limit, _ in slots):
            return _Set({}, used)
        whole = 100 if about == COMPUTE else Amount(None, 100.0, "100%")
        found = [
            whole if limit is None else limit.size if about == COMPUTE else _memory(limit, device)
            for (limit, _), device in zip(slots, host.devices)
        ]
        return _Set({about: _by_slot(found)}, used)

    return rule


def _scalings(parsed_requests: Sequence[ParsedRequest], host: _Host, before: dict[str, Any]) -> _Set:
    """The scaling of each slot whose memory covers device and host: at most the node's."""
    by_slot, used, idle = dict(before.get(MEMORY, ())), [], []
    beyond = {one.device: (parsed.dialect, one) for parsed in parsed_requests for one in parsed.beyond}
    scalings = [1.0] * len(host.devices)
    for slot, device in enumerate(host.devices):
        keys = (device.uuid, device.parent, None) if device else (None,)
        dialect, one = next((beyond[key] for key in keys if key in beyond), ("", None))
        scaling = 1.0 if one is None else one.scaling or host.scaling
        if one is None or scaling <= 1:
            continue
        memory = by_slot.get(slot, by_slot.get(None))
        if memory is None or memory.percent == 100.0:  # no limit to exceed
            idle.append(one.source)
            continue
        scalings[slot] = min(scaling, host.scaling)
        used.append((dialect, one.source))
    notes = [line(one, "there is no memory limit to exceed") for one in dict.fromkeys(idle)]
    return _Set({"scalings": _by_slot(scalings) if max(scalings, default=1.0) > 1 else ()}, used, notes)


def _mode(parsed_requests: Sequence[ParsedRequest], host: _Host, before: dict[str, Any]) -> _Set:
    """Soft if every dialect that limits compute is soft."""
    if COMPUTE not in before:
        return _Set({})
    timed = [parsed for parsed in parsed_requests if not all(limit.is_none for limit in parsed.compute)]
    return _Set({"compute_mode": "soft" if all(parsed.soft for parsed in timed) else "hard"})


def _priority(parsed_requests: Sequence[ParsedRequest], host: _Host, before: dict[str, Any]) -> _Set:
    """HAMi's, which alone has one."""
    found = next(((one, one.prioritised) for one in parsed_requests if one.prioritised is not None), None)
    return _Set({}) if found is None else _Set({"priority": found[0].priority}, [(found[0].dialect, found[1])])


# Subject of values, which a GPUSHARE_* variable overrides -> rule, in this order
RULES: dict[str, Rule] = {
    MEMORY: _smallest(MEMORY),
    COMPUTE: _smallest(COMPUTE),
    BEYOND: _scalings,
    MODE: _mode,
    PRIORITY: _priority,
}


# Limits of one slot


def _of(limits: Sequence[Limit], slot: int, device: Optional[Device]) -> list[Limit]:
    """Return the limits for one slot. A limit for one device wins over a limit for all."""
    keys = {slot} | ({device.uuid, device.parent} - {""} if device else set())
    own = [limit for limit in limits if limit.device is not None and limit.device in keys]
    return own or [limit for limit in limits if limit.device is None]


def _refuse_gaps(limits: Sequence[Limit], devices: Sequence[Optional[Device]]) -> None:
    """Refuse a number without a device and a device without a limit: that limit would not be enforced."""
    covered = [_of(limits, slot, device) for slot, device in enumerate(devices)]
    used = {limit for some in covered for limit in some}
    known = ", ".join(device_name(device) for device in devices if device is not None)
    count = "1 device" if len(devices) == 1 else f"{len(devices)} devices"
    gets = f"this container gets {count}" + (f" ({known})" if known else "")
    beyond = next((limit for limit in limits if limit not in used and limit.device is not None), None)
    if beyond is not None:
        source, slot = beyond.source, isinstance(beyond.device, int)
        raise RequestError(
            f"{setting(source.name, source.value)}: a limit for "
            f"{f'slot {beyond.device}' if slot else 'another device'}, but {gets}{', counted from 0' if slot else ''}",
            "leave it out",
        )
    empty = next((slot for slot, some in enumerate(covered) if not some), None)
    if empty is not None:
        source = limits[0].source
        raise RequestError(
            f"{setting(source.name, source.value)}: no limit for slot {empty}, and {gets}", "give every device a limit"
        )


def _one(
    dialects: Sequence[tuple[str, Sequence[Limit]]], slot: int, device: Optional[Device], host: _Host
) -> tuple[Optional[Limit], list[tuple[str, Value]]]:
    """Return (the limit of one slot, the values that set it). A value for "no limit" contradicts no other value."""
    found: Optional[Limit] = None
    used: list[tuple[str, Value]] = []
    places = [one for one in ([device] if device is not None else host.everywhere) if one.memory_bytes]
    for dialect, limits in dialects:
        for limit in _of(limits, slot, device):
            used += [(dialect, source) for source in (limit.source, *limit.beside)]
            if limit.is_none:
                continue
            if found is not None and not _same(found, limit, places):
                raise _disagree(found.source, limit.source, "set different limits")
            found = limit if found is None else _smaller(found, limit, places)
    return found, used


def _bytes(limit: Limit, device: Optional[Device]) -> int:
    """Return 0 for a part of a device of unknown size."""
    if limit.part is None or device is None:
        return limit.size or 0
    top, bottom = limit.part
    size = device.memory_bytes * top // bottom
    return size - size % device.granularity_bytes


def _same(one: Limit, other: Limit, places: Sequence[Device]) -> bool:
    """Return whether two limits are equal on every device of known size that may be chosen; the admission check reports
    the others."""
    if one.part is None and other.part is None:  # a single value may equal the other's request or its limit
        return one.size in (other.size, other.ceiling) or other.size in (one.size, one.ceiling)
    if one.part is not None and other.part is not None:
        return one.part[0] * other.part[1] == other.part[0] * one.part[1]
    # an amount can be a part of NVML's total, which includes the reserved memory
    return all(
        (abs(_bytes(one, at) - _bytes(other, at)) - at.reserved_bytes) * _TOLERANCE < at.memory_bytes for at in places
    )


def _smaller(one: Limit, other: Limit, places: Sequence[Device]) -> Limit:
    if one.part is None and other.part is None:
        found = min(one, other, key=lambda limit: limit.size or 0)
    elif not places:
        found = other if one.part is None and other.part is not None else one
    else:
        found = min(one, other, key=lambda limit: max(_bytes(limit, device) for device in places))
    return found._replace(ceiling=one.ceiling or other.ceiling)


def _memory(limit: Limit, device: Optional[Device]) -> Amount:
    size = _bytes(limit, device)
    found = Amount(size, None, unrounded(size), foreign=True)
    if limit.part is not None and not size:  # until a device of known size is chosen
        percent = limit.part[0] * 100 * _MICRO // limit.part[1] / _MICRO
        found = Amount(None, percent, f"{percent:.6f}".rstrip("0").rstrip(".") + "%", foreign=True)
    if limit.ceiling is None:
        return found
    ceiling = Amount(limit.ceiling, None, unrounded(limit.ceiling))
    return found._replace(text=f"{found.text}..{ceiling.text}", ceiling=ceiling)


# GPUSHARE_* beside the limits of another scheduler


def larger(own: Request, theirs: Optional[Request], node: Node) -> dict[str, str]:
    """Return the variables of `own` with limits above the schedulers' limits, which are in `theirs`. Raise RequestError
    for one that is also below them: without it, an image could raise the user's limit on another device."""
    found: dict[str, str] = {}
    for name, value in own.sources:
        if theirs is None or name not in OWN_LIMITS:
            continue
        above, below = _compared(name, own, theirs, node)
        if above and below:
            raise RequestError(
                f"{setting(name, value)}: on some devices more than another scheduler's limit, and on some less",
                "leave it out, or request at most the scheduler's limit of each device (policy.accept.widening)",
            )
        if above:
            found[name] = value
    return found


def _compared(variable: str, own: Request, theirs: Request, node: Node) -> tuple[bool, bool]:
    """Return whether the limits of `own` by that variable are above those of `theirs`, and whether they are below them,
    on any device that a slot of the container may get."""
    field = gpushare_env.ROWS[variable][0]
    ones, others = dict(getattr(own, field)), dict(getattr(theirs, field))
    devices = named_devices.named(theirs, node)
    places: Iterable[tuple[int, Device]] = enumerate(devices)
    if theirs.selection.kind == "any":
        places = itertools.product(range(theirs.selection.count), devices)
    above = below = False
    for slot, device in places:
        one, other = (by_slot.get(slot, by_slot.get(None)) for by_slot in (ones, others))
        if one is None or other is None:
            continue
        (request, limit), (least, most) = (_ends(amount, device) for amount in (one, other))
        above = above or request > least or limit > most
        below = below or limit < most
    return above, below


def _ends(amount: Any, device: Device) -> tuple[int, int]:
    """Return request and limit: bytes of memory, or percent of compute."""
    if isinstance(amount, int):
        return amount, amount
    low, high = (
        bytes_of(one, device.memory_bytes, device.granularity_bytes) for one in (amount, amount.ceiling or amount)
    )
    return low, high
