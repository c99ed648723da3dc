"""Merge the requests of other schedulers into one request: devices, limits, priority.

    with_devices(base, collected, node)    -> Request | None     `base`: from NVIDIA or config.json
    with_limits(request, collected, node)  -> Request
    without(mine, variables)           -> Request | None     gpushare's own request less some limits
    is_larger(variable, mine, theirs, node)                  whether these limits exceed the schedulers'

Two schedulers may request the same, also if one of them rounds. If they disagree, the error names both. A variable that
policy does not accept never lifts a limit: if it would have limited a device, the container is refused. Loaded only if
a variable of another scheduler occurs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from ..core import constants
from ..core.errors import PolicyError, RequestError
from ..core.model import Device, Inventory, Node, Request, Selection
from ..core.quantity import bytes_of
from ..core.quoting import setting, shown_name
from ..gpu.selectors import usable_devices
from . import named_devices
from .dialects import cdi_devices, gpushare_env, registry
from .dialects.parsed_request import Limit, ParsedRequest, once
from .dialects.registry import BEYOND, COMPUTE, EVERYTHING, MEMORY, PRIORITY, Value
from .merge_limits import DialectLimits, merged, scaled
from .scheduler_requests import MODE, SchedulerRequests, limits_of, line


def _named(collected: SchedulerRequests, inventory: Inventory) -> Optional[tuple[Selection, ParsedRequest, Value]]:
    """Return the devices that a scheduler names. Raise if two schedulers name different devices."""
    found: Optional[tuple[Selection, ParsedRequest, Value]] = None
    for parsed in collected.parsed_requests:
        if parsed.devices is None or parsed.named is None:
            continue
        if found is not None and not _same(found[0], parsed.devices, inventory):
            raise _disagree(found[2], parsed.named, "name different devices")
        found = found or (parsed.devices, parsed, parsed.named)
    return found


def _same(one: Selection, other: Selection, inventory: Inventory) -> bool:
    return one.kind == other.kind and cdi_devices.same_gpus(one, other, inventory)


def _disagree(one: Value, other: Value, what: str) -> RequestError:
    return RequestError(
        f"{setting(one.name, one.value)} and {setting(other.name, other.value)} {what}",
        "leave one of them out, or use GPUSHARE_* variables, which override them",
    )


def _asking(collected: SchedulerRequests) -> Optional[Request]:
    """Return a request for limits without devices: as many devices as the limits number, of those numbers."""
    limits: list[Limit] = []
    asking = []
    for parsed in collected.parsed_requests:
        limited = [limit for limit in (*parsed.memory, *parsed.compute) if limit.source.value.strip()]
        off = any(what == EVERYTHING for _, what in parsed.off)  # a container that lifts all limits requests nothing
        if limited and not off:
            asking.append(parsed.dialect)
            limits += limited
    if not asking:
        return None
    uuids = tuple(dict.fromkeys(limit.device for limit in limits if isinstance(limit.device, str)))
    slots = [limit.device for limit in limits if isinstance(limit.device, int)]
    count = max([slot + 1 for slot in slots] + [parsed.wanted for parsed in collected.parsed_requests] + [1])
    sources = tuple(dict.fromkeys((limit.source.name, limit.source.value) for limit in limits))
    return Request(
        "+".join(asking),
        Selection("list", names=uuids) if uuids else Selection("any", count=count),
        collected.capabilities,
        sources=sources,
    )


def with_devices(base: Optional[Request], collected: SchedulerRequests, node: Node) -> Optional[Request]:
    """Return the request for the devices: those of the scheduler, unless NVIDIA's variable names others."""
    named = _named(collected, node.inventory)
    if named is None:
        return base if base is not None else _asking(collected)
    selection, parsed, item = named
    sources = ((item.name, item.value),)
    if base is None or base.selection.kind == "all":  # images set that
        more = (
            [f"{setting(name, value)}: {shown_name(item.name)} names the devices" for name, value in base.sources[:1]]
            if base
            else []
        )
        ignored = (*base.ignored, *more) if base else ()
        return Request(parsed.dialect, selection, collected.capabilities, sources=sources, ignored=ignored)
    name, value = base.sources[0]
    if not _same(base.selection, selection, node.inventory):
        raise _disagree(item, Value(item.key, name, value), "name different devices")
    return base._replace(dialect=f"{base.dialect}+{parsed.dialect}", sources=base.sources + sources)


def _devices(request: Request, node: Node) -> Sequence[Optional[Device]]:
    """Return the device of each slot in PCI order; None if placement will choose it."""
    return [None] * request.selection.count if request.selection.kind == "any" else named_devices.named(request, node)


def _switched(parsed: ParsedRequest, collected: SchedulerRequests) -> ParsedRequest:
    """Apply the switches of the schedulers. They lift limits, so they count only if policy accepts them."""
    ignored = list(parsed.ignored)
    limited = bool(limits_of(parsed))
    for item, what in parsed.off:
        if not limited:
            continue
        if not collected.switches:
            ignored.append(line(item, f"the limits of {parsed.dialect} stay (policy.accept.switches)"))
            continue
        ignored.append(line(item, f"limits of {parsed.dialect} are off (policy.accept.switches)"))
        parsed = parsed._replace(compute=(), memory=parsed.memory if what == COMPUTE else ())
    return parsed._replace(ignored=tuple(ignored))


def _refuse_refused(collected: SchedulerRequests, request: Request) -> None:
    for item, dialect, key in collected.refused:
        field = item.key.about
        if field in (MEMORY, COMPUTE) or (field == EVERYTHING and not {MEMORY, COMPUTE} <= collected.taken):
            where = "annotations" if registry.is_annotation(item.name) else "env"
            raise PolicyError(
                f"{setting(item.name, item.value)}: requests in {where} are not accepted on this node ({key}), "
                f"and {shown_name(request.sources[0][0]) if request.sources else 'another variable'} requests a device",
                f"set {key} in the node's config.yaml, or add {dialect} to policy.dialects.disabled",
            )


def _priority(parsed_requests: list[ParsedRequest]) -> Optional[ParsedRequest]:
    found: Optional[ParsedRequest] = None
    for parsed in parsed_requests:
        if parsed.priority is None or parsed.prioritised is None:
            continue
        if found is not None and found.priority != parsed.priority and found.prioritised is not None:
            raise _disagree(found.prioritised, parsed.prioritised, "set different priorities")
        found = found or parsed
    return found


def without(mine: Request, limits: Sequence[str]) -> Optional[Request]:
    """Return gpushare's own request without these variables; None if nothing is left."""
    left = tuple(pair for pair in mine.sources if pair[0] not in limits)
    fields: dict[str, Any] = {gpushare_env.ROWS[name][0]: () for name in limits}
    return mine._replace(sources=left, **fields) if left else None


def is_larger(variable: str, mine: Request, theirs: Request, node: Node) -> bool:
    """Return whether the limits of `mine` by that variable exceed those of `theirs` on any device of this host."""
    field = gpushare_env.ROWS[variable][0]
    ones, others = getattr(mine, field), getattr(theirs, field)
    pairs = [(a, b) for slot, a in ones for other, b in others if slot == other or None in (slot, other)]
    if variable == constants.ENV_COMPUTE:
        return any(a > b for a, b in pairs)
    sizes = [(device.memory_bytes, device.granularity_bytes) for device in usable_devices(node.inventory)]
    pairs += [(a.ceiling or a, b.ceiling or b) for a, b in pairs]
    return any(bytes_of(a, *size) > bytes_of(b, *size) for a, b in pairs for size in sizes)


def with_limits(request: Request, collected: SchedulerRequests, node: Node) -> Request:
    """Return the request with the schedulers' limits for everything that GPUSHARE_* does not set."""
    if request.selection.kind == "none":
        values = [limit.source for parsed in collected.parsed_requests for limit in (*parsed.memory, *parsed.compute)]
        lines = [line(item, "no device is requested") for item in dict.fromkeys(values)]
        return request._replace(ignored=request.ignored + collected.ignored + tuple(lines))
    _refuse_refused(collected, request)
    late = [registry.reader(row)(once(values), node.inventory) for row, values in collected.later]
    parsed_requests = [_switched(parsed, collected) for parsed in (*collected.parsed_requests, *late)]
    changes, used, notes = _changes(parsed_requests, collected.taken, _devices(request, node), node)
    used_values = dict.fromkeys((item.name, item.value) for _, item in used)
    sources = request.sources + tuple(pair for pair in used_values if pair not in request.sources)
    limited = {dialect for dialect, _ in used}
    added = [one.dialect for one in parsed_requests if one.dialect in limited]
    dialects = dict.fromkeys((*request.dialect.split("+"), *added))
    notes = [*(note for parsed in parsed_requests for note in parsed.ignored), *notes]
    return request._replace(
        dialect="+".join(dialects), sources=sources, ignored=(*request.ignored, *collected.ignored, *notes), **changes
    )


def _changes(
    parsed_requests: list[ParsedRequest], taken: frozenset[str], devices: Sequence[Optional[Device]], node: Node
) -> tuple[dict[str, Any], list[tuple[str, Value]], list[str]]:
    """(fields of the request that the schedulers set, the dialects and values that set them, notes); nothing that
    GPUSHARE_* has taken."""
    changes: dict[str, Any] = {}
    used: list[tuple[str, Value]] = []
    notes: list[str] = []
    everywhere = tuple(usable_devices(node.inventory))
    for field in (MEMORY, COMPUTE):
        if field not in taken:
            limits = [DialectLimits(parsed.dialect, getattr(parsed, field)) for parsed in parsed_requests]
            found, pairs = merged(field, limits, devices, everywhere, _disagree)
            used += pairs
            changes.update({field: found} if found else {})
    if BEYOND not in taken:
        most = node.config.oversubscribe_scaling
        changes["scalings"], pairs, idle = scaled(parsed_requests, changes.get(MEMORY, ()), devices, most)
        used += pairs
        notes = [line(one, "there is no memory limit to exceed") for one in dict.fromkeys(idle)]
    if COMPUTE in changes and MODE not in taken:
        timed = [parsed for parsed in parsed_requests if not all(limit.is_none for limit in parsed.compute)]
        changes["compute_mode"] = "soft" if all(parsed.soft for parsed in timed) else "hard"
    first = None if PRIORITY in taken else _priority(parsed_requests)
    if first is not None and first.prioritised is not None:
        changes["priority"] = first.priority
        used.append((first.dialect, first.prioritised))
    return changes, used, notes
