"""Enforce `policy.quotas`: what all containers of a user or namespace hold together (start path, if there are quotas).

    require(uid, namespace, shares, live, policy)     raises PolicyError or CapacityError
    require_change(lease, shares, live, policy)       the same for changed limits; what does not grow is always granted

The caller holds the lease lock, so that two starts cannot both take what is left. A share without a memory limit counts
as the whole device, one without a compute limit as 100%; a soft limit counts in full."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, Optional

from ..core.errors import PolicyError
from ..core.model import Lease, Policy, Quota, Share
from ..core.quantity import human, size_bytes
from ..core.quoting import shown
from ..state.accounts import held_bytes
from ..state.shm_abi import NO_PERCENT
from .held import HeldError, held_by, ids


class _Kind(NamedTuple):
    """One resource that a quota caps."""

    name: str
    cap: Callable[[Quota], Optional[int]]  # None: no cap
    of: Callable[[Sequence[Share]], int]
    text: Callable[[int], str]
    asked: Callable[[int], str]


_KINDS = (
    _Kind(
        "memory",
        lambda quota: size_bytes("memory", quota.memory) if quota.memory else None,
        lambda shares: sum(map(held_bytes, shares)),
        human,
        lambda size: f"{human(size)} of memory",
    ),
    _Kind(
        "compute",
        lambda quota: quota.compute_percent or None,
        lambda shares: sum(NO_PERCENT if s.compute_percent is None else s.compute_percent for s in shares),
        "{}%".format,
        "{}% of compute".format,
    ),
    _Kind(
        "containers",
        lambda quota: quota.containers or None,
        lambda shares: int(bool(shares)),
        str,
        "{} container".format,
    ),
)


def require(uid: int, namespace: str, shares: Sequence[Share], live: Iterable[Lease], policy: Policy) -> None:
    """Refuse `shares` with which a quota of the user or namespace is exceeded. `live`: all other containers."""
    _require(uid, namespace, (), shares, tuple(live), policy)


def require_change(lease: Lease, shares: Sequence[Share], live: Iterable[Lease], policy: Policy) -> None:
    others = tuple(one for one in live if one.id != lease.id)
    _require(lease.uid, lease.namespace, lease.shares, shares, others, policy)


def _require(
    uid: int, namespace: str, before: Sequence[Share], shares: Sequence[Share], others: Sequence[Lease], policy: Policy
) -> None:
    for index, quota, members in _applying(uid, namespace, others, policy):
        for kind in _KINDS:
            cap, asked = kind.cap(quota), kind.of(shares)
            if cap is None or (before and asked <= kind.of(before)):
                continue
            held = [(one.id, kind.of(one.shares)) for one in members]
            used = sum(size for _, size in held)
            if used + asked > cap:
                whose = f"user {uid}" if quota.user else f"namespace {shown(namespace)}"
                _refuse(f"policy.quotas[{index}] of {whose}", kind, asked, used, cap, held)


def _applying(
    uid: int, namespace: str, others: Sequence[Lease], policy: Policy
) -> Iterator[tuple[int, Quota, tuple[Lease, ...]]]:
    """Yield (index, quota, other containers that count): the first entry for the user and the first for the
    namespace."""
    user_found = namespace_found = False
    for index, quota in enumerate(policy.quotas):
        if quota.user and not user_found and uid >= 0 and quota.user in ("*", str(uid)):
            user_found = True
            yield index, quota, tuple(one for one in others if one.uid == uid)
        elif quota.namespace and not namespace_found and namespace and fnmatchcase(namespace, quota.namespace):
            namespace_found = True
            yield index, quota, tuple(one for one in others if one.namespace == namespace)


def _refuse(quota: str, kind: _Kind, asked: int, used: int, cap: int, held: Sequence[tuple[str, int]]) -> None:
    if asked > cap:
        raise PolicyError(
            f"{quota} allows {kind.asked(cap)} in total, and {kind.text(asked)} was requested",
            f"ask for at most {kind.text(cap)}",
        )
    holders = [(name, kind.text(size)) for name, size in held if size]
    raise HeldError(
        f"{quota}: {kind.asked(asked)} requested, {kind.text(used)} of {kind.text(cap)} used" + held_by(holders),
        f"stop {'it' if len(holders) == 1 else 'one of them'}"
        + ("" if kind.name == "containers" else ", or ask for less"),
        containers=ids(holders),
    )
