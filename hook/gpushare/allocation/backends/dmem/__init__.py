"""The kernel's dmem cgroup controller, or the driver by cgroup, as a backend for memory. regions.py does the work.

Runs on the start path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from ....core import constants
from ....core.model import Node, Share
from ....core.ops import Op
from ....system import rootless
from ..base import MEMORY, Backend, Site
from . import regions


def _why_unsupported(limit: str, site: Site) -> Optional[str]:
    if site.device.parent:
        return "the driver has no regions for MIG devices"
    if site.request.oversubscribe:
        return "managed memory is not counted there"
    if rootless.is_rootless():
        return "it needs rights over cgroups, and this is rootless"
    return regions.unsupported(site.device, site.node.inventory)


def _ops(shares: tuple[Share, ...], node: Node, folder: str) -> Sequence[Op]:
    return regions.ops(shares, node.inventory, folder)


def _change(before: Sequence[Share], after: Sequence[Share], folder: str) -> None:
    regions.change(folder, before, after)


BACKEND = Backend(
    name="dmem",
    enforces=(MEMORY,),
    why_unsupported=_why_unsupported,
    ops=_ops,
    change=_change,
    in_cgroup=True,
    optional=False,
    lends=(constants.EVICT,),  # movable memory is managed memory, which is not counted there
    enforced_by="the kernel's dmem cgroup controller, which the driver charges: an allocation over the limit fails, "
    "however it is made. All processes of the container count together. The shim enforces the same limit too.",
    bypassed_by="managed memory, which the driver does not charge there; a process that may write to cgroups",
    changes_live="memory: at once",
    tested="on a cgroup tree of plain files; not run on hardware",
)
