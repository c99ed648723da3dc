"""Choose the devices of a request, and how much of each: a pure function of what is granted already.

    ledger_of(leases, policy, blocked)  -> Ledger                  ledger.py
    grant(request, node, ledger)        -> tuple[Share, ...]      () for `none`: driver files, no GPU
    named_devices.named(request, node)                -> tuple[Device, ...]     the devices that the request may get
    survey(request, node, ledger)       -> tuple[Verdict, ...]    for each device: what it offers, or why it cannot

The caller holds the lease lock around both, so that two requests never see the same free bytes. `grant` raises
CapacityError (with the numbers and the containers that use the device), PolicyError, RequestError or DeviceError. The
result depends on the leases only, not on their order. Runs on the start path.
"""

from typing import NamedTuple, Optional

from ..core import constants
from ..core.errors import CapacityError, GpushareError, RequestError
from ..core.model import Config, Device, Node, Request, Share
from ..core.quantity import described
from ..core.quoting import setting
from ..gpu.selectors import device_name
from ..request import named_devices
from ..state.ledger import Ledger, capacity_bytes, capacity_percent, counts, ledger_of
from . import admission, backends, lending, oversubscribing
from .admission import Allocation, SlotRequest
from .held import HeldError

__all__ = ["Ledger", "Verdict", "capacity_bytes", "grant", "ledger_of", "survey"]
_ALL = 1_000_000  # resolution at which fullness is compared
_MANY = 1_000  # more than the containers that a device can have
_SHOWN = 8  # devices that a refusal lists


class Verdict(NamedTuple):
    """One device for one slot: an allocation, or why not. `fullness`: how full the device would be, for comparing."""

    device: Device
    allocation: Optional[Allocation]
    refusal: Optional[GpushareError]
    fullness: int


def _devices(count: int) -> str:
    return f"{count} device" if count == 1 else f"{count} devices"


def _setting_of(request: Request, variable: str, otherwise: str) -> str:
    """Return `NAME="VALUE"` of the variable or annotation that requests this; `otherwise` if there is none."""
    suffixes = (constants.ANNOTATIONS[variable], *(constants.MEMORY_ENDS if variable == constants.ENV_MEMORY else ()))
    found = next((pair for pair in request.sources if pair[0] == variable or pair[0].endswith(suffixes)), None)
    return setting(*found) if found else otherwise


def _wanted(request: Request, slots: int) -> tuple[SlotRequest, ...]:
    """Return the request of each slot. Raise if a slot has none: it would be unlimited by accident."""
    memory, compute = dict(request.memory), dict(request.compute)
    for name, by_slot in ((constants.ENV_MEMORY, memory), (constants.ENV_COMPUTE, compute)):
        if not by_slot or None in by_slot:
            continue
        said = _setting_of(request, name, name)
        beyond = [slot for slot in by_slot if slot is not None and slot >= slots]
        missing = [slot for slot in range(slots) if slot not in by_slot]
        if beyond:
            raise RequestError(
                f"{said}: an amount for slot {beyond[0]}, but this container gets {_devices(slots)}, counted from 0",
                f"leave it out, or set {constants.ENV_DEVICES}=any:{max(beyond) + 1} to get {max(beyond) + 1}",
            )
        if missing:
            raise RequestError(
                f"{said}: no amount for slot {missing[0]}, and this container gets {_devices(slots)}",
                "give every slot an amount, or one amount for all",
            )
    scalings = dict(request.scalings)
    return tuple(
        SlotRequest(
            memory.get(slot, memory.get(None)),
            compute.get(slot, compute.get(None)),
            scalings.get(slot, scalings.get(None, 1.0)),
        )
        for slot in range(slots)
    )


def grant(request: Request, node: Node, ledger: Ledger) -> tuple[Share, ...]:
    """Return the shares of a request, slot by slot in PCI order; no device twice."""
    if request.selection.kind == "none":
        return ()
    devices = named_devices.named(request, node)
    if request.selection.kind == "any":
        chosen = _choose(request, node, ledger, devices)
    else:
        wanted = _wanted(request, len(devices))
        chosen = [
            (device, admission.admit(wanted[at], request, device, node, ledger)) for at, device in enumerate(devices)
        ]
    soft = request.compute_mode == "soft"
    shares = tuple(
        Share(
            *(
                slot,
                backends.charged(device, allocation.enforcers, node),
                allocation.memory_limit_bytes,
                allocation.compute_percent,
                soft,
                request.priority,
            ),
            *(allocation.virtual_bytes > 0, allocation.clamped, allocation.page),
            virtual_bytes=allocation.virtual_bytes,
            memory_backend=allocation.enforcers.memory,
            compute_backend=allocation.enforcers.compute,
        )
        for slot, (device, allocation) in enumerate(chosen)
    )
    if any(share.virtual_bytes for share in shares):
        oversubscribing.require_budget(shares, node, ledger, request.sources)
    if any(memory.ceiling for _, memory in request.memory):
        shares = lending.lent(shares, [one.memory for one in _wanted(request, len(shares))], node, ledger)
    return shares


# `any`


def _fullness(allocation: Allocation, device: Device, soft: bool, ledger: Ledger, config: Config) -> int:
    """Return how full the device is after this allocation: memory and compute count half each. The number of
    containers decides between devices without limits."""
    total, used = capacity_bytes(device, config), ledger.used.get(device.uuid, 0)
    memory = _ALL
    if allocation.memory_limit_bytes is not None and total:
        memory = (used + allocation.memory_limit_bytes) * _ALL // total
    elif config.policy.unlimited == "shared" and total:
        memory = used * _ALL // total
    percent = sum(size for _, size in ledger.compute.get(device.uuid, ()))
    if counts(allocation.compute_percent, soft):
        percent += allocation.compute_percent or 0
    compute = percent * _ALL // max(1, capacity_percent(device, config))
    return (memory + compute) * _MANY + len(ledger.holders.get(device.uuid, ()))


def _verdict(wanted: SlotRequest, request: Request, device: Device, node: Node, ledger: Ledger) -> Verdict:
    denied = named_devices.denial(device, node.config.policy)
    if denied:
        return Verdict(device, None, denied, 0)
    try:
        allocation = admission.admit(wanted, request, device, node, ledger)
    except GpushareError as error:
        return Verdict(device, None, error, 0)
    full = _fullness(allocation, device, request.compute_mode == "soft", ledger, node.config)
    return Verdict(device, allocation, None, full)


def survey(request: Request, node: Node, ledger: Ledger) -> tuple[Verdict, ...]:
    """Judge all devices for the first slot of `any`, for `gpushare explain`."""
    wanted = _wanted(request, request.selection.count)[0]
    return tuple(_verdict(wanted, request, device, node, ledger) for device in named_devices.named(request, node))


def _choose(
    request: Request, node: Node, ledger: Ledger, devices: tuple[Device, ...]
) -> list[tuple[Device, Allocation]]:
    """Choose as many devices as slots, in PCI order, that are together the fullest (binpack) or emptiest (spread);
    the first of equals. Slots may request different amounts, so this keeps the best way to fill each number of slots
    with the devices so far."""
    slots = request.selection.count
    wanted = _wanted(request, slots)
    allowed = sum(not named_devices.denial(device, node.config.policy) for device in devices)
    if 0 < allowed < slots:
        asked = _setting_of(request, constants.ENV_DEVICES, f"any:{slots}")
        raise CapacityError(f"{asked}: this container may use {_devices(allowed)}", "ask for fewer")
    sign = 1 if node.config.placement == "spread" else -1
    best: dict[int, tuple[int, list[tuple[Device, Allocation]]]] = {0: (0, [])}  # slots filled -> (cost, how)
    refused: list[Verdict] = []
    for device in devices:
        verdicts: dict[SlotRequest, Verdict] = {}
        for slot in range(slots - 1, -1, -1):
            if slot not in best:
                continue
            asked_here = wanted[slot]
            if asked_here not in verdicts:
                verdicts[asked_here] = _verdict(asked_here, request, device, node, ledger)
            allocation = verdicts[asked_here].allocation
            if allocation is None:
                continue
            cost, how = best[slot]
            cost += sign * verdicts[asked_here].fullness
            if slot + 1 not in best or cost < best[slot + 1][0]:
                best[slot + 1] = (cost, [*how, (device, allocation)])
        refused += [one for one in verdicts.values() if one.allocation is None][:1]
    if slots not in best:
        raise _too_few(request, max(best), refused)
    return best[slots][1]


def short_name(device: Device) -> str:
    """Return `GPU 0` or `MIG 0:1`."""
    return f"{'MIG' if device.parent else 'GPU'} {device_name(device)}"


def _memory_of(request: Request) -> str:
    """Return `4 GiB of memory`, with the units of the reasons; "" if the slots have different amounts."""
    texts = {described(amount) for _, amount in request.memory}
    return f"{texts.pop()} of memory" if len(texts) == 1 else ""


def _too_few(request: Request, fit: int, refused: list[Verdict]) -> GpushareError:
    """Return why `any` found too few devices: a single reason as it is, several reasons in one line by device."""
    errors = [verdict.refusal for verdict in refused if verdict.refusal]
    if not fit and len({error.draft for error in errors}) == 1:
        return errors[0]
    asked = [
        _setting_of(request, constants.ENV_DEVICES, ""),
        _memory_of(request) or _setting_of(request, constants.ENV_MEMORY, ""),
        _setting_of(request, constants.ENV_COMPUTE, ""),
    ]
    reasons = [f"{short_name(one.device)}: {one.refusal.draft_brief}" for one in refused[:_SHOWN] if one.refusal]
    reasons += [f"{len(refused) - _SHOWN} more"] if len(refused) > _SHOWN else []
    full = any(isinstance(error, CapacityError) for error in errors)
    found = f"{_devices(fit)} of {request.selection.count} fit" if fit else "no device fits"
    hint = "ask for less, or stop a container (`gpushare list`)" if full else errors[0].hint
    message = f"{found} {' and '.join(filter(None, asked)) or 'any'}: {'; '.join(reasons)}"
    if not full:
        return type(errors[0])(message, hint)
    return HeldError(message, hint, "", [name for one in errors[:_SHOWN] for name in getattr(one, "containers", ())])
