"""Who holds which limit: the one table of backends (start path).

    BACKENDS                                      one row each; docs/backends.md is written from it
    BEYOND                                        the row of memory beyond the device, whose holder nobody names
    choose(memory, compute, site)      -> Holders for one device; raises the reason why not
    reasons(share, site)               -> text    why those, for explain
    require_kept(share)                           raises where a changed share could not be held
    ops(shares, node, folder)          -> ops     what they add to the plan
    change(before, after, folder)                 limits of a container that runs
    for_programs(request, node)        -> Node    of `gpushare run`

The choice is made for each limit by itself: memory and compute of one share may have different holders. A request names
backends ("mps", "dmem,mps"), of which each holds what it can, and the shim what none of them holds by its nature; one
that cannot do on this device what it is there for is refused. `auto`: the first of policy.allowed_backends that can. No
limit is ever without a holder. The shim is in every container: it counts and shows the limits, whoever else enforces
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional

from ..core import constants
from ..core.errors import DeviceError, PolicyError, RequestError
from ..core.model import Lease, Node, Policy, Request, Share
from ..core.ops import Op
from ..core.quoting import shown
from ..gpu.selectors import device_name
from ..request.policy import named_backends
from ..system import rootless
from .site import Site

MEMORY, COMPUTE = "memory", "compute"
VIRTUAL = "memory beyond the device"  # of an oversubscribed share: what goes on in host memory
LIMITS = (MEMORY, COMPUTE)
AUTO, SHIM, MPS, DMEM = constants.AUTO, "shim", "mps", "dmem"


class Holders(NamedTuple):
    """Names of rows. For a limit that nobody set: who would hold it."""

    memory: str = SHIM
    compute: str = SHIM


class Backend(NamedTuple):
    """One row. The texts are for docs/backends.md."""

    name: str
    holds: tuple[str, ...]  # of LIMITS, or VIRTUAL
    in_cgroup: bool  # whether it needs a cgroup that is the container's own
    optional: bool  # whether it is there for something even where nobody sets a limit that it holds
    supports: Callable[[str, Site], Optional[str]]  # (limit, where) -> why it cannot; None: it can
    keeps: Callable[[Share], Optional[str]]  # why it cannot hold what `gpushare limit set` wants
    ops: Callable[[tuple[Share, ...], Node, str], Sequence[Op]]  # (its shares, node, containers/<id>)
    change: Callable[[Sequence[Share], Sequence[Share], str], None]  # its shares (before, after, containers/<id>)
    enforced_by: str
    bypassed_by: str
    changes_live: str
    tried: str


# The rows' functions


def _no_ops(shares: tuple[Share, ...], node: Node, folder: str) -> Sequence[Op]:
    return ()


def _no_change(before: Sequence[Share], after: Sequence[Share], folder: str) -> None:
    """What the limits file says is all."""


def _shim(limit: str, site: Site) -> Optional[str]:
    if limit == COMPUTE and MPS in site.ledger.holding.get(site.device.uuid, ()):
        return "containers of MPS are on the device, and the driver does not slice time between those"
    return None


def _mps(limit: str, site: Site) -> Optional[str]:
    device, request = site.device, site.request
    if device.parent:
        return "it is offered for whole GPUs, not inside of MIG devices"
    if any(part.parent == device.uuid for part in site.node.inventory.mig):
        return "this GPU is divided into MIG devices"
    if rootless.is_rootless():
        return "its daemon belongs to root, and this is rootless"
    wrong = _mps_words(request.compute_mode == "soft", request.priority, request.oversubscribe)
    if wrong:
        return wrong
    if SHIM in site.ledger.holding.get(device.uuid, ()):
        return "containers without MPS are on the device, with which its clients would have to take turns"
    from . import mps

    return mps.unsupported(site)


def _mps_words(soft: bool, priority: int, oversubscribe: bool = False) -> Optional[str]:
    words = (
        (soft, "its percentages are hard: it does not lend what others leave idle"),
        (priority > 0, "it has no high priority, only a low one"),
        (oversubscribe, "it has no memory beyond the device's own"),
    )
    return next((reason for said, reason in words if said), None)


def _mps_ops(shares: tuple[Share, ...], node: Node, folder: str) -> Sequence[Op]:
    from . import mps

    return mps.ops(shares, node.config)


def _mps_change(before: Sequence[Share], after: Sequence[Share], folder: str) -> None:
    from . import mps

    mps.require_offered(before, after, folder)


def _dmem(limit: str, site: Site) -> Optional[str]:
    if site.device.parent:
        return "the driver has no regions for MIG devices"
    if site.request.oversubscribe:
        return "managed memory is not counted there"
    if rootless.is_rootless():
        return "it needs rights over cgroups, and this is rootless"
    from . import dmem

    return dmem.unsupported(site.device, site.node.inventory)


def _dmem_ops(shares: tuple[Share, ...], node: Node, folder: str) -> Sequence[Op]:
    from . import dmem

    return dmem.ops(shares, node.inventory, folder)


def _dmem_change(before: Sequence[Share], after: Sequence[Share], folder: str) -> None:
    from . import dmem

    dmem.change(folder, before, after)


BACKENDS: dict[str, Backend] = {
    row.name: row
    for row in (
        Backend(
            name=SHIM,
            holds=LIMITS,
            in_cgroup=False,
            optional=True,
            supports=_shim,
            keeps=lambda share: None,
            ops=_no_ops,
            change=_no_change,
            enforced_by="our library, in every process of the container: an allocation over the limit fails, a launch "
            "waits. For all processes of the container together.",
            bypassed_by="a program that goes around the CUDA library on purpose, and what CUDA does not know of: "
            "OpenGL, Vulkan, video codecs (docs/security.md)",
            changes_live="memory, compute, mode, priority, pause: at once",
            tried="on the simulated driver",
        ),
        Backend(
            name=MPS,
            holds=(COMPUTE,),
            in_cgroup=False,
            optional=True,
            supports=_mps,
            keeps=lambda share: _mps_words(share.soft, share.priority),
            ops=_mps_ops,
            change=_mps_change,
            enforced_by="NVIDIA's MPS server: each process of the container gets at most its percentage of the "
            "multiprocessors, at the same time as others. The container's memory over all processes stays with "
            "the shim.",
            bypassed_by="a container of several processes, each of which gets the percentage; a program that goes "
            "around MPS then shares time with its server",
            changes_live="compute, for processes that begin later; neither mode nor priority",
            tried="with NVIDIA's control daemon, without a GPU (docs/mps.md)",
        ),
        Backend(
            name=DMEM,
            holds=(MEMORY,),
            in_cgroup=True,
            optional=False,
            supports=_dmem,
            keeps=lambda share: None,
            ops=_dmem_ops,
            change=_dmem_change,
            enforced_by="the kernel's dmem cgroup controller, asked by the driver: an allocation over the limit fails, "
            "for all of the container together, whichever way it is made. The shim holds the same limit above it.",
            bypassed_by="managed memory, which the driver does not charge there; who may write to cgroups",
            changes_live="memory: at once",
            tried="on a cgroup tree of plain files; not run on hardware",
        ),
    )
}

# Whoever holds the memory of such a share has to let it go on, which the shim alone does: see the rows' `supports`.
BEYOND = Backend(
    name="oversubscribe",
    holds=(VIRTUAL,),
    in_cgroup=False,
    optional=True,
    supports=lambda limit, site: None,
    keeps=lambda share: None,
    ops=_no_ops,
    change=_no_change,
    enforced_by="our library, which counts both parts against their limits: what the device's part has no room for is "
    "memory of the host (managed memory; of cuMemCreate, the NUMA node's), and what fits in neither fails. The host's "
    "budget is promised whole before a start.",
    bypassed_by="whatever goes around the shim, as above; where the kernel does not count pages of that memory, the "
    "container's memory cgroup does not hold it either",
    changes_live="the border between both parts, with the memory limit: at once; the whole stays as it was promised",
    tried="on the simulated driver (docs/oversubscription.md)",
)


# Choosing


def _order(limit: str, request: Request, policy: Policy) -> tuple[str, ...]:
    """Who is asked for this limit, the first that can has it."""
    named = named_backends(request)
    names_of = tuple(name for name in named or policy.allowed_backends if limit in BACKENDS[name].holds)
    return names_of or ((SHIM,) if named and SHIM in policy.allowed_backends else ())


def _holder(limit: str, limited: bool, site: Site) -> tuple[str, dict[str, str]]:
    """(who holds this limit, why those before him do not). "": nobody."""
    why_not: dict[str, str] = {}
    for name in _order(limit, site.request, site.node.config.policy):
        row = BACKENDS[name]
        if limited or row.optional:
            reason = row.supports(limit, site)
            if reason is None:
                return name, why_not
            why_not[name] = reason
            if name in named_backends(site.request):  # what was asked for by its name is not replaced
                break
    return "", why_not


def _nobody(limit: str, limited: bool, site: Site, why_not: dict[str, str]) -> str:
    """Who stands for a limit that nobody set and nobody holds: the shim, where it can be beside those that are on the
    device, whom a container without a limit must not slow down. "": nobody; `why_not` says it then."""
    if limited or (why_not and named_backends(site.request)):
        return ""
    reason = BACKENDS[SHIM].supports(limit, site)
    if reason is not None:
        why_not[SHIM] = reason
    return "" if reason else SHIM


def choose(memory: bool, compute: bool, site: Site) -> Holders:
    """Who holds the limits of a share of this device; `memory`, `compute`: whether there is one. Raises DeviceError,
    PolicyError and RequestError."""
    where, found = f"device {device_name(site.device)}", []
    for limit, limited in zip(LIMITS, (memory, compute)):
        name, why_not = _holder(limit, limited, site)
        name = name or _nobody(limit, limited, site, why_not)
        if not name and why_not:
            reasons_of = "; ".join(f"{backend} cannot: {reason}" for backend, reason in why_not.items())
            raise DeviceError(
                f"nothing holds a limit on {limit} of {where}: {reasons_of}",
                _way_out(site, why_not),
                reasons_of,
            )
        if not name and limited:
            allowed = ", ".join(site.node.config.policy.allowed_backends)
            raise PolicyError(
                f"nothing that is allowed on this node holds a limit on {limit} (policy.allowed_backends: {allowed})",
                f"add {SHIM} to policy.allowed_backends",
            )
        found.append(name)
    for name in named_backends(site.request):
        if name not in found and not BACKENDS[name].optional:
            raise RequestError(
                f"backend {shown(name)} has no limit on {' or '.join(BACKENDS[name].holds)} of {where} to hold",
                f"set {constants.ENV_MEMORY}, or leave {name} out",
            )
    return Holders(*found)


def _way_out(site: Site, why_not: dict[str, str]) -> str:
    if SHIM in why_not:
        return "use another device, or stop those containers"
    allowed = SHIM in site.node.config.policy.allowed_backends
    return f"set {constants.ENV_BACKEND}={SHIM}" if allowed else f"add {SHIM} to policy.allowed_backends"


def require_kept(share: Share) -> None:
    """Raises RequestError where the holders of a changed share cannot hold it."""
    for name in {share.memory_backend, share.compute_backend}:
        reason = BACKENDS[name].keeps(share)
        if reason:
            raise RequestError(f"{name} holds a limit of device {device_name(share.device)}: {reason}", "leave it out")


def _of(row: Backend, shares: Sequence[Share]) -> tuple[Share, ...]:
    return tuple(share for share in shares if row.name in (share.memory_backend, share.compute_backend))


def ops(shares: tuple[Share, ...], node: Node, folder: str) -> list[Op]:
    """What the holders of these shares need in a container. `folder`: containers/<id>."""
    return [op for row in BACKENDS.values() if _of(row, shares) for op in row.ops(_of(row, shares), node, folder)]


def change(before: Sequence[Share], after: Sequence[Share], folder: str) -> None:
    """Those that hold limits elsewhere than in the limits file hold those of `after` from now on. Raises KernelError
    and CapacityError, with nothing changed."""
    for row in BACKENDS.values():
        if _of(row, after):
            row.change(_of(row, before), _of(row, after), folder)


def for_programs(request: Request, node: Node) -> Node:
    """The node as a program sees it that is no container, and has no cgroup of its own. Raises RequestError."""
    rules = node.config.policy
    left = tuple(name for name in rules.allowed_backends if not BACKENDS[name].in_cgroup)
    for name in named_backends(request):
        if BACKENDS[name].in_cgroup:
            raise RequestError(
                f"backend {shown(name)} is for containers: a program has no cgroup of its own", "use shim"
            )
    return node._replace(config=node.config._replace(policy=rules._replace(allowed_backends=left)))


def in_limits(shares: tuple[Share, ...], state_dir: str, uid: int) -> tuple[int, int, int]:
    """What of a holder the shim has to know, for the limits file: a mps.Grant. `uid`: of the container's first process,
    as it counts. Raises DeviceError."""
    theirs = _of(BACKENDS[MPS], shares)
    if not theirs:
        return (0, 0, 0)
    from . import mps

    return mps.grant_of(theirs, state_dir, uid)


def allows(policy: Policy, name: str) -> bool:
    return name in policy.allowed_backends


def having(name: str, leases: Sequence[Lease], uuid: str) -> tuple[Lease, ...]:
    """Containers of which that backend holds a limit on this device."""
    row = BACKENDS[name]
    return tuple(lease for lease in leases if any(share.device.uuid == uuid for share in _of(row, lease.shares)))


# Telling


def reasons(share: Share, site: Site) -> str:
    """Why these hold the limits of `share`: `memory by dmem (asked); compute by shim (dmem holds memory only)`."""
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
        return "asked"
    if named:
        return f"{' and '.join(named)} does not hold {limit}"
    _, why_not = _holder(limit, limited, site)
    skipped = [f"not {other}: {reason}" for other, reason in why_not.items()]
    able = [other for other in policy.allowed_backends if limit in BACKENDS[other].holds]
    first = "the only one allowed" if len(able) == 1 else "the first allowed one that can"
    return ", ".join(["auto", first, *skipped])
