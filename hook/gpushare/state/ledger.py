"""Sum leases: what is granted on each device, and what can be granted. Pure, on the start path.

ledger_of(leases, policy, blocked)   -> Ledger
capacity_bytes(device, config)       -> int      total memory that may be granted
turn_bytes(device, config)           -> int      memory reserved for migration slices (docs/oversubscription.md)
rule_of(device, config)              -> SharingRule | None     equal shares, for requests without a limit
capacity_percent(device, config)     -> int      maximum sum of hard compute limits
counts(percent, soft)                -> bool     whether a compute limit reserves device time
"""

from collections.abc import Iterable
from typing import NamedTuple, Optional

from ..core.model import Config, Device, Lease, Policy, SharingRule
from ..core.quantity import amount, bytes_of
from ..request import sharing
from .shm_abi import NO_PERCENT


class Ledger(NamedTuple):
    """The grants by device uuid."""

    used: dict[str, int]  # bytes granted to limited shares
    exclusive: frozenset[str] = frozenset()  # devices that are granted whole
    blocked: frozenset[str] = frozenset()  # unknown use: no new lease
    holders: dict[str, tuple[tuple[str, Optional[int]], ...]] = {}  # (container id, bytes; None: whole device)
    pages: dict[str, frozenset[int]] = {}  # numbers of activity files in use
    compute: dict[str, tuple[tuple[str, int], ...]] = {}  # (container id, percent) of hard limits
    holding: dict[str, frozenset[str]] = {}  # backends that enforce compute there
    host_bytes: int = 0  # promised on all devices to shares that are oversubscribed, or lent movable memory
    own_bytes: int = 0  # of the share whose limit is being changed; `used` is without them


def ledger_of(leases: Iterable[Lease], policy: Policy, blocked: Iterable[str] = ()) -> Ledger:
    """Return the ledger of live leases. A share without a limit takes the whole device unless policy shares it."""
    used: dict[str, int] = {}
    exclusive = set()
    holders: dict[str, tuple[tuple[str, Optional[int]], ...]] = {}
    pages: dict[str, frozenset[int]] = {}
    compute: dict[str, tuple[tuple[str, int], ...]] = {}
    holding: dict[str, frozenset[str]] = {}
    host_bytes = 0
    for lease in leases:
        for share in lease.shares:
            uuid = share.device.uuid
            host_bytes += share.host_promise_bytes
            limit_bytes = share.memory_limit_bytes
            held_bytes = None if limit_bytes is None else max(limit_bytes, share.draining_bytes)
            pages[uuid] = pages.get(uuid, frozenset()) | {share.page}
            if not share.counts:
                continue
            holders[uuid] = (*holders.get(uuid, ()), (lease.id, held_bytes))
            holding[uuid] = holding.get(uuid, frozenset()) | {share.compute_backend}
            if share.compute_percent is not None and counts(share.compute_percent, share.soft):
                compute[uuid] = (*compute.get(uuid, ()), (lease.id, share.compute_percent))
            if held_bytes is not None:
                used[uuid] = used.get(uuid, 0) + held_bytes
            elif policy.unlimited != "shared":
                exclusive.add(uuid)
    return Ledger(used, frozenset(exclusive), frozenset(blocked), holders, pages, compute, holding, host_bytes)


def counts(percent: Optional[int], soft: bool) -> bool:
    """Return whether a compute limit reserves device time. A soft limit gets only what other containers leave."""
    return percent is not None and percent < NO_PERCENT and not soft


def capacity_bytes(device: Device, config: Config) -> int:
    """Return the total memory that may be granted; 0 if the device's size is not known."""
    size = int(device.memory_bytes * config.memory_overcommit) - turn_bytes(device, config)
    return max(0, size - size % device.granularity_bytes)


def turn_bytes(device: Device, config: Config) -> int:
    """Return whole blocks of whole MiB; 0 without migration slices."""
    if not (config.turn_ms and config.host_memory and device.memory_bytes):
        return 0
    size = bytes_of(amount("oversubscription.turn_memory", config.turn_memory), device.memory_bytes, 1 << 21)
    return min(size, device.memory_bytes) >> 21 << 21


def rule_of(device: Device, config: Config) -> Optional[SharingRule]:
    """Return how `device` is divided into equal shares; None if it is not."""
    if not config.sharing:
        return None
    return sharing.rule_of(device, config.sharing)


def capacity_percent(device: Device, config: Config) -> int:
    """Return the maximum sum of hard limits: 100% times the larger of compute_overcommit and cores_scaling."""
    rule = rule_of(device, config)
    return int(100 * max(config.compute_overcommit, rule.cores_scaling if rule else 0))
