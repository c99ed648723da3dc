"""The resources that the plugin offers to kubelet, and the variables for a container. Has no side effects.

    offered(node, unit_mib, whole)                    -> {kind: (Offered, ...)}
    resource(kind, unit_mib)                          -> its name, "gpushare.io/memory-mib"
    allocate(kind, offers, healthy, ids)              -> {variable: value}      raises RequestError, DeviceError
    preferred(offers, placement, available, must, n)  -> ids

kubelet counts named units ("device ids"). Memory has one id for each unit, `gpushare.io/gpu` one id for each share. An
id is `<beginning of the uuid>-<number>`, and the container gets a share of the id's device. kubelet stores ids, so an
id must not change when the plugin restarts or other devices are added or removed.

kubelet counts the two resources separately, so each device is in one of them only. Devices with equal shares
(`sharing`) and undivided devices (`whole`) are `gpushare.io/gpu`; all others are memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from ...core import constants
from ...core.errors import DeviceError, RequestError
from ...core.model import Device, Node
from ...core.quantity import MAX_SLOTS
from ...core.quoting import shown
from ...gpu.selectors import device_name, is_among, usable_devices
from ...state.ledger import capacity_bytes, rule_of

MEMORY, GPU = "memory", "gpu"
VARIABLES = {MEMORY: constants.ENV_ALLOCATED_MEMORY, GPU: constants.ENV_ALLOCATED_GPU}
_MIB = 1 << 20
_GIB = 1024  # MiB
_DIGITS = 8  # number of the uuid's digits in an id


class Offered(NamedTuple):
    """The offer of one device in one of the two resources."""

    key: str  # the beginning of its ids
    device: Device
    count: int  # type: ignore[assignment]  # number of ids; shadows tuple.count
    mib: int  # size of one id; 0: an equal share, whose size the configuration sets

    def ids(self) -> Iterable[str]:
        return (f"{self.key}-{number}" for number in range(self.count))


def resource(kind: str, unit_mib: int) -> str:
    """The name of a resource. It contains the unit, so that a pod's number is unambiguous: memory-mib, memory-64mib,
    memory-gib."""
    if kind == GPU:
        return constants.ANNOTATION_PREFIX + GPU
    size, unit = (unit_mib // _GIB, "gib") if unit_mib % _GIB == 0 else (unit_mib, "mib")
    return f"{constants.ANNOTATION_PREFIX}memory-{size if size > 1 else ''}{unit}"


def offered(node: Node, unit_mib: int, whole: Collection[str] = ()) -> dict[str, tuple[Offered, ...]]:
    """The offers of all devices that policy allows, in PCI order. `whole`: undivided devices, named as in
    policy.allowed_devices. A device of unknown size is not offered, because its free memory is not known."""
    allowed = node.config.policy.allowed_devices
    devices = [one for one in usable_devices(node.inventory) if not allowed or is_among(one, allowed)]
    keys = _keys([one.uuid for one in devices])
    found: dict[str, list[Offered]] = {MEMORY: [], GPU: []}
    for device in devices:
        capacity = capacity_bytes(device, node.config) // _MIB
        rule = rule_of(device, node.config)
        key = keys[device.uuid]
        if not capacity:
            continue
        if is_among(device, whole):
            found[GPU].append(Offered(key, device, 1, min(capacity, device.memory_bytes // _MIB)))
        elif rule is not None:
            found[GPU].append(Offered(key, device, rule.split_count, 0))
        else:
            found[MEMORY].append(Offered(key, device, capacity // unit_mib, unit_mib))
    return {kind: tuple(offers) for kind, offers in found.items()}


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


def allocate(kind: str, offers: Iterable[Offered], healthy: Collection[str], ids: Sequence[str]) -> dict[str, str]:
    """The variable for a container with these ids: `UUID=AMOUNT`, or `UUID,UUID` for equal shares. Raises errors of one
    line, which kubelet writes to the pod's events."""
    if not ids:
        raise RequestError("kubelet asks for no device")
    chosen = _by_device(offers, ids)
    for one in chosen:
        if one.device.uuid not in healthy:
            raise DeviceError(f"device {device_name(one.device)} ({one.device.uuid}) is gone")
    if kind == MEMORY:
        if len(chosen) > 1:
            free = ", ".join(f"{len(numbers)} of GPU {device_name(one.device)}" for one, numbers in chosen.items())
            raise RequestError(
                f"{len(ids)} units are free in no single device (kubelet chose {free})",
                "ask for less; a container gets its share of one device",
            )
        ((one, numbers),) = chosen.items()
        return {VARIABLES[kind]: f"{one.device.uuid}={len(numbers) * one.mib}Mi"}
    if len(chosen) < len(ids) or len(chosen) > MAX_SLOTS:
        raise RequestError(
            f"{len(ids)} GPUs are requested, and kubelet chose from {len(chosen)} (at most {MAX_SLOTS})",
            "request fewer; a container gets one share of a device",
        )
    return {VARIABLES[kind]: ",".join(one.device.uuid + (f"={one.mib}Mi" if one.mib else "") for one in chosen)}


def preferred(
    kind: str, offers: Iterable[Offered], placement: str, available: Sequence[str], must: Sequence[str], size: int
) -> list[str]:
    """Choose `size` ids that `allocate` accepts, including all of `must`; an empty list if that is impossible.
    `binpack` prefers the fullest device, `spread` the emptiest; of equal devices the first in PCI order is chosen."""
    if size <= 0:
        return []
    free, kept = _by_device(offers, {*available, *must}), _by_device(offers, must)
    sign = 1 if placement == "binpack" else -1
    order = sorted(free, key=lambda one: sign * len(free[one]))
    if kind == MEMORY:
        fitting = [one for one in order if len(free[one]) >= size and kept.keys() <= {one}]
        if not fitting:
            return []
        one = fitting[0]
        taken = kept.get(one, [])
        rest = [number for number in free[one] if number not in set(taken)]
        return [f"{one.key}-{number}" for number in [*taken, *rest][:size]]
    chosen = [*must, *(f"{one.key}-{free[one][0]}" for one in order if one not in kept)][:size]
    return chosen if len(chosen) == size else []
