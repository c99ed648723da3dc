"""The table of backends, and the choice of a backend for each limit of a share (start path).

    BACKENDS                                      name -> Backend; docs/backends.md is written from it
    BEYOND                                        the backend of memory beyond the device, which no request names
    choose(memory, compute, site)      -> Enforcers for one device; raises the reason if no backend can
    reasons(share, site)               -> text    why these backends were chosen, for explain
    require_kept(share)                           raises if a changed share could not be enforced
    charged(device, enforcers, node)   -> Device  with the size that contexts have there
    ops(shares, node, folder)          -> ops     operations that they add to the plan
    change(before, after, folder)                 change the limits of a running container
    for_programs(request, node)        -> Node    for `gpushare run`
    limits_cgroup(share)               -> bool    whether a backend limits memory of the container's cgroup

Each limit has a choice of its own: different backends may enforce memory and compute of one share. A request names
backends ("mps", "dmem,mps"), each of which enforces the limits that it can, and the shim the rest; a named backend that
cannot enforce its limits on this device is refused. `auto` takes the first of policy.allowed_backends that can. No
limit is ever without a backend. The shim is in every container and reports the limits, whichever backend enforces
them.

To add a backend, add a package here that defines BACKEND (base.py), and its name to constants.BACKENDS.
"""

import importlib
from collections.abc import Sequence
from typing import NamedTuple, Optional

from ...core import constants
from ...core.errors import DeviceError, PolicyError, RequestError
from ...core.model import Device, Lease, Node, Policy, Request, Share
from ...core.ops import Op
from ...core.quoting import shown
from ...gpu.selectors import device_name
from ...request.policy import named_backends
from .base import COMPUTE, LIMITS, MEMORY, NO_GRANT, VIRTUAL, Backend, Site
from .oversubscribe import BEYOND

__all__ = ["BEYOND", "COMPUTE", "LIMITS", "MEMORY", "VIRTUAL", "Backend", "Site"]

AUTO, SHIM = constants.AUTO, constants.BACKENDS[0]
BACKENDS: dict[str, Backend] = {
    name: importlib.import_module(f".{name}", __package__).BACKEND for name in constants.BACKENDS
}


class Enforcers(NamedTuple):
    """Names of the backends that enforce the limits. For a limit that is not set: the backend that would."""

    memory: str = SHIM
    compute: str = SHIM


def charged(device: Device, enforcers: Enforcers, node: Node) -> Device:
    """Return `device` with the size that a context has under the backend that enforces compute."""
    return BACKENDS[enforcers.compute].charged(device, node.inventory) if enforcers.compute else device


# Choosing


def _order(limit: str, request: Request, policy: Policy) -> tuple[str, ...]:
    """Return the backends to try for this limit, the preferred one first."""
    named = named_backends(request)
    names_of = tuple(name for name in named or policy.allowed_backends if limit in BACKENDS[name].enforces)
    return names_of or ((SHIM,) if named and SHIM in policy.allowed_backends else ())


def _unsupported(row: Backend, limit: str, site: Site) -> Optional[str]:
    """Return why `row` cannot enforce `limit` there; None if it can."""
    present = site.ledger.holding.get(site.device.uuid, frozenset()) - {row.name, ""}
    return row.why_unsupported(limit, site) or (row.alone if limit == COMPUTE and present and row.alone else None)


def _enforcer(limit: str, limited: bool, site: Site) -> tuple[str, dict[str, str]]:
    """Return (the backend for this limit, or "" if none can; the reason of each backend before it that cannot)."""
    why_not: dict[str, str] = {}
    for name in _order(limit, site.request, site.node.config.policy):
        row = BACKENDS[name]
        if limited or row.optional:
            reason = _unsupported(row, limit, site)
            if reason is None:
                return name, why_not
            why_not[name] = reason
            if name in named_backends(site.request):  # no other backend replaces a named one
                break
    return "", why_not


def _without_limit(limit: str, limited: bool, site: Site, why_not: dict[str, str]) -> str:
    """Return the shim for a limit that is not set, if it works beside the containers on the device, which a container
    without a limit must not slow down. Otherwise return "" and add the reason to `why_not`."""
    if limited or (why_not and named_backends(site.request)):
        return ""
    reason = _unsupported(BACKENDS[SHIM], limit, site)
    if reason is not None:
        why_not[SHIM] = reason
    return "" if reason else SHIM


def choose(memory: bool, compute: bool, site: Site) -> Enforcers:
    """Choose the enforcers of a share of this device. `memory`, `compute`: whether that limit is set. Raise
    DeviceError, PolicyError or RequestError."""
    where, found = f"device {device_name(site.device)}", []
    for limit, limited in zip(LIMITS, (memory, compute)):
        name, why_not = _enforcer(limit, limited, site)
        name = name or _without_limit(limit, limited, site, why_not)
        if not name and why_not:
            reasons_of = "; ".join(f"{backend} cannot: {reason}" for backend, reason in why_not.items())
            raise DeviceError(
                f"no backend can enforce a limit on {limit} of {where}: {reasons_of}",
                _way_out(site, why_not),
                reasons_of,
            )
        if not name and limited:
            allowed = ", ".join(site.node.config.policy.allowed_backends)
            raise PolicyError(
                f"no backend that this node allows enforces a limit on {limit} (policy.allowed_backends: {allowed})",
                f"add {SHIM} to policy.allowed_backends",
            )
        found.append(name)
    for name in named_backends(site.request):
        if name not in found and not BACKENDS[name].optional:
            raise RequestError(
                f"backend {shown(name)} was requested, but no limit on "
                f"{' or '.join(BACKENDS[name].enforces)} of {where}",
                f"set {constants.ENV_MEMORY}, or leave {name} out",
            )
    return Enforcers(*found)


def _way_out(site: Site, why_not: dict[str, str]) -> str:
    if SHIM in why_not:
        return "use another device, or stop those containers"
    allowed = SHIM in site.node.config.policy.allowed_backends
    return f"set {constants.ENV_BACKEND}={SHIM}" if allowed else f"add {SHIM} to policy.allowed_backends"


def require_kept(share: Share) -> None:
    """Raise RequestError if the enforcers of a changed share cannot enforce it."""
    for name in {share.memory_backend, share.compute_backend}:
        reason = BACKENDS[name].why_unchangeable(share)
        if reason:
            raise RequestError(
                f"{name} enforces a limit of device {device_name(share.device)} and cannot apply this change: {reason}",
                "leave this change out",
            )


def _of(row: Backend, shares: Sequence[Share]) -> tuple[Share, ...]:
    return tuple(share for share in shares if row.name in (share.memory_backend, share.compute_backend))


def ops(shares: tuple[Share, ...], node: Node, folder: str) -> list[Op]:
    """Return the operations that the enforcers of these shares need in a container. `folder`: containers/<id>."""
    return [op for row in BACKENDS.values() if _of(row, shares) for op in row.ops(_of(row, shares), node, folder)]


def change(before: Sequence[Share], after: Sequence[Share], folder: str) -> None:
    """Set the limits of `after` in each backend that keeps limits outside of the limits file. On KernelError or
    CapacityError, nothing has changed."""
    for row in BACKENDS.values():
        if _of(row, after):
            row.change(_of(row, before), _of(row, after), folder)


def for_programs(request: Request, node: Node) -> Node:
    """Return the node with the backends that work without a container's cgroup. Raise RequestError if the request
    names another backend."""
    rules = node.config.policy
    left = tuple(name for name in rules.allowed_backends if not BACKENDS[name].in_cgroup)
    for name in named_backends(request):
        if BACKENDS[name].in_cgroup:
            raise RequestError(
                f"backend {shown(name)} is for containers: a program has no cgroup of its own", "use shim"
            )
    return node._replace(config=node.config._replace(policy=rules._replace(allowed_backends=left)))


def limits_cgroup(share: Share) -> bool:
    return BACKENDS[share.memory_backend].in_cgroup


def in_limits(shares: tuple[Share, ...], state_dir: str, uid: int) -> tuple[int, int, int]:
    """Return the mps.Grant that the limits file passes to the shim. `uid`: of the container's first process, in its
    user namespace. Raise DeviceError."""
    for row in BACKENDS.values():
        found = row.grant(_of(row, shares), state_dir, uid) if _of(row, shares) else NO_GRANT
        if found != NO_GRANT:
            return found
    return NO_GRANT


def allows(policy: Policy, name: str) -> bool:
    return name in policy.allowed_backends


def having(name: str, leases: Sequence[Lease], uuid: str) -> tuple[Lease, ...]:
    """Return the containers for which that backend enforces a limit on this device."""
    row = BACKENDS[name]
    return tuple(lease for lease in leases if any(share.device.uuid == uuid for share in _of(row, lease.shares)))


# Reasons, for explain


def reasons(share: Share, site: Site) -> str:
    """Return why these backends enforce `share`: `memory by dmem (requested); compute by shim (dmem does not enforce
    compute)`."""
    told = []
    for limit, name, limited in (
        (MEMORY, share.memory_backend, share.memory_limit_bytes is not None),
        (COMPUTE, share.compute_backend, share.compute_percent is not None),
    ):
        if limited or name != SHIM:
            told.append(f"{limit} by {name} ({_because(limit, name, limited, site)})")
        elif limit == MEMORY and share.device.parent:
            told.append("memory by the hardware (all of a MIG device)")
    return "; ".join(told)


def _because(limit: str, name: str, limited: bool, site: Site) -> str:
    policy, named = site.node.config.policy, named_backends(site.request)
    if name in named:
        return "requested"
    if named:
        return f"{' and '.join(named)} does not enforce {limit}"
    _, why_not = _enforcer(limit, limited, site)
    skipped = [f"not {other}: {reason}" for other, reason in why_not.items()]
    able = [other for other in policy.allowed_backends if limit in BACKENDS[other].enforces]
    first = "the only one allowed" if len(able) == 1 else "the first allowed one that can"
    return ", ".join(["auto", first, *skipped])
