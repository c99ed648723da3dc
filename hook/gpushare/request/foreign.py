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

from ..core import names
from ..core.errors import PolicyError, RequestError
from ..core.model import Device, Inventory, Node, Request, Selection
from ..core.quantity import bytes_of
from ..core.quoting import setting, shown_name
from ..gpu.selectors import usable_devices
from . import named_devices
from .dialects import injected, own, table
from .dialects.demand import Demand, Limit, once
from .dialects.table import BEYOND, COMPUTE, EVERYTHING, MEMORY, PRIORITY, Said
from .hearing import MODE, Heard, limits_of, line
from .limits import Wish, merged, scaled


def _named(heard: Heard, inventory: Inventory) -> Optional[tuple[Selection, Demand, Said]]:
    """The devices that they name, by one of them. Raises when two name different ones."""
    found: Optional[tuple[Selection, Demand, Said]] = None
    for demand in heard.demands:
        if demand.devices is None or demand.named is None:
            continue
        if found is not None and not _same(found[0], demand.devices, inventory):
            raise _disagree(found[2], demand.named, "name different devices")
        found = found or (demand.devices, demand, demand.named)
    return found


def _same(one: Selection, other: Selection, inventory: Inventory) -> bool:
    return one.kind == other.kind and injected.same_gpus(one, other, inventory)


def _disagree(one: Said, other: Said, what: str) -> RequestError:
    return RequestError(
        f"{setting(one.name, one.value)} and {setting(other.name, other.value)} {what}",
        "leave one of them out, or say it with names of gpushare, which win",
    )


def _asking(heard: Heard) -> Optional[Request]:
    """Limits for which nobody names a device: as many as they number, of those that they number."""
    limits: list[Limit] = []
    asking = []
    for demand in heard.demands:
        said = [limit for limit in (*demand.memory, *demand.compute) if limit.said.value.strip()]
        off = any(what == EVERYTHING for _, what in demand.off)  # who wants no limits asks for nothing by them
        if said and not off:
            asking.append(demand.dialect)
            limits += said
    if not asking:
        return None
    uuids = tuple(dict.fromkeys(limit.device for limit in limits if isinstance(limit.device, str)))
    slots = [limit.device for limit in limits if isinstance(limit.device, int)]
    count = max([slot + 1 for slot in slots] + [demand.wanted for demand in heard.demands] + [1])
    sources = tuple(dict.fromkeys((limit.said.name, limit.said.value) for limit in limits))
    return Request(
        "+".join(asking),
        Selection("list", names=uuids) if uuids else Selection("any", count=count),
        heard.capabilities,
        sources=sources,
    )


def with_devices(base: Optional[Request], heard: Heard, node: Node) -> Optional[Request]:
    """The request for the devices: a scheduler's own word for them, unless NVIDIA's names others."""
    named = _named(heard, node.inventory)
    if named is None:
        return base if base is not None else _asking(heard)
    selection, demand, said = named
    sources = ((said.name, said.value),)
    if base is None or base.selection.kind == "all":  # which images say
        more = (
            [f"{setting(name, value)}: {shown_name(said.name)} says which" for name, value in base.sources[:1]]
            if base
            else []
        )
        ignored = (*base.ignored, *more) if base else ()
        return Request(demand.dialect, selection, heard.capabilities, sources=sources, ignored=ignored)
    name, value = base.sources[0]
    if not _same(base.selection, selection, node.inventory):
        raise _disagree(said, Said(said.word, name, value), "name different devices")
    return base._replace(dialect=f"{base.dialect}+{demand.dialect}", sources=base.sources + sources)


def _devices(request: Request, node: Node) -> Sequence[Optional[Device]]:
    """The device of each slot, in PCI order; None where the node will pick one."""
    return [None] * request.selection.count if request.selection.kind == "any" else named_devices.named(request, node)


def _switched(demand: Demand, heard: Heard) -> Demand:
    """With what its own switches say. They lift limits, so they count only where policy says so."""
    ignored = list(demand.ignored)
    limited = bool(limits_of(demand))
    for said, what in demand.off:
        if not limited:
            continue
        if not heard.switches:
            ignored.append(line(said, f"the limits of {demand.dialect} stay (policy.accept.switches)"))
            continue
        ignored.append(line(said, f"limits of {demand.dialect} are off (policy.accept.switches)"))
        demand = demand._replace(compute=(), memory=demand.memory if what == COMPUTE else ())
    return demand._replace(ignored=tuple(ignored))


def _refuse_unheard(heard: Heard, request: Request) -> None:
    for said, dialect, key in heard.unheard:
        field = said.word.about
        if field in (MEMORY, COMPUTE) or (field == EVERYTHING and not {MEMORY, COMPUTE} <= heard.taken):
            where = "annotations" if said.name in table.KEYS else "env"
            raise PolicyError(
                f"{setting(said.name, said.value)}: requests in {where} are not accepted on this node ({key}), "
                f"and {shown_name(request.sources[0][0]) if request.sources else 'another word'} asks for a device",
                f"set {key} in the node's config.yaml, or add {dialect} to policy.dialects.disabled",
            )


def _priority(demands: list[Demand]) -> Optional[Demand]:
    found: Optional[Demand] = None
    for demand in demands:
        if demand.priority is None or demand.prioritised is None:
            continue
        if found is not None and found.priority != demand.priority and found.prioritised is not None:
            raise _disagree(found.prioritised, demand.prioritised, "ask for different priorities")
        found = found or demand
    return found


def without(mine: Request, limits: Sequence[str]) -> Optional[Request]:
    """Our own words less these variables; None when nothing is left."""
    left = tuple(pair for pair in mine.sources if pair[0] not in limits)
    fields: dict[str, Any] = {own.ROWS[name][0]: () for name in limits}
    return mine._replace(sources=left, **fields) if left else None


def is_larger(variable: str, mine: Request, theirs: Request, node: Node) -> bool:
    """Whether the limits of `mine` by that variable are larger than those of `theirs`, on any device of this host."""
    field = own.ROWS[variable][0]
    ones, others = getattr(mine, field), getattr(theirs, field)
    pairs = [(a, b) for slot, a in ones for other, b in others if slot == other or None in (slot, other)]
    if variable == names.ENV_COMPUTE:
        return any(a > b for a, b in pairs)
    sizes = [(device.memory_bytes, device.granularity_bytes) for device in usable_devices(node.inventory)]
    return any(bytes_of(a, *size) > bytes_of(b, *size) for a, b in pairs for size in sizes)


def with_limits(request: Request, heard: Heard, node: Node) -> Request:
    """The request with their limits, where our own words say nothing about them."""
    if request.selection.kind == "none":
        words = [limit.said for demand in heard.demands for limit in (*demand.memory, *demand.compute)]
        lines = [line(said, "no device is asked for") for said in dict.fromkeys(words)]
        return request._replace(ignored=request.ignored + heard.ignored + tuple(lines))
    _refuse_unheard(heard, request)
    late = [table.reader(row)(once(words), node.inventory) for row, words in heard.later]
    demands = [_switched(demand, heard) for demand in (*heard.demands, *late)]
    devices = _devices(request, node)
    changes: dict[str, Any] = {}
    used: list[tuple[str, Said]] = []
    everywhere = tuple(usable_devices(node.inventory))
    for field in (MEMORY, COMPUTE):
        wishes = [Wish(demand.dialect, getattr(demand, field)) for demand in demands if field not in heard.taken]
        found, said = merged(field, wishes, devices, everywhere, _disagree)
        if found:
            changes[field] = found
        used += said
    idle: list[Said] = []
    if BEYOND not in heard.taken:
        most = node.config.oversubscribe_scaling
        changes["scalings"], said, idle = scaled(demands, changes.get(MEMORY, ()), devices, most)
        used += said
    limited = {dialect for dialect, said in used}
    if COMPUTE in changes and MODE not in heard.taken:
        timed = [demand for demand in demands if not all(limit.is_none for limit in demand.compute)]
        changes["compute_mode"] = "soft" if all(demand.soft for demand in timed) else "hard"
    first = None if PRIORITY in heard.taken else _priority(demands)
    if first is not None and first.prioritised is not None:
        changes["priority"] = first.priority
        used.append((first.dialect, first.prioritised))
        limited.add(first.dialect)
    pairs = dict.fromkeys((said.name, said.value) for _, said in used)
    sources = request.sources + tuple(pair for pair in pairs if pair not in request.sources)
    dialects = request.dialect.split("+")
    dialects += [one.dialect for one in demands if one.dialect in limited and one.dialect not in dialects]
    notes = [note for demand in demands for note in demand.ignored]
    notes += [line(one, "no memory limit, so there is nothing to go beyond") for one in dict.fromkeys(idle)]
    return request._replace(
        dialect="+".join(dialects), sources=sources, ignored=(*request.ignored, *heard.ignored, *notes), **changes
    )
