"""The type of a backend. Each package of this folder defines one, named BACKEND."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional

from ...core.model import Device, Inventory, Node, Request, Share
from ...core.ops import Op
from ...state.ledger import Ledger

MEMORY, COMPUTE = "memory", "compute"
VIRTUAL = "memory beyond the device"  # of an oversubscribed share: the part in host memory
LIMITS = (MEMORY, COMPUTE)
NO_GRANT = (0, 0, 0)


class Site(NamedTuple):
    """One device that one container may get."""

    device: Device
    request: Request
    node: Node
    ledger: Ledger


def _no_ops(shares: tuple[Share, ...], node: Node, folder: str) -> Sequence[Op]:
    return ()


def _no_change(before: Sequence[Share], after: Sequence[Share], folder: str) -> None:
    """Do nothing: the limits file is enough."""


def _no_grant(shares: Sequence[Share], state_dir: str, uid: int) -> tuple[int, int, int]:
    return NO_GRANT


class Backend(NamedTuple):
    """A backend that enforces limits. The last four texts are for docs/backends.md."""

    name: str
    enforces: tuple[str, ...]  # of LIMITS, or VIRTUAL
    why_unsupported: Callable[[str, Site], Optional[str]]  # (limit, site); None: it can enforce it there
    enforced_by: str
    bypassed_by: str
    changes_live: str
    tested: str
    # (share as `limit set` requests it); None: it can enforce that
    why_unchangeable: Callable[[Share], Optional[str]] = lambda share: None
    ops: Callable[[tuple[Share, ...], Node, str], Sequence[Op]] = _no_ops  # (its shares, node, containers/<id>)
    change: Callable[[Sequence[Share], Sequence[Share], str], None] = _no_change  # (before, after, containers/<id>)
    grant: Callable[[Sequence[Share], str, int], tuple[int, int, int]] = _no_grant  # (its shares, state directory, uid)
    charged: Callable[[Device, Inventory], Device] = lambda device, inventory: device  # with its size of contexts
    alone: str = ""  # why it cannot enforce compute on a device where another backend does; "": it can
    in_cgroup: bool = False  # whether it needs a cgroup that belongs to the container alone
    lends: tuple[str, ...] = ()  # values of policy.lending with which a container can borrow memory above its request
    suspends: bool = False  # whether the driver can move the memory of such containers to the host
    optional: bool = True  # whether it does something for a container even without a limit
