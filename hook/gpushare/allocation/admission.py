"""Decide what one device can give to one slot of a request, or why it cannot (start path). Pure.

    admit(wanted, request, device, node, ledger) -> Allocation
    regrant(share, wanted, soft, node, ledger)   -> Share      the share of a running container, changed
    regain(share, node, ledger)                  -> None       a suspended container may have its share again

Both raise CapacityError (with the numbers and the containers that use the device), PolicyError, RequestError or
DeviceError. `brief` of such an error is a short form for a line about several devices.
"""

from typing import NamedTuple, Optional

from ..core import constants
from ..core.errors import CapacityError, DeviceError, PolicyError, RequestError
from ..core.model import RESERVED, Amount, Config, Device, Node, Policy, Request, Share
from ..core.quantity import amount, bytes_of, described, human
from ..gpu.selectors import device_name
from ..request import constraints, sharing
from ..request.dialects import conditions
from ..state.ledger import Ledger, capacity_bytes, capacity_percent, counts, rule_of, turn_bytes
from ..state.shm_abi import MAX_PEERS
from . import backends, oversubscribing
from .backends.base import Site
from .held import HeldError, held_by, ids

_NOTHING = "the configuration keeps all of it: lower oversubscription.turn_memory, or raise memory_overcommit"


class SlotRequest(NamedTuple):
    """The request of one slot."""

    memory: Optional[Amount]
    compute: Optional[int]
    scaling: float = 1.0  # above 1.0: `memory` covers device and host, and is this many times its device part


class Allocation(NamedTuple):
    """The grant that a device would give. None: no limit."""

    memory_limit_bytes: Optional[int]
    compute_percent: Optional[int]
    clamped: str  # the request, if policy or the device gives less
    page: int
    equal_share: str  # "1 of 10" if the configuration sets it and not the container
    enforcers: backends.Enforcers = backends.Enforcers()
    virtual_bytes: int = 0  # including the part in host memory; 0: there is none


def _held_by(device: Device, ledger: Ledger) -> str:
    held = ledger.holders.get(device.uuid, ())
    return held_by([(name, "all" if size is None else human(size)) for name, size in held])


def _listed(device: Device, ledger: Ledger) -> list[str]:
    return ids(ledger.holders.get(device.uuid, ()))


def _whom(device: Device, ledger: Ledger) -> str:
    """The containers to stop, for a hint."""
    return "it" if len(ledger.holders.get(device.uuid, ())) == 1 else "one of them"


def most_bytes(device: Device, policy: Policy) -> int:
    """Return policy.max_memory of this device in bytes."""
    return bytes_of(amount("policy.max_memory", policy.max_memory), device.memory_bytes, device.granularity_bytes)


def _within_policy(
    wanted: SlotRequest, device: Device, policy: Policy, largest_bytes: int = 0
) -> tuple[SlotRequest, str]:
    """Apply required limits and maxima per container and device. Return what may be granted, and the request if
    that was more. A clamped request gets `largest_bytes` at most; 0: not known."""
    clamps, over = policy.over_maximum == "clamp", []
    memory, compute = wanted.memory, wanted.compute
    if memory is None and (policy.require_limits or policy.unlimited == "deny" or (policy.max_memory and not clamps)):
        key = "require_limits" if policy.require_limits else "unlimited" if policy.unlimited == "deny" else "max_memory"
        raise PolicyError(f"no memory limit is requested, and policy.{key} requires one", f"set {constants.ENV_MEMORY}")
    if policy.max_memory:
        most = most_bytes(device, policy)
        asked = None if memory is None else bytes_of(memory, device.memory_bytes, device.granularity_bytes)
        if memory is None or asked is None or asked > most:
            if not clamps and memory is not None and asked is not None:
                raise PolicyError(
                    f"{described(memory, asked)} of device {device_name(device)} is more than policy.max_memory "
                    f"allows: {described(amount('policy.max_memory', policy.max_memory), most)}",
                    f"ask for at most {human(most)}",
                    f"policy.max_memory is {human(most)}",
                )
            over.append("no memory limit" if memory is None else f"{described(memory)} of memory")
            memory = Amount(min(most, largest_bytes or most), None, policy.max_memory)
    if (100 if compute is None else compute) > policy.max_compute_percent:
        said = "no compute limit" if compute is None else f"{compute}% of compute"
        if not clamps:
            raise PolicyError(
                f"{said} was requested, more than policy.max_compute ({policy.max_compute_percent}%) allows",
                f"set {constants.ENV_COMPUTE}={policy.max_compute_percent}% or less",
            )
        over.append(said)
        compute = policy.max_compute_percent
    return SlotRequest(memory, compute), " and ".join(over)


def _without_reserved(wanted: SlotRequest, device: Device, ledger: Ledger, config: Config) -> tuple[SlotRequest, str]:
    """Reduce another scheduler's amount to what is free, if it is over by no more than the driver reserves: such a
    scheduler divides NVML's whole total, so its last container would never fit. Return also the request, if reduced.
    A rest in which not even one context fits is not granted."""
    memory = wanted.memory
    if memory is None or not memory.foreign:
        return wanted, ""
    size = bytes_of(memory, device.memory_bytes, device.granularity_bytes)
    free = min(capacity_bytes(device, config) - ledger.used.get(device.uuid, 0), device.memory_bytes)
    over, most = size - free, int(device.reserved_bytes * config.memory_overcommit)
    most += device.granularity_bytes if most else 0  # the capacity is rounded down to whole blocks
    if not 0 < over <= most or free < device.context_bytes:
        return wanted, ""
    asked = f"{described(memory, size)} of memory, including {human(over)} {RESERVED}"
    return wanted._replace(memory=memory._replace(limit_bytes=free, percent=None)), asked


def _memory_of(wanted: SlotRequest, device: Device, ledger: Ledger, config: Config) -> Optional[int]:
    """Return the bytes that this device can grant now; None: the whole device. Raise the reason if it cannot."""
    if device.uuid in ledger.blocked:
        raise CapacityError(
            f"device {device_name(device)} is in use by containers that gpushare does not know",
            "stop them and run `gpushare prune --assume-free`",
            "in unknown use (gpushare prune)",
        )
    used = ledger.used.get(device.uuid, 0)
    if device.uuid in ledger.exclusive:
        whole = next((name for name, size in ledger.holders.get(device.uuid, ()) if size is None), "")
        raise HeldError(
            f"device {device_name(device)} is in exclusive use{_held_by(device, ledger)}",
            "stop that container, or give it a memory limit",
            f"held whole by {constants.short(whole) or 'another container'}",
            [*_listed(device, ledger), *filter(None, [whole])],
        )
    if wanted.memory is None:
        if used and config.policy.unlimited != "shared":
            raise HeldError(
                f"{constants.ENV_MEMORY} is not set, so all of device {device_name(device)} was requested, "
                f"but {human(used)} is granted{_held_by(device, ledger)}",
                f"set {constants.ENV_MEMORY}, or stop {_whom(device, ledger)}",
                f"{human(used)} of it is granted",
                _listed(device, ledger),
            )
        return None
    return _limited_bytes(wanted.memory, device, ledger, config)


def _limited_bytes(memory: Amount, device: Device, ledger: Ledger, config: Config) -> int:
    """Return `memory` in bytes if it is free. A device of unknown size serves one share, which cannot oversell it:
    the driver reports when it is full."""
    total, used = capacity_bytes(device, config), ledger.used.get(device.uuid, 0)
    known = device.memory_bytes > 0
    if not known and (memory.percent is not None or used):
        raise DeviceError(
            f"{described(memory)} of device {device_name(device)}: its memory size is not known",
            "run `gpushare refresh` when nvidia-smi works",
            "of unknown size",
        )
    size = bytes_of(memory, device.memory_bytes, device.granularity_bytes)
    if size < max(1, device.granularity_bytes):
        raise RequestError(
            f"{described(memory)} of device {device_name(device)} is less than one block "
            f"of {human(device.granularity_bytes)}",
            f"did you mean {memory.text}Gi?" if memory.text.isdigit() else "ask for more",
        )
    if known and used + size > total:
        free, most = human(max(0, total - used)), min(total - used, device.memory_bytes)
        own_bytes = min(ledger.own_bytes, total - used)  # less than granted on a device that has shrunk
        own = f" (its own {human(own_bytes)} included)" if own_bytes > 0 else ""
        raise HeldError(
            f"device {device_name(device)}: {described(memory, size)} requested, {free} free of {human(total)}{own}"
            + _held_by(device, ledger),
            f"stop {_whom(device, ledger)}, or ask for less"
            if size <= total
            else f"ask for at most {human(most if most > 0 else total)}"
            if total
            else _NOTHING,
            f"{free} of {human(total)} free",
            _listed(device, ledger),
        )
    if known and size > device.memory_bytes:  # memory_overcommit does not enlarge a device for one container
        has = human(device.memory_bytes)
        raise CapacityError(
            f"device {device_name(device)}: {described(memory, size)} requested, and it has {has}",
            f"ask for at most {has}",
            f"has {has}",
        )
    return size


def _require_compute(percent: Optional[int], soft: bool, device: Device, ledger: Ledger, config: Config) -> None:
    """Refuse a hard limit with which the limits of the device exceed all of its time."""
    if percent is None or not counts(percent, soft):
        return
    held = ledger.compute.get(device.uuid, ())
    total, used = capacity_percent(device, config), sum(size for _, size in held)
    if used + percent > total:
        free = max(0, total - used)
        raise HeldError(
            f"device {device_name(device)}: {percent}% of compute requested, {free}% free of {total}%"
            + held_by([(name, f"{size}%") for name, size in held]),
            (f"stop {'it' if len(held) == 1 else 'one of them'}, ask for less, " if held else "ask for less, ")
            + f"or set {constants.ENV_COMPUTE_MODE}=soft",
            f"{free}% of {total}% of compute free",
            ids(held),
        )


def _page_of(device: Device, ledger: Ledger, config: Config) -> int:
    """Return the lowest free number of an activity file. A device with equal shares takes as many containers as it
    has shares, whatever they request, so that every share has a place."""
    taken = ledger.pages.get(device.uuid, frozenset())
    rule = rule_of(device, config)
    most = min(rule.split_count, MAX_PEERS) if rule else MAX_PEERS
    free = next((number for number in range(MAX_PEERS) if number not in taken), None)
    if free is None or len(taken) >= most:
        because = f"sharing.split_count is {most}" if most < MAX_PEERS else "the maximum"
        raise CapacityError(
            f"device {device_name(device)} serves {len(taken)} containers already, {because}",
            "stop one of them, or ask for another device",
            f"serves {len(taken)} containers, {because}",
        )
    return free


def _refuse_unnamed(device: Device) -> None:
    """Refuse a MIG device without a uuid: its limit is stored under the uuid, which only NVML knows."""
    if device.uuid.startswith("MIG-GPU-"):
        raise DeviceError(
            f"the uuid of MIG device {device_name(device)} is not known (no answer from NVML)",
            "run gpushare refresh",
            "of unknown uuid",
        )


def _require(request: Request, device: Device, node: Node) -> None:
    """Refuse a device that does not meet the image's constraints or the conditions of `any`."""
    if request.requirements:
        constraints.require(request.requirements, node.inventory, device)
    if request.selection.conditions:
        conditions.require(request.selection.conditions, device)


def _require_free(request: Request, device: Device, ledger: Ledger, config: Config) -> None:
    """Check `any,free>=20Gi`."""
    if request.selection.conditions:
        total = capacity_bytes(device, config)
        free_bytes = max(0, total - ledger.used.get(device.uuid, 0))
        conditions.require_free(request.selection.conditions, device, free_bytes, total)


def admit(wanted: SlotRequest, request: Request, device: Device, node: Node, ledger: Ledger) -> Allocation:
    """Return what `device` would give now to a slot that requests `wanted`."""
    config, equal, scaling = node.config, "", 1.0
    _refuse_unnamed(device)
    _require(request, device, node)
    rule = rule_of(device, config)
    if rule is not None and wanted.memory is None:
        given = sharing.share_of(device, rule, turn_bytes(device, config))
        equal, scaling = given.text, given.scaling
        wanted = SlotRequest(given.memory, given.compute_percent if wanted.compute is None else wanted.compute)
    part, asked_bytes = None, 0
    if wanted.scaling > 1 and wanted.memory is not None:
        scaling = wanted.scaling
        part, asked_bytes = oversubscribing.divided(wanted.memory, scaling, device)
        wanted = wanted._replace(memory=part)
    largest_bytes = min(capacity_bytes(device, config), device.memory_bytes)
    wanted, beyond_capacity = _without_reserved(wanted, device, ledger, config)  # before policy, so 100% allows it
    wanted, over = _within_policy(wanted, device, config.policy, largest_bytes)
    over = over or beyond_capacity
    size = _memory_of(wanted, device, ledger, config)
    _require_free(request, device, ledger, config)
    _require_compute(wanted.compute, request.compute_mode == "soft", device, ledger, config)
    beyond = request.oversubscribe or scaling > 1
    site = Site(device, request._replace(oversubscribe=beyond), node, ledger)
    enforcers = backends.choose(size is not None, wanted.compute is not None, site)
    page, whole = _page_of(device, ledger, config), 0
    if beyond:
        whole = oversubscribing.whole_bytes(
            size, max(scaling, config.oversubscribe_scaling * request.oversubscribe), device
        )
        if part is not None and size == part.limit_bytes:  # not clamped
            whole = asked_bytes
    return Allocation(size, wanted.compute, over, page, equal, enforcers, whole)


_LITTLE = SlotRequest(Amount(1, None, ""), 1)  # below every maximum


def _refuse_beyond(share: Share, size: Optional[int]) -> None:
    """Refuse more than was promised to an oversubscribed container on device and host together."""
    whole = share.virtual_bytes
    if whole and not share.lending and (size is None or size > whole):
        raise RequestError(
            f"{'no limit' if size is None else human(size)} of memory: this container has {human(whole)} on device and "
            "host together",
            f"ask for at most {human(whole)}",
        )


def regrant(share: Share, wanted: SlotRequest, soft: bool, node: Node, ledger: Ledger) -> Share:
    """Return `share` changed to `wanted`, beside the shares in `ledger`. A value that does not grow is always
    granted, so that a limit can always be lowered. A growing value above a maximum of policy is refused, even if policy
    would clamp it at a start."""
    device, config = share.device, node.config
    size = share.memory_limit_bytes
    asked = None if wanted.memory is None else bytes_of(wanted.memory, device.memory_bytes, device.granularity_bytes)
    more_memory = size is not None and (asked is None or asked > size)
    before, after = ((100 if percent is None else percent) for percent in (share.compute_percent, wanted.compute))
    policy = config.policy._replace(over_maximum="refuse")
    checked = SlotRequest(
        wanted.memory if more_memory else _LITTLE.memory, wanted.compute if after > before else _LITTLE.compute
    )
    _within_policy(checked, device, policy)
    if more_memory:
        size = _memory_of(wanted, device, ledger, config)
    elif wanted.memory is not None:  # the whole device
        size = _limited_bytes(wanted.memory, device, Ledger({}), config)
    _refuse_beyond(share, size)
    counted = (share.compute_percent or 0) if counts(share.compute_percent, share.soft) else 0
    if after > counted:
        _require_compute(wanted.compute, soft, device, ledger, config)
    changed = (size, wanted.compute) != (share.memory_limit_bytes, share.compute_percent)
    return share._replace(
        memory_limit_bytes=size,
        compute_percent=wanted.compute,
        soft=soft,
        clamped="" if changed else share.clamped,
    )


def regain(share: Share, node: Node, ledger: Ledger) -> None:
    """Raise the reason if what a suspended share was granted is not free."""
    size = None if share.memory_limit_bytes is None else max(share.memory_limit_bytes, share.draining_bytes)
    wanted = SlotRequest(None if size is None else Amount(size, None, human(size)), share.compute_percent)
    _memory_of(wanted, share.device, ledger, node.config)
    _require_compute(share.compute_percent, share.soft, share.device, ledger, node.config)
