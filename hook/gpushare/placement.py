"""Which devices a request gets, and how much of each: a pure function of what is granted already.

    ledger_of(leases, policy, blocked)  -> Ledger
    grant(request, node, ledger)        -> tuple[Share, ...]      () for `none`: driver files, no GPU

The caller holds the lease lock around both, so that two requests never see the same free bytes. `grant` raises
CapacityError (with the numbers and the holders), PolicyError, RequestError or DeviceError. Start path.
"""

from __future__ import annotations

from . import names
from .dialects import device_name, find_devices, usable_devices
from .errors import CapacityError, DeviceError, GpushareError, PolicyError, RequestError
from .light import Iterable, NamedTuple, Optional
from .model import Amount, Config, Device, Lease, Node, Policy, Request, Share
from .quantity import amount, bytes_of, human, shown
from .region import MAX_PEERS, NO_PERCENT


class Ledger(NamedTuple):
    """What is granted, per device uuid."""

    used: dict[str, int]  # bytes granted to limited shares
    exclusive: frozenset[str] = frozenset()  # taken as a whole
    blocked: frozenset[str] = frozenset()  # unknown use: no new lease
    holders: dict[str, tuple[tuple[str, Optional[int]], ...]] = {}  # (container id, bytes or None = whole)
    pages: dict[str, frozenset[int]] = {}  # numbers that are taken, see pages.py
    compute: dict[str, tuple[tuple[str, int], ...]] = {}  # (container id, percent) of hard limits


class Wanted(NamedTuple):
    """What one slot asks for."""

    memory: Optional[Amount]
    compute: Optional[int]


def ledger_of(leases: Iterable[Lease], policy: Policy, blocked: Iterable[str] = ()) -> Ledger:
    """The ledger of live leases. An unlimited share takes the whole device unless policy shares it."""
    used: dict[str, int] = {}
    exclusive = set()
    holders: dict[str, tuple[tuple[str, Optional[int]], ...]] = {}
    pages: dict[str, frozenset[int]] = {}
    compute: dict[str, tuple[tuple[str, int], ...]] = {}
    for lease in leases:
        for share in lease.shares:
            uuid = share.device.uuid
            holders[uuid] = (*holders.get(uuid, ()), (lease.id, share.memory_limit_bytes))
            pages[uuid] = pages.get(uuid, frozenset()) | {share.page}
            if share.compute_percent is not None and _counts(share.compute_percent, share.soft):
                compute[uuid] = (*compute.get(uuid, ()), (lease.id, share.compute_percent))
            if share.memory_limit_bytes is not None:
                used[uuid] = used.get(uuid, 0) + share.memory_limit_bytes
            elif policy.unlimited != "shared":
                exclusive.add(uuid)
    return Ledger(used, frozenset(exclusive), frozenset(blocked), holders, pages, compute)


def capacity_bytes(device: Device, memory_overcommit: float) -> int:
    """What may be granted in all; 0 when the device's size is not known."""
    size = int(device.memory_bytes * memory_overcommit)
    return size - size % device.granularity_bytes


def _counts(percent: int, soft: bool) -> bool:
    """Whether a compute limit takes something from the others: a soft one is given what they leave."""
    return percent < NO_PERCENT and not soft


def _held(holders: list[str]) -> str:
    """`, held by a (4 GiB), b (all)`, or nothing."""
    more = f" and {len(holders) - 4} more" if len(holders) > 4 else ""
    return ", held by " + ", ".join(holders[:4]) + more if holders else ""


def _held_by(device: Device, ledger: Ledger) -> str:
    held = ledger.holders.get(device.uuid, ())
    return _held([f"{names.short(name)} ({'all' if size is None else human(size)})" for name, size in held])


def _whom(device: Device, ledger: Ledger) -> str:
    """Whom to stop, for a hint."""
    return "it" if len(ledger.holders.get(device.uuid, ())) == 1 else "one of them"


def _devices(count: int) -> str:
    return f"{count} device" if count == 1 else f"{count} devices"


def _said(request: Request, variable: str, otherwise: str) -> str:
    """`NAME="VALUE"` as the container says it, be it a variable or an annotation; `otherwise` when it does not."""
    suffix = names.ANNOTATIONS[variable]
    found = next((pair for pair in request.sources if pair[0] == variable or pair[0].endswith(suffix)), None)
    return f"{found[0]}={shown(found[1])}" if found else otherwise


def _denied_by_policy(device: Device, policy: Policy) -> bool:
    allowed = policy.allowed_devices
    own_names = {name.lower() for name in (device.uuid, str(device.index), device.parent, device_name(device)) if name}
    return bool(allowed) and own_names.isdisjoint(name.lower() for name in allowed)


def _most(device: Device, policy: Policy) -> int:
    """policy.max_memory of this device, in bytes."""
    return bytes_of(amount("policy.max_memory", policy.max_memory), device.memory_bytes, device.granularity_bytes)


def _within_policy(wanted: Wanted, device: Device, policy: Policy) -> tuple[Wanted, str]:
    """(what may be granted, what was asked where that was more). Maxima and required limits, per container and
    device."""
    clamps, over = policy.over_maximum == "clamp", []
    memory, compute = wanted
    if memory is None and (policy.require_limits or policy.unlimited == "deny" or (policy.max_memory and not clamps)):
        key = "require_limits" if policy.require_limits else "unlimited" if policy.unlimited == "deny" else "max_memory"
        raise PolicyError(f"no memory limit was asked for, and policy.{key} requires one", f"set {names.ENV_MEMORY}")
    if policy.max_memory:
        most = _most(device, policy)
        asked = None if memory is None else bytes_of(memory, device.memory_bytes, device.granularity_bytes)
        if memory is None or asked is None or asked > most:
            if not clamps and memory is not None and asked is not None:
                raise PolicyError(
                    f"{memory.text} of device {device_name(device)} is {human(asked)}, more than policy.max_memory "
                    f"allows ({policy.max_memory} = {human(most)})",
                    f"ask for at most {human(most)}",
                )
            over.append("no memory limit" if memory is None else f"{memory.text} of memory")
            memory = Amount(most, None, policy.max_memory)
    if (100 if compute is None else compute) > policy.max_compute_percent:
        said = "no compute limit" if compute is None else f"{compute}% of compute"
        if not clamps:
            raise PolicyError(
                f"{said} was asked for, more than policy.max_compute ({policy.max_compute_percent}%) allows",
                f"set {names.ENV_COMPUTE}={policy.max_compute_percent}% or less",
            )
        over.append(said)
        compute = policy.max_compute_percent
    return Wanted(memory, compute), " and ".join(over)


def _memory_of(wanted: Wanted, device: Device, ledger: Ledger, config: Config) -> Optional[int]:
    """The bytes that this device can grant now; None = the whole device. Raises why not."""
    if device.uuid in ledger.blocked:
        raise CapacityError(
            f"device {device_name(device)} is in use by containers that gpushare does not know",
            "stop them and run `gpushare prune --assume-free`",
        )
    used, held = ledger.used.get(device.uuid, 0), _held_by(device, ledger)
    if device.uuid in ledger.exclusive:
        raise CapacityError(
            f"device {device_name(device)} is taken as a whole{held}", "stop that container, or give it a limit"
        )
    if wanted.memory is None:
        if used and config.policy.unlimited != "shared":
            raise CapacityError(
                f"no limit was asked for, so all of device {device_name(device)}, "
                f"of which {human(used)} is granted{held}",
                f"set {names.ENV_MEMORY}, or stop them",
            )
        return None
    return _limited_bytes(wanted.memory, device, ledger, config)


def _limited_bytes(memory: Amount, device: Device, ledger: Ledger, config: Config) -> int:
    """`memory` of the device if it is free. A device of unknown size serves one share: alone it cannot be
    oversold, and the driver itself says when it is full."""
    total, used = capacity_bytes(device, config.memory_overcommit), ledger.used.get(device.uuid, 0)
    if total == 0 and (memory.percent is not None or used):
        raise DeviceError(
            f"{memory.text} of device {device_name(device)}: its memory size is not known",
            "run `gpushare refresh` when nvidia-smi works",
        )
    size = bytes_of(memory, device.memory_bytes, device.granularity_bytes)
    if size == 0:
        raise RequestError(
            f"{memory.text} of device {device_name(device)} is less than one block "
            f"of {human(device.granularity_bytes)}",
            "ask for more",
        )
    if total and used + size > total:
        asked = memory.text if memory.percent is None else f"{memory.text} ({human(size)})"
        free = f"{human(max(0, total - used))} free of {human(total)}"
        raise CapacityError(
            f"device {device_name(device)}: {asked} asked, {free}{_held_by(device, ledger)}",
            f"stop {_whom(device, ledger)}, or ask for less" if used else "ask for less",
        )
    return size


def _require_compute(percent: Optional[int], soft: bool, device: Device, ledger: Ledger, config: Config) -> None:
    """Hard limits of one device add up to all of its time at most."""
    if percent is None or not _counts(percent, soft):
        return
    held = ledger.compute.get(device.uuid, ())
    total, used = int(100 * config.compute_overcommit), sum(size for _, size in held)
    if used + percent > total:
        raise CapacityError(
            f"device {device_name(device)}: {percent}% of compute asked, {max(0, total - used)}% free of {total}%"
            + _held([f"{names.short(name)} ({size}%)" for name, size in held]),
            (f"stop {'it' if len(held) == 1 else 'one of them'}, ask for less, " if held else "ask for less, ")
            + f"or set {names.ENV_COMPUTE_MODE}=soft",
        )


def _page_of(device: Device, ledger: Ledger) -> int:
    """The lowest number that nobody has."""
    taken = ledger.pages.get(device.uuid, frozenset())
    free = next((number for number in range(MAX_PEERS) if number not in taken), None)
    if free is None:
        raise CapacityError(
            f"device {device_name(device)} serves {len(taken)} containers already, the most there can be",
            "stop one of them, or ask for another device",
        )
    return free


def _wanted(request: Request, slots: int) -> tuple[Wanted, ...]:
    """What each slot asks for. Every slot must be covered: one without a limit would be unlimited by accident."""
    memory, compute = dict(request.memory), dict(request.compute)
    for name, by_slot in ((names.ENV_MEMORY, memory), (names.ENV_COMPUTE, compute)):
        if not by_slot or None in by_slot:
            continue
        said = _said(request, name, name)
        beyond = [slot for slot in by_slot if slot is not None and slot >= slots]
        missing = [slot for slot in range(slots) if slot not in by_slot]
        if beyond:
            raise RequestError(
                f"{said}: an amount for slot {beyond[0]}, but this container gets {_devices(slots)}, counted from 0",
                f"leave it out, or set {names.ENV_DEVICES}=any:{max(beyond) + 1} to get {max(beyond) + 1}",
            )
        if missing:
            raise RequestError(
                f"{said}: no amount for slot {missing[0]}, and this container gets {_devices(slots)}",
                "give every slot an amount, or one amount for all",
            )
    return tuple(
        Wanted(memory.get(slot, memory.get(None)), compute.get(slot, compute.get(None))) for slot in range(slots)
    )


def _candidates(request: Request, node: Node) -> tuple[Device, ...]:
    """The devices to choose from, in PCI order, which is the order in which the container counts them."""
    inventory, policy = node.inventory, node.config.policy
    selection = request.selection
    if not inventory.devices:
        raise DeviceError(f"no NVIDIA device on this host (driver root {inventory.root})", "load the driver")
    devices = usable_devices(inventory)
    if selection.kind == "list":
        text = ",".join(selection.names)
        found = (find_devices(names.ENV_DEVICES, text, name, inventory) for name in selection.names)
        named = {device.uuid for some in found for device in some}
        devices = tuple(device for device in devices if device.uuid in named)
        denied = next((device for device in devices if _denied_by_policy(device, policy)), None)
    else:
        denied = devices[0]
        devices = tuple(device for device in devices if not _denied_by_policy(device, policy))
        denied = None if devices else denied
    if denied is not None:
        raise PolicyError(
            f"device {device_name(denied)} ({denied.uuid}) is not among policy.allowed_devices",
            f"use {', '.join(policy.allowed_devices)}",
        )
    return devices


def _require(request: Request, device: Device, node: Node) -> None:
    """What the image needs of driver and device."""
    from . import constraints

    constraints.require(request.requirements, node.inventory, device)


def _refuse_unnamed(device: Device) -> None:
    """A MIG device is known to its limit by its uuid, which only NVML tells."""
    if device.uuid.startswith("MIG-GPU-"):
        raise DeviceError(
            f"the uuid of MIG device {device_name(device)} is not known (no answer from NVML)",
            "run gpushare refresh",
        )


def grant(request: Request, node: Node, ledger: Ledger) -> tuple[Share, ...]:
    """The shares of a request, slot by slot in PCI order; no device twice. `any` takes the first that fit."""
    if request.selection.kind == "none":
        return ()
    devices = _candidates(request, node)
    picking, soft = request.selection.kind == "any", request.compute_mode == "soft"
    slots = request.selection.count if picking else len(devices)
    wanted = _wanted(request, slots)
    shares: list[Share] = []
    refusals: list[GpushareError] = []
    for device in devices:
        if len(shares) == slots:
            break
        asked = wanted[len(shares)]
        try:
            _refuse_unnamed(device)
            if request.requirements:
                _require(request, device, node)
            asked, over = _within_policy(asked, device, node.config.policy)
            size = _memory_of(asked, device, ledger, node.config)
            _require_compute(asked.compute, soft, device, ledger, node.config)
            page = _page_of(device, ledger)
        except GpushareError as error:
            if not picking:
                raise
            refusals.append(error)
            continue
        how = (request.priority, request.oversubscribe, over, page)
        shares.append(Share(len(shares), device, size, asked.compute, soft, *how))
    if len(shares) < slots:
        raise _too_few(request, slots, len(devices), refusals)
    return tuple(shares)


def _too_few(request: Request, slots: int, devices: int, refusals: list[GpushareError]) -> GpushareError:
    """Why `any` found too few. The only reason is told as it is, several are put into one line."""
    if devices < slots:
        asked = _said(request, names.ENV_DEVICES, f"any:{slots}")
        return CapacityError(f"{asked}: this container may use {_devices(devices)}", "ask for fewer")
    if len({error.message for error in refusals}) == 1:
        return refusals[0]
    kind = CapacityError if any(isinstance(error, CapacityError) for error in refusals) else type(refusals[0])
    reasons = " | ".join(error.message for error in refusals[:4])
    more = f" | and {len(refusals) - 4} more" if len(refusals) > 4 else ""
    hint = refusals[0].hint.replace("stop it,", "stop one of them,")  # of several devices' holders
    return kind(f"no device fits: {reasons}{more}", hint)
