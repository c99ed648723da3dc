"""Which devices a request gets, and how much of each: a pure function of what is granted already.

    ledger_of(leases, policy, blocked)  -> Ledger                  ledger.py
    grant(request, node, ledger)        -> tuple[Share, ...]      () for `none`: driver files, no GPU
    named_devices.named(request, node)                -> tuple[Device, ...]     those of which it is one; for `any` all
    survey(request, node, ledger)       -> tuple[Verdict, ...]    of each device, what speaks for it or against it

The caller holds the lease lock around both, so that two requests never see the same free bytes. `grant` raises
CapacityError (with the numbers and the holders), PolicyError, RequestError or DeviceError. The same leases give the
same answer: nothing is left to chance, nor to the order in which leases are found. Start path.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

from ..core import constants
from ..core.errors import CapacityError, GpushareError, RequestError
from ..core.model import Config, Device, Node, Request, Share
from ..core.quoting import setting
from ..gpu.selectors import device_name
from ..request import named_devices
from ..state.ledger import Ledger, capacity_bytes, capacity_percent, counts, ledger_of
from . import admission
from .admission import Allocation, SlotRequest

__all__ = ["Ledger", "Verdict", "capacity_bytes", "grant", "ledger_of", "survey"]
_ALL = 1_000_000  # parts of a device, for comparing how full they are
_MANY = 1_000  # more than the containers of a device
_SHOWN = 8  # devices that a refusal tells of


class Verdict(NamedTuple):
    """One device for one slot: an offer, or why not. `fullness`: how much of it would be granted, for comparing."""

    device: Device
    allocation: Optional[Allocation]
    refusal: Optional[GpushareError]
    fullness: int


def _devices(count: int) -> str:
    return f"{count} device" if count == 1 else f"{count} devices"


def _said(request: Request, variable: str, otherwise: str) -> str:
    """`NAME="VALUE"` as the container says it, be it a variable or an annotation; `otherwise` when it does not."""
    suffix = constants.ANNOTATIONS[variable]
    found = next((pair for pair in request.sources if pair[0] == variable or pair[0].endswith(suffix)), None)
    return setting(*found) if found else otherwise


def _wanted(request: Request, slots: int) -> tuple[SlotRequest, ...]:
    """What each slot asks for. Every slot must be covered: one without a limit would be unlimited by accident."""
    memory, compute = dict(request.memory), dict(request.compute)
    for name, by_slot in ((constants.ENV_MEMORY, memory), (constants.ENV_COMPUTE, compute)):
        if not by_slot or None in by_slot:
            continue
        said = _said(request, name, name)
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
    """The shares of a request, slot by slot in PCI order; no device twice."""
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
            *(slot, device, allocation.memory_limit_bytes, allocation.compute_percent, soft, request.priority),
            *(allocation.virtual_bytes > 0, allocation.clamped, allocation.page),
            virtual_bytes=allocation.virtual_bytes,
            memory_backend=allocation.holders.memory,
            compute_backend=allocation.holders.compute,
        )
        for slot, (device, allocation) in enumerate(chosen)
    )
    if any(share.virtual_bytes for share in shares):
        from . import oversubscribing

        oversubscribing.require_budget(shares, node, ledger, request.sources)
    return shares


# `any`


def _fullness(allocation: Allocation, device: Device, soft: bool, ledger: Ledger, config: Config) -> int:
    """How much of the device is granted once it gives this: memory and compute each for a half, then how many
    containers it has, which tells apart those that are limited in neither."""
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
    """All devices for the first slot of `any`, for people (`gpushare explain`)."""
    wanted = _wanted(request, request.selection.count)[0]
    return tuple(_verdict(wanted, request, device, node, ledger) for device in named_devices.named(request, node))


def _choose(
    request: Request, node: Node, ledger: Ledger, devices: tuple[Device, ...]
) -> list[tuple[Device, Allocation]]:
    """As many devices as slots, in PCI order, that are together the fullest (binpack) or the emptiest (spread); of
    equals the first. Slots may ask for different amounts, so for each number of slots the best way to fill them with
    the devices so far is kept."""
    slots = request.selection.count
    wanted = _wanted(request, slots)
    allowed = sum(not named_devices.denial(device, node.config.policy) for device in devices)
    if 0 < allowed < slots:
        asked = _said(request, constants.ENV_DEVICES, f"any:{slots}")
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
    """`GPU 0`, or `MIG 0:1`."""
    return f"{'MIG' if device.parent else 'GPU'} {device_name(device)}"


def _too_few(request: Request, fit: int, refused: list[Verdict]) -> GpushareError:
    """Why `any` found too few. The only reason is told as it is, several are put into one line, for each device."""
    errors = [verdict.refusal for verdict in refused if verdict.refusal]
    if not fit and len({error.message for error in errors}) == 1:
        return errors[0]
    asked = [_said(request, name, "") for name in (constants.ENV_DEVICES, constants.ENV_MEMORY, constants.ENV_COMPUTE)]
    reasons = [f"{short_name(one.device)}: {one.refusal.brief}" for one in refused[:_SHOWN] if one.refusal]
    reasons += [f"{len(refused) - _SHOWN} more"] if len(refused) > _SHOWN else []
    full = any(isinstance(error, CapacityError) for error in errors)
    kind = CapacityError if full else type(errors[0])
    found = f"{_devices(fit)} of {request.selection.count} fit" if fit else "no device fits"
    hint = "ask for less, or stop a container (`gpushare list`)" if full else errors[0].hint
    return kind(f"{found} {' and '.join(filter(None, asked)) or 'any'}: {'; '.join(reasons)}", hint)
