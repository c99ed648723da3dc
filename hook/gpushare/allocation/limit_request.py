"""Turn the options of `gpushare limit set` into a container's new shares. Pure; not on the start path.

    parse(memory, compute, mode, priority, device) -> LimitRequest     the options as text
    shares(lease, request, node, others, blocked) -> tuple[Share, ...]
    paused(lease, paused)                         -> tuple[Share, ...]

All raise RequestError; `shares` also raises the errors of `admission.regrant`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Optional

from ..core import quantity
from ..core.errors import RequestError
from ..core.model import Amount, Lease, Node, Share
from ..core.quoting import shown
from ..gpu.selectors import device_name
from ..state import ledger as books
from . import admission, backends, lending, quotas

MEMORY, COMPUTE, DEVICE = "--memory", "--compute", "--device"
NO_LIMIT = "unlimited"


class LimitRequest(NamedTuple):
    """The changes that are requested. None and "": no change."""

    memory: str = ""
    compute: Optional[int] = None  # percent; 100: no limit
    soft: Optional[bool] = None
    priority: Optional[int] = None
    device: str = ""  # a slot or a uuid; "": every device of the container


def parse(memory: str = "", compute: str = "", mode: str = "", priority: str = "", device: str = "") -> LimitRequest:
    """Parse the options. Raise RequestError for a value that no container can have."""
    text = memory.strip()
    if text and text != NO_LIMIT:
        if text[0] in "+-":
            quantity.amount(MEMORY, text[1:])
        else:
            quantity.amount_or_range(MEMORY, text)
        if text[0] in "+-" and text.endswith("%"):
            raise quantity.wrong(
                MEMORY, memory, "a percentage cannot be added or subtracted", "write +1Gi, -512Mi, or 25%"
            )
    percent = quantity.whole_percent(COMPUTE, compute) if compute else None
    return LimitRequest(
        text,
        percent,
        None if not mode else mode == "soft",
        None if not priority else int(priority in ("high", "1")),
        device.strip(),
    )


def shares(
    lease: Lease, wanted: LimitRequest, node: Node, others: Iterable[Lease], blocked: Iterable[str] = ()
) -> tuple[Share, ...]:
    """Return the shares of `lease`, changed. `others`: all live leases; the one of `lease` is ignored."""
    others = tuple(others)
    ledger = books.ledger_of((one for one in others if one.id != lease.id), node.config.policy, blocked)
    chosen = _slots(lease, wanted.device)
    changed = lease.shares
    for at, share in enumerate(lease.shares):
        if share.slot in chosen:
            beside = sum(one.host_promise_bytes for one in (*changed[:at], *changed[at + 1 :]))
            own = share.memory_limit_bytes or 0
            new = _changed(share, wanted, node, ledger._replace(host_bytes=ledger.host_bytes + beside, own_bytes=own))
            changed = (*changed[:at], new, *changed[at + 1 :])
    if node.config.policy.quotas:
        quotas.require_change(lease, changed, others, node.config.policy)
    return changed


def paused(lease: Lease, pause: bool) -> tuple[Share, ...]:
    """Return all shares of `lease`, paused or resumed."""
    return tuple(share._replace(paused=pause) for share in lease.shares)


def _changed(share: Share, wanted: LimitRequest, node: Node, ledger: books.Ledger) -> Share:
    compute = share.compute_percent if wanted.compute is None else wanted.compute
    compute = None if compute == 100 and share.compute_percent is None else compute
    soft = share.soft if wanted.soft is None else wanted.soft
    memory = _memory(share, wanted.memory)
    before = share
    if wanted.memory and (share.lending or (memory is not None and memory.ceiling is not None)):
        before = lending.changed(share, memory, node, ledger)
    changed = admission.regrant(before, admission.SlotRequest(memory, compute), soft, node, ledger)
    changed = changed if wanted.priority is None else changed._replace(priority=wanted.priority)
    backends.require_kept(changed)
    return changed


def _memory(share: Share, text: str) -> Optional[Amount]:
    """Return the new memory limit; None: no limit."""
    now = share.memory_limit_bytes
    if text == NO_LIMIT or (not text and now is None):
        return None
    if not text:
        return Amount(now, None, quantity.human(now or 0))
    if text[0] not in "+-":
        return quantity.amount_or_range(MEMORY, text)
    if share.lending:
        now_text = f"{quantity.human(now or 0)}..{quantity.human(share.virtual_bytes)}"
        raise quantity.wrong(
            MEMORY, text, f"slot {share.slot} has {now_text}", "write REQUEST..LIMIT, such as 4Gi..12Gi"
        )
    by = quantity.size_bytes(MEMORY, text[1:])
    if now is None:
        raise quantity.wrong(MEMORY, text, f"slot {share.slot} has no memory limit", "give a size such as 4Gi")
    after = now + by if text[0] == "+" else now - by
    if after <= 0:
        raise quantity.wrong(MEMORY, text, f"slot {share.slot} has only {quantity.human(now)}", "subtract less")
    return Amount(after, None, f"{quantity.human(now)} {text[0]} {quantity.human(by)}")


def _slots(lease: Lease, device: str) -> frozenset[int]:
    if not device:
        return frozenset(share.slot for share in lease.shares)
    found = frozenset(
        share.slot for share in lease.shares if device == str(share.slot) or device.lower() == share.device.uuid.lower()
    )
    if not found:
        known = ", ".join(f"{s.slot} (device {device_name(s.device)}, {s.device.uuid})" for s in lease.shares)
        raise RequestError(f"{DEVICE}={shown(device)}: this container has {known}", "name a slot or a uuid")
    return found
