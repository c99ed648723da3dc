"""What other schedulers' words add to a request: devices, limits, priority.

    with_devices(base, heard, node)    -> Request | None     `base`: what NVIDIA's words or config.json name
    with_limits(request, heard, node)  -> Request
    without(mine, variables)           -> Request | None     our own words less some limits, and
    is_larger(variable, mine, theirs, node)                  whether they would widen what other words grant

Two schedulers that say the same are fine, also when one of them rounds; two that disagree are an error that names both.
A word that cannot be heard is never a way to be without limit: where it would have limited a device, the container is
refused. Loaded only when a word of another scheduler occurs. Pure.
"""

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


def _named(heard: SchedulerRequests, inventory: Inventory) -> Optional[tuple[Selection, ParsedRequest, Value]]:
    """The devices that they name, by one of them. Raises when two name different ones."""
    found: Optional[tuple[Selection, ParsedRequest, Value]] = None
    for parsed in heard.parsed_requests:
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
        "leave one of them out, or say it with names of gpushare, which win",
    )


def _asking(heard: SchedulerRequests) -> Optional[Request]:
    """Limits for which nobody names a device: as many as they number, of those that they number."""
    limits: list[Limit] = []
    asking = []
    for parsed in heard.parsed_requests:
        said = [limit for limit in (*parsed.memory, *parsed.compute) if limit.said.value.strip()]
        off = any(what == EVERYTHING for _, what in parsed.off)  # who wants no limits asks for nothing by them
        if said and not off:
            asking.append(parsed.dialect)
            limits += said
    if not asking:
        return None
    uuids = tuple(dict.fromkeys(limit.device for limit in limits if isinstance(limit.device, str)))
    slots = [limit.device for limit in limits if isinstance(limit.device, int)]
    count = max([slot + 1 for slot in slots] + [parsed.wanted for parsed in heard.parsed_requests] + [1])
    sources = tuple(dict.fromkeys((limit.said.name, limit.said.value) for limit in limits))
    return Request(
        "+".join(asking),
        Selection("list", names=uuids) if uuids else Selection("any", count=count),
        heard.capabilities,
        sources=sources,
    )


def with_devices(base: Optional[Request], heard: SchedulerRequests, node: Node) -> Optional[Request]:
    """The request for the devices: a scheduler's own word for them, unless NVIDIA's names others."""
    named = _named(heard, node.inventory)
    if named is None:
        return base if base is not None else _asking(heard)
    selection, parsed, said = named
    sources = ((said.name, said.value),)
    if base is None or base.selection.kind == "all":  # which images say
        more = (
            [f"{setting(name, value)}: {shown_name(said.name)} says which" for name, value in base.sources[:1]]
            if base
            else []
        )
        ignored = (*base.ignored, *more) if base else ()
        return Request(parsed.dialect, selection, heard.capabilities, sources=sources, ignored=ignored)
    name, value = base.sources[0]
    if not _same(base.selection, selection, node.inventory):
        raise _disagree(said, Value(said.word, name, value), "name different devices")
    return base._replace(dialect=f"{base.dialect}+{parsed.dialect}", sources=base.sources + sources)


def _devices(request: Request, node: Node) -> Sequence[Optional[Device]]:
    """The device of each slot, in PCI order; None where the node will pick one."""
    return [None] * request.selection.count if request.selection.kind == "any" else named_devices.named(request, node)


def _switched(parsed: ParsedRequest, heard: SchedulerRequests) -> ParsedRequest:
    """With what its own switches say. They lift limits, so they count only where policy says so."""
    ignored = list(parsed.ignored)
    limited = bool(limits_of(parsed))
    for said, what in parsed.off:
        if not limited:
            continue
        if not heard.switches:
            ignored.append(line(said, f"the limits of {parsed.dialect} stay (policy.accept.switches)"))
            continue
        ignored.append(line(said, f"limits of {parsed.dialect} are off (policy.accept.switches)"))
        parsed = parsed._replace(compute=(), memory=parsed.memory if what == COMPUTE else ())
    return parsed._replace(ignored=tuple(ignored))


def _refuse_unheard(heard: SchedulerRequests, request: Request) -> None:
    for said, dialect, key in heard.unheard:
        field = said.word.about
        if field in (MEMORY, COMPUTE) or (field == EVERYTHING and not {MEMORY, COMPUTE} <= heard.taken):
            where = "annotations" if said.name in registry.KEYS else "env"
            raise PolicyError(
                f"{setting(said.name, said.value)}: requests in {where} are not accepted on this node ({key}), "
                f"and {shown_name(request.sources[0][0]) if request.sources else 'another word'} asks for a device",
                f"set {key} in the node's config.yaml, or add {dialect} to policy.dialects.disabled",
            )


def _priority(parsed_requests: list[ParsedRequest]) -> Optional[ParsedRequest]:
    found: Optional[ParsedRequest] = None
    for parsed in parsed_requests:
        if parsed.priority is None or parsed.prioritised is None:
            continue
        if found is not None and found.priority != parsed.priority and found.prioritised is not None:
            raise _disagree(found.prioritised, parsed.prioritised, "ask for different priorities")
        found = found or parsed
    return found


def without(mine: Request, limits: Sequence[str]) -> Optional[Request]:
    """Our own words less these variables; None when nothing is left."""
    left = tuple(pair for pair in mine.sources if pair[0] not in limits)
    fields: dict[str, Any] = {gpushare_env.ROWS[name][0]: () for name in limits}
    return mine._replace(sources=left, **fields) if left else None


def is_larger(variable: str, mine: Request, theirs: Request, node: Node) -> bool:
    """Whether the limits of `mine` by that variable are larger than those of `theirs`, on any device of this host."""
    field = gpushare_env.ROWS[variable][0]
    ones, others = getattr(mine, field), getattr(theirs, field)
    pairs = [(a, b) for slot, a in ones for other, b in others if slot == other or None in (slot, other)]
    if variable == constants.ENV_COMPUTE:
        return any(a > b for a, b in pairs)
    sizes = [(device.memory_bytes, device.granularity_bytes) for device in usable_devices(node.inventory)]
    return any(bytes_of(a, *size) > bytes_of(b, *size) for a, b in pairs for size in sizes)


def with_limits(request: Request, heard: SchedulerRequests, node: Node) -> Request:
    """The request with their limits, where our own words say nothing about them."""
    if request.selection.kind == "none":
        words = [limit.said for parsed in heard.parsed_requests for limit in (*parsed.memory, *parsed.compute)]
        lines = [line(said, "no device is asked for") for said in dict.fromkeys(words)]
        return request._replace(ignored=request.ignored + heard.ignored + tuple(lines))
    _refuse_unheard(heard, request)
    late = [registry.reader(row)(once(words), node.inventory) for row, words in heard.later]
    parsed_requests = [_switched(parsed, heard) for parsed in (*heard.parsed_requests, *late)]
    devices = _devices(request, node)
    changes: dict[str, Any] = {}
    used: list[tuple[str, Value]] = []
    everywhere = tuple(usable_devices(node.inventory))
    for field in (MEMORY, COMPUTE):
        dialect_limits_list = [
            DialectLimits(parsed.dialect, getattr(parsed, field))
            for parsed in parsed_requests
            if field not in heard.taken
        ]
        found, said = merged(field, dialect_limits_list, devices, everywhere, _disagree)
        if found:
            changes[field] = found
        used += said
    idle: list[Value] = []
    if BEYOND not in heard.taken:
        most = node.config.oversubscribe_scaling
        changes["scalings"], said, idle = scaled(parsed_requests, changes.get(MEMORY, ()), devices, most)
        used += said
    limited = {dialect for dialect, said in used}
    if COMPUTE in changes and MODE not in heard.taken:
        timed = [parsed for parsed in parsed_requests if not all(limit.is_none for limit in parsed.compute)]
        changes["compute_mode"] = "soft" if all(parsed.soft for parsed in timed) else "hard"
    first = None if PRIORITY in heard.taken else _priority(parsed_requests)
    if first is not None and first.prioritised is not None:
        changes["priority"] = first.priority
        used.append((first.dialect, first.prioritised))
        limited.add(first.dialect)
    pairs = dict.fromkeys((said.name, said.value) for _, said in used)
    sources = request.sources + tuple(pair for pair in pairs if pair not in request.sources)
    dialects = request.dialect.split("+")
    dialects += [one.dialect for one in parsed_requests if one.dialect in limited and one.dialect not in dialects]
    notes = [note for parsed in parsed_requests for note in parsed.ignored]
    notes += [line(one, "no memory limit, so there is nothing to go beyond") for one in dict.fromkeys(idle)]
    return request._replace(
        dialect="+".join(dialects), sources=sources, ignored=(*request.ignored, *heard.ignored, *notes), **changes
    )
