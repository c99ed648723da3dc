"""The resources that the plugin offers to kubelet, and the variables for a container. Has no side effects.

    offered(node, unit_mib, whole)                    -> {kind: (Offered, ...)}
    name_of_shares(node, names)                       -> the resource of equal shares that have a name of their own
    resources(unit_mib, names)                        -> {kind: its name, "gpushare.io/memory-mib"}
    warning(name, count)                              -> what many units of a resource cost; "" for few
    allocate(kind, offers, healthy, ids, beside, reused) -> {variable: value}   raises RequestError, DeviceError
    preferred(kind, offers, placement, available, must, n, beside, short)  -> ids

kubelet counts named units ("device ids"). Memory has one id for each unit, compute one for each percent, and
`gpushare.io/gpu` one for each share. An id is `<beginning of the uuid>-<number>`, and the container gets a share of the
id's device. kubelet stores ids, so an id must not change when the plugin restarts or other devices are added or
removed.

A device has either memory and compute, or shares: devices with equal shares (`sharing`) and undivided devices (`whole`)
are `gpushare.io/gpu`. kubelet chooses memory and compute of a container one after the other, in either order
(pairing.py). `beside`: the keys of the devices of the first choice, which the second must match. `must`, `reused`: ids
of an init container that has ended. kubelet gives them to the pod's next containers before any free ids.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from ...allocation.admission import most_bytes
from ...core import constants
from ...core.errors import DeviceError, RequestError
from ...core.model import Device, Node
from ...core.quantity import MAX_SLOTS
from ...core.quoting import shown
from ...gpu.selectors import device_name, is_among, usable_devices
from ...state.ledger import capacity_bytes, capacity_percent, rule_of

MEMORY, COMPUTE, GPU, DEVICES = "memory", "compute", "gpu", "devices"
SHARED = "shared"  # as GPU, for equal shares under another name (renameByDefault)
VARIABLES = {
    MEMORY: constants.ENV_ALLOCATED_MEMORY,
    COMPUTE: constants.ENV_ALLOCATED_COMPUTE,
    GPU: constants.ENV_ALLOCATED_GPU,
    DEVICES: constants.ENV_ALLOCATED_DEVICES,
    SHARED: constants.ENV_ALLOCATED_GPU,
}
DIVISIBLE = (MEMORY, COMPUTE)  # of one device, or in equal parts of as few devices as have room
_PERCENT = 100  # the most that a container can have of one device
_MIB = 1 << 20
_GIB = 1024  # MiB
_MANY = 4096  # units, for which kubelet 1.36 takes some seconds
_DIGITS = 8  # number of the uuid's digits in an id


class Offered(NamedTuple):
    """The offer of one device in one of the two resources."""

    key: str  # the beginning of its ids
    device: Device
    count: int  # type: ignore[assignment]  # number of ids; shadows tuple.count
    mib: int  # size of one id; 0: no memory, or an equal share, whose size the configuration sets
    numa: int = -1  # the device's NUMA node; -1: unknown, or the only one
    alone: bool = False  # a container can have only one share (failRequestsGreaterThanOne)
    most: int = 0  # ids that policy allows a container; 0: all

    def ids(self) -> Iterable[str]:
        return (f"{self.key}-{number}" for number in range(self.count))


def resources(unit_mib: int, names: dict[str, str]) -> dict[str, str]:
    """The name of each offered resource. A default name contains the unit of memory, so that a pod's number is
    unambiguous: memory-mib, memory-64mib, memory-gib. `names` replaces defaults; devices have no default, and are only
    offered under a name."""
    size, unit = (unit_mib // _GIB, "gib") if unit_mib % _GIB == 0 else (unit_mib, "mib")
    found = {
        MEMORY: f"{constants.ANNOTATION_PREFIX}memory-{size if size > 1 else ''}{unit}",
        COMPUTE: constants.ANNOTATION_PREFIX + COMPUTE,
        GPU: constants.ANNOTATION_PREFIX + GPU,
    }
    return {**found, **names}


def offered(node: Node, unit_mib: int, whole: Collection[str] = ()) -> dict[str, tuple[Offered, ...]]:
    """The offers of all devices that policy allows, in PCI order. `whole`: undivided devices, named as in
    policy.allowed_devices. A device of unknown size is not offered, because its free memory is not known."""
    policy = node.config.policy
    allowed = policy.allowed_devices
    devices = [one for one in usable_devices(node.inventory) if not allowed or is_among(one, allowed)]
    keys = _keys([one.uuid for one in devices])
    found: dict[str, list[Offered]] = {kind: [] for kind in VARIABLES}
    for device in devices:
        capacity = capacity_bytes(device, node.config) // _MIB
        rule = rule_of(device, node.config)
        key = keys[device.uuid]
        if not capacity:
            continue
        if is_among(device, whole):
            found[GPU].append(Offered(key, device, 1, min(capacity, device.memory_bytes // _MIB)))
        elif rule is not None:
            share = Offered(key, device, rule.split_count, 0, alone=rule.alone)
            found[SHARED if rule.resource else GPU].append(share)
        else:
            percent = capacity_percent(device, node.config)
            most = max(1, most_bytes(device, policy) // (unit_mib * _MIB)) if policy.max_memory else 0
            found[MEMORY].append(Offered(key, device, capacity // unit_mib, unit_mib, most=most))
            most = policy.max_compute_percent if policy.max_compute_percent < _PERCENT else 0
            found[COMPUTE].append(Offered(key, device, percent, 0, most=most))
            found[DEVICES].append(Offered(key, device, percent, 0))
    return {kind: tuple(offers) for kind, offers in found.items()}


def name_of_shares(node: Node, names: dict[str, str]) -> str:
    """The name of the resource for equal shares if the configuration renames it; empty: it does not. `names`: those of
    `resources`."""
    name = next((rule.resource for rule in node.config.sharing if rule.resource), "")
    return names[GPU] + name if name.startswith(".") else name


def with_numa(found: dict[str, tuple[Offered, ...]], nodes: dict[str, int]) -> dict[str, tuple[Offered, ...]]:
    """Add the NUMA node of each device, so that kubelet's Topology Manager can choose processors of the same node.
    `nodes`: by PCI bus id. With one node there is no hint, since it would enlarge each id's message."""
    if len({node for node in nodes.values() if node >= 0}) < 2:
        return found
    return {
        kind: tuple(one._replace(numa=nodes.get(one.device.bus_id, -1)) for one in some) for kind, some in found.items()
    }


def _keys(uuids: Sequence[str]) -> dict[str, str]:
    """{uuid: the beginning of its ids}. It is short because all ids must fit in one message; the whole uuid if the
    short key is not unique."""
    short = {uuid: uuid[4 : 4 + _DIGITS].lower() for uuid in uuids}
    keys = list(short.values())
    return {uuid: key if keys.count(key) == 1 else uuid for uuid, key in short.items()}


def _parse_id(unit: str) -> tuple[str, int]:
    """(key, number) of an id; number -1 if it is no id of this plugin."""
    key, _, number = unit.rpartition("-")
    return key, int(number) if number.isascii() and number.isdigit() and len(number) < 10 else -1


def _by_device(offers: Iterable[Offered], ids: Iterable[str]) -> dict[Offered, list[int]]:
    """Group the numbers of ids by device, in PCI order. Raises RequestError for an id that is not offered."""
    known = {one.key: one for one in offers}
    found: dict[str, list[int]] = {}
    for unit in ids:
        key, number = _parse_id(unit)
        if key not in known or not 0 <= number < known[key].count:
            raise RequestError(f"no device {shown(unit)} is offered on this node")
        found.setdefault(key, []).append(number)
    return {one: sorted(set(found[key])) for key, one in known.items() if key in found}


def _most(kind: str, offers: Iterable[Offered]) -> int:
    """Return how many units of one device a container can have, by the size of the device and by policy."""
    most = max((min(one.count, one.most or one.count) for one in offers), default=1)
    return max(1, min(most, _PERCENT) if kind == COMPUTE else most)


def _parts(kind: str, offers: Iterable[Offered], size: int, beside: Collection[str]) -> int:
    """Return how many devices share `size` units: as few as can have so many, or those of the other resource."""
    fewest = -(-size // _most(kind, offers))
    return max(fewest, len(beside)) if kind == COMPUTE else fewest


def _split(size: int, parts: int) -> list[int]:
    return [size // parts + (part < size % parts) for part in range(parts)]


def _require_divided(
    kind: str,
    offers: Sequence[Offered],
    chosen: dict[Offered, list[int]],
    size: int,
    beside: Collection[str],
    reused: int,
) -> None:
    """Raise RequestError if kubelet had to choose units of more devices than they need, unequal parts, or other devices
    than those of the container's other resource. `reused`: units that kubelet had to include."""
    keys = {one.key for one in chosen}
    parts = _parts(kind, offers, size, beside)
    if parts > len(offers):
        key = "policy.max_compute" if kind == COMPUTE else "policy.max_memory"
        raise RequestError(
            f"a container can have {_most(kind, offers)} units of each of {len(offers)} devices, and {size} are "
            "requested",
            f"request less, or raise {key} on the node",
        )
    fits = not beside or (keys == set(beside) if kind == COMPUTE else keys >= set(beside))
    if fits and sorted(map(len, chosen.values()), reverse=True) == _split(size, parts):
        return
    free = ", ".join(f"{len(numbers)} of GPU {device_name(one.device)}" for one, numbers in chosen.items())
    why = f"{size} units are free in {'no single device' if parts == 1 else f'no {parts} devices'}"
    if beside:
        names = ", ".join(f"GPU {device_name(one.device)}" for one in offers if one.key in beside)
        other = MEMORY if kind == COMPUTE else COMPUTE
        why = f"{size} units of {kind} are not free on {names}, where the container's {other} is"
    elif reused:
        raise RequestError(
            f"{why} with the {reused} that kubelet reuses from an init container (kubelet chose {free})",
            f"request {size} units for the init container too",
        )
    raise RequestError(
        f"{why} (kubelet chose {free})",
        "request less; a container gets its share on one device, or equal parts on as few devices as possible. An init "
        "container must request as much as the container after it, because kubelet gives both the same units",
    )


def warning(name: str, count: int) -> str:
    """kubelet 1.36 (feature gate ResourceHealthStatus) looks for the pod of each new unit among all units that pods
    have, and meanwhile starts no pod. It also writes 54 bytes for each into the status of its pod."""
    if count <= _MANY:
        return ""
    return (
        f"warning: {count} units of {name} can stop kubelet 1.36 and newer for minutes when it or the plugin restarts: "
        "give a larger --memory-unit, the same on all nodes, or use the DRA driver"
    )


def allocate(
    kind: str,
    offers: Sequence[Offered],
    healthy: Collection[str],
    ids: Sequence[str],
    beside: Collection[str] = (),
    reused: Collection[str] = (),
) -> dict[str, str]:
    """The variable for a container with these ids: `UUID=AMOUNT`, `UUID,UUID` for equal shares, or a number. Raises
    errors of one line, which kubelet writes to the pod's events."""
    if not ids:
        raise RequestError("kubelet asks for no device")
    chosen = _by_device(offers, ids)
    for one in chosen:
        if one.device.uuid not in healthy:
            raise DeviceError(f"device {device_name(one.device)} ({one.device.uuid}) is gone or broken")
    if kind in DIVISIBLE:
        _require_divided(kind, offers, chosen, len(ids), beside, len(set(ids) & set(reused)))
    if kind in (COMPUTE, DEVICES):
        return {VARIABLES[kind]: str(sum(map(len, chosen.values())))}
    if kind == MEMORY:
        sizes = (f"{one.device.uuid}={len(numbers) * one.mib}Mi" for one, numbers in chosen.items())
        return {VARIABLES[kind]: ",".join(sizes)}
    if len(ids) > 1 and any(one.alone for one in chosen):
        raise RequestError(
            f"{len(ids)} shares are requested, and sharing.timeSlicing.failRequestsGreaterThanOne allows 1",
            "request 1: a share of a GPU does not grow with the number",
        )
    if len(chosen) < len(ids) or len(chosen) > MAX_SLOTS:
        raise RequestError(
            f"{len(ids)} GPUs are requested, and kubelet chose from {len(chosen)} (at most {MAX_SLOTS})",
            "request fewer; a container gets one share of a device",
        )
    return {VARIABLES[kind]: ",".join(one.device.uuid + (f"={one.mib}Mi" if one.mib else "") for one in chosen)}


def preferred(
    kind: str,
    offers: Sequence[Offered],
    placement: str,
    available: Sequence[str],
    must: Sequence[str],
    size: int,
    beside: Collection[str] = (),
    short: Collection[str] = (),
) -> list[str]:
    """Choose `size` ids that `allocate` accepts, including all of `must`; an empty list if that is impossible.
    `binpack` prefers the fullest device, `spread` the emptiest; of equal devices the first in PCI order is chosen.
    Devices in `beside` come first, and devices in `short`, which lack the other resource, last."""
    known = {one.key: one.count for one in offers}
    # kubelet can still have units of an earlier list
    offered = {unit for unit in available if 0 <= _parse_id(unit)[1] < known.get(_parse_id(unit)[0], 0)}
    if not 0 < size <= len(offered | set(must)):
        return []
    free, kept = _by_device(offers, {*offered, *must}), _by_device(offers, must)
    sign = 1 if placement == "binpack" else -1
    order = sorted(free, key=lambda one: (one.key not in beside, one.key in short, sign * len(free[one])))
    if kind in DIVISIBLE:
        return _divided(order, free, kept, _split(size, _parts(kind, offers, size, beside)))
    if kind == DEVICES:
        rest = offered - set(must)
        return [*must, *(unit for unit in available if unit in rest)][:size]
    chosen = [*must, *(f"{one.key}-{free[one][0]}" for one in order if one not in kept)][:size]
    return chosen if len(chosen) == size else []


def _divided(
    order: Iterable[Offered], free: dict[Offered, list[int]], kept: dict[Offered, list[int]], parts: Sequence[int]
) -> list[str]:
    """Choose so many ids of each device: the first ones that have room, but all in `kept`."""
    fitting = [one for one in order if len(free[one]) >= parts[0]]
    devices = [*(one for one in fitting if one in kept), *(one for one in fitting if one not in kept)][: len(parts)]
    if len(devices) < len(parts) or not kept.keys() <= set(devices):
        return []
    found: list[str] = []
    for one, size in zip(devices, parts):
        taken = kept.get(one, [])
        rest = [number for number in free[one] if number not in set(taken)]
        found += [f"{one.key}-{number}" for number in [*taken, *rest][:size]]
    return found
