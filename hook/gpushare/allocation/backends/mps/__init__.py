"""NVIDIA's MPS as a backend for compute: its server gives each client a percentage of the multiprocessors.

state.py has the files of a daemon, control.py its commands, daemon.py its start and stop, status.py what people see of
it. This module and state.py are imported while a container starts, the others are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from ....core.model import Device, Inventory, Node, Share
from ....core.ops import Op
from ....gpu import contexts
from ....system import rootless
from ..base import COMPUTE, Backend, Site
from . import state


def _why_unsupported(limit: str, site: Site) -> Optional[str]:
    device, request = site.device, site.request
    if device.parent:
        return "gpushare offers it for whole GPUs, not for MIG devices"
    if any(part.parent == device.uuid for part in site.node.inventory.mig):
        return "this GPU is divided into MIG devices"
    if rootless.is_rootless():
        return "the MPS daemon runs as root, and gpushare runs rootless here"
    reason = _unsupported_mode(request.compute_mode == "soft", request.priority, request.oversubscribe)
    if reason:
        return reason
    return state.unsupported(site)


def _unsupported_mode(soft: bool, priority: int, oversubscribe: bool = False) -> Optional[str]:
    reasons = (
        (soft, "its percentages are hard: it does not lend idle compute"),
        (priority > 0, "it has no high priority, only a low one"),
        (oversubscribe, "it has no memory beyond the device's own"),
    )
    return next((reason for requested, reason in reasons if requested), None)


def _ops(shares: tuple[Share, ...], node: Node, folder: str) -> Sequence[Op]:
    return state.ops(shares, node.config)


def _change(before: Sequence[Share], after: Sequence[Share], folder: str) -> None:
    state.require_offered(before, after, folder)


def _grant(shares: Sequence[Share], state_dir: str, uid: int) -> tuple[int, int, int]:
    return state.grant_of(shares, state_dir, uid)


def _charged(device: Device, inventory: Inventory) -> Device:
    return contexts.under_mps(device, inventory)


BACKEND = Backend(
    name="mps",
    enforces=(COMPUTE,),
    why_unsupported=_why_unsupported,
    alone="other containers on this device do not use MPS, and clients of MPS would wait for their time slices",
    why_unchangeable=lambda share: _unsupported_mode(share.soft, share.priority),
    ops=_ops,
    change=_change,
    grant=_grant,
    charged=_charged,
    enforced_by="NVIDIA's MPS server: each process of the container gets at most its percentage of the "
    "multiprocessors, at the same time as other processes. The shim still enforces the memory limit, over all "
    "processes of the container.",
    bypassed_by="a container can start several processes, and each gets the full percentage; a program that does not "
    "connect to MPS runs unlimited, and the device divides its time between it and the MPS server",
    changes_live="compute, for processes that begin later; neither mode nor priority",
    tested="with NVIDIA's control daemon, without a GPU (docs/mps.md)",
)
