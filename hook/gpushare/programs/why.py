"""The reasons for a container's devices and backends, for `gpushare explain`.

placed(request, node, ledger, shares) -> tuple[Reason, ...]     () if the container names them, with a limit
held(request, node, ledger, shares)   -> tuple[str, ...]        the backends of each device, and why
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..allocation import backends, placement
from ..allocation.backends.base import Site
from ..core.model import Device, Node, Request, Share
from ..state.ledger import Ledger, capacity_bytes, capacity_percent, counts, rule_of


class Reason(NamedTuple):
    """The verdict on one device."""

    device: str  # "GPU 0", "MIG 0:1"
    uuid: str
    chosen: bool
    text: str


def _left(verdict: placement.Verdict, request: Request, node: Node, ledger: Ledger) -> str:
    """Describe how full the device would be, which the strategy compares."""
    device, offer, config = verdict.device, verdict.allocation, node.config
    assert offer is not None
    total, used = capacity_bytes(device, config), ledger.used.get(device.uuid, 0)
    used += total if offer.memory_limit_bytes is None else offer.memory_limit_bytes
    percent = sum(size for _, size in ledger.compute.get(device.uuid, ()))
    if counts(offer.compute_percent, request.compute_mode == "soft"):
        percent += offer.compute_percent or 0
    memory = f"{min(100, 100 * used // total)}%" if total else "an unknown part"
    return (
        f"{memory} of memory and {100 * percent // max(1, capacity_percent(device, config))}% of compute granted then"
    )


def _equal(device: Device, slot: int, request: Request, node: Node) -> str:
    """Return ", an equal share (1 of 10)" if the container did not request an amount."""
    rule = rule_of(device, node.config)
    said = dict(request.memory)
    return f", an equal share (1 of {rule.split_count})" if rule and not {slot, None} & said.keys() else ""


def placed(request: Request, node: Node, ledger: Ledger, shares: Sequence[Share]) -> tuple[Reason, ...]:
    """Return the chosen devices with the reason for each, then the others with the reason against each."""
    got = {share.device.uuid: share.slot for share in shares}
    if request.selection.kind != "any":
        equal = [(share.device, _equal(share.device, share.slot, request, node)) for share in shares]
        return tuple(
            Reason(placement.short_name(device), device.uuid, True, f"named{text}") for device, text in equal if text
        )
    found = []
    for verdict in placement.survey(request, node, ledger):
        device = verdict.device
        slot = got.get(device.uuid)
        text = verdict.refusal.brief if verdict.refusal else _left(verdict, request, node, ledger)
        text += "" if slot is None else _equal(device, slot, request, node)
        text += f" ({node.config.placement})" if slot is not None else ""
        found.append(Reason(placement.short_name(device), device.uuid, slot is not None, text))
    return tuple(sorted(found, key=lambda reason: not reason.chosen))


def held(request: Request, node: Node, ledger: Ledger, shares: Sequence[Share]) -> tuple[str, ...]:
    """Return one line, or one for each device if they differ."""
    found = {}
    for share in shares:  # equal shares can exceed the device without a request for that
        checked = request._replace(oversubscribe=request.oversubscribe or share.has_host_part)
        site = Site(share.device, checked, node, ledger)
        found[placement.short_name(share.device)] = backends.reasons(share, site)
    told = {device: text for device, text in found.items() if text}
    if len(set(found.values())) == 1:
        return tuple(told.values())[:1]
    return tuple(f"{device}: {text}" for device, text in told.items())
