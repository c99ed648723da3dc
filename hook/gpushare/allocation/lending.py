"""Lend memory above a request, up to its limit (docs/lending.md). Loaded only for such a request.

    lent(shares, amounts, node, ledger) -> shares    each with its limit, where the memory can be taken back
    notes(request, shares, config)      -> lines     limits that are not granted for a reason of the device
    changed(share, memory, node, ledger) -> share    with another limit, for a running container
    ceiling_bytes(amount, device, config) -> int     the limit in bytes that policy allows

A lent share has its request as memory_limit_bytes, which is what the ledger counts, and its limit as virtual_bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from ..core import constants
from ..core.errors import PolicyError, RequestError
from ..core.model import Amount, Config, Device, Node, Request, Share
from ..core.quantity import amount, bytes_of, described, human
from ..request import lending
from ..state import agentlock
from ..state.ledger import Ledger, capacity_bytes
from . import oversubscribing
from .backends import BACKENDS

_PASCAL = 6  # compute capability of the first GPUs that move managed memory while it is in use


def ceiling_bytes(limit: Amount, device: Device, config: Config) -> int:
    """Return the memory limit in whole blocks: at most the device, and policy.max_memory."""
    block = max(1, device.granularity_bytes)
    size = min(bytes_of(limit, device.memory_bytes, block), capacity_bytes(device, config), device.memory_bytes)
    if config.policy.max_memory:
        most = bytes_of(amount("policy.max_memory", config.policy.max_memory), device.memory_bytes, block)
        size = min(size, most)
    return size - size % block


def _refusal(share: Share, limit_bytes: int, config: Config) -> str:
    """Return why this share cannot borrow; "" if only the host's memory may be short."""
    if share.oversubscribe:
        return "the share is oversubscribed already"
    mode, names = config.policy.lent_as, (share.memory_backend, share.compute_backend)
    backend = next((name for name in names if mode not in BACKENDS[name].lends), "")
    if backend and BACKENDS[backend].lends:
        return f"backend {backend} cannot lend with policy.lending {mode}"
    if backend:
        return f"backend {backend} cannot take memory back"
    generation = share.device.arch.partition(".")[0]
    if mode == constants.MOVABLE and generation.isdigit() and int(generation) < _PASCAL:
        return f"the GPU, of compute capability {share.device.arch}, cannot move memory to the host"
    if share.memory_limit_bytes is None or limit_bytes <= share.memory_limit_bytes:
        return "the device and policy.max_memory allow no more"
    if mode == constants.EVICT and not agentlock.is_held(config.state_dir):
        return f"policy.lending is {config.policy.lending}, and gpushare agent does not run"
    return ""


def lent(shares: Sequence[Share], amounts: Sequence[Optional[Amount]], node: Node, ledger: Ledger) -> tuple[Share, ...]:
    """Return `shares`, each with its limit where memory can be lent. `amounts`: the request of each slot."""
    config, found = node.config, []
    mode = config.policy.lent_as
    free_bytes = oversubscribing.budget_bytes(config, node.inventory) - ledger.host_bytes
    free_bytes -= sum(share.virtual_bytes for share in shares)
    for share, wanted in zip(shares, amounts):
        size = ceiling_bytes(wanted.ceiling, share.device, config) if wanted is not None and wanted.ceiling else 0
        if size and not lending.refusal(config) and not _refusal(share, size, config):
            changed = share._replace(virtual_bytes=size, lending=mode)
            if not changed.has_host_part:
                share = changed
            elif size <= free_bytes and not ledger.blocked:
                free_bytes -= size
                share = changed
        found.append(share)
    return tuple(found)


def changed(share: Share, memory: Optional[Amount], node: Node, ledger: Ledger) -> Share:
    """Return the share of a running container with another limit, for `gpushare limit set`. A share that once borrowed
    stays lent, with a limit that may be its request: what it still holds above that can be taken back. Raise
    RequestError or PolicyError if nothing can be lent."""
    if memory is None:
        raise RequestError(
            f"no memory limit: slot {share.slot} borrows up to {human(share.virtual_bytes)}",
            "write REQUEST..LIMIT, such as 4Gi..12Gi",
        )
    config = node.config
    request_bytes = bytes_of(memory, share.device.memory_bytes, share.device.granularity_bytes)
    why, new = "", share._replace(virtual_bytes=request_bytes)
    if memory.ceiling:
        size = ceiling_bytes(memory.ceiling, share.device, config)
        why = lending.refusal(config) or _refusal(share._replace(memory_limit_bytes=request_bytes), size, config)
        if not why and share.lending not in ("", config.policy.lent_as):
            why = f"the container started with policy.lending {share.lending}, which is {config.policy.lending} now"
        new = share._replace(virtual_bytes=size, lending=config.policy.lent_as)
    free_bytes = oversubscribing.budget_bytes(config, node.inventory) - ledger.host_bytes
    more = new.host_promise_bytes > share.host_promise_bytes
    if not why and more and (new.host_promise_bytes > free_bytes or ledger.blocked):
        why = f"oversubscription.host_memory has {human(max(0, free_bytes))} free"
    if why and not memory.ceiling:
        raise PolicyError(f"{described(memory)}: the container can borrow, and {why}", "ask for less")
    if why:
        raise PolicyError(f"{described(memory)}: {why}, so no memory is lent", "ask for one amount, such as 4Gi")
    return new


def notes(request: Request, shares: Sequence[Share], config: Config) -> tuple[str, ...]:
    """Return a line for each limit that lending.notes of the request does not mention and that is not granted, or not
    in full."""
    if lending.refusal(config):
        return ()
    found, by_slot = [], dict(request.memory)
    for share in shares:
        wanted = by_slot.get(share.slot, by_slot.get(None))
        if wanted is None or wanted.ceiling is None:
            continue
        size = ceiling_bytes(wanted.ceiling, share.device, config)
        if not share.lending:
            why = _refusal(share, size, config) or "oversubscription.host_memory has no room for the limit"
            found.append(lending.line(wanted, why))
        elif size < bytes_of(wanted.ceiling, share.device.memory_bytes, 1):
            found.append(
                f"memory {described(wanted)}: the limit is {human(size)}, all that device and policy.max_memory allow"
            )
    return tuple(dict.fromkeys(found))
