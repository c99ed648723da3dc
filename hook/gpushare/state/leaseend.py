"""End leases, except by the start that made them (leases.undo).

release(...)              the lease of a container that is gone
release_reserved_by(...)  the lease of a start that failed, by its creator
sweep(...)                all dead leases
"""

from __future__ import annotations

import os
from typing import Optional

from ..core import constants
from ..core.model import Lease
from ..core.quoting import shown
from ..system import filelock, procs
from . import accounts, leases, mounttables, storage


def release(state_dir: str, container_id: str, ended: Optional[leases.Ended] = None) -> str:
    """Release the lease of `container_id` unless a living process holds it. Return "" or why it was kept; call `ended`
    after a release.

    Not even poststop may free a share in use: runc also calls it for a failed create, and the id may be that of another
    container (of another runc root). If the lease cannot be read, a process that has the usage file proves that the
    container lives; this search runs before the lock is taken.
    """
    if not storage.is_ready(state_dir):
        return ""
    before = leases.judged(state_dir, container_id)
    user = _user(state_dir, container_id) if isinstance(before, leases.Damaged) else ""
    with leases.locked(state_dir):
        lease = leases.judged(state_dir, container_id)
        if isinstance(lease, leases.Damaged):
            if user or lease != before:
                return f"lease of {shown(container_id)} is kept: {lease.reason}, and {user or 'it has just changed'}"
        elif lease is not None and not leases.why_dead(state_dir, lease, procs.boot_id()):
            pid = lease.init_pid or lease.creator_pid
            return f"lease of {shown(container_id)} is kept: pid {pid}, or a process that it started, is alive"
        final = accounts.closed(state_dir, lease, known=True) if isinstance(lease, Lease) else None
        gone = leases.drop(state_dir, container_id, lease.shares if isinstance(lease, Lease) else ())
    if gone and ended and final:
        ended(final)
    return ""


def _user(state_dir: str, container_id: str) -> str:
    """Return why a container with an unreadable lease may still run; "" if it does not."""
    if filelock.is_locked(os.path.join(storage.container_dir(state_dir, container_id), "rw", "usage")):
        return "a process uses its limits"
    pid, left_out = mounttables.user_of(mounttables.page_device(state_dir, container_id), constants.RW_DIR)
    return f"pid {pid} is alive" if pid else left_out and f"{left_out}; if it is gone: gpushare prune --assume-free"


def release_reserved_by(
    state_dir: str, container_id: str, bundle: str, creator_pid: int, ended: Optional[leases.Ended] = None
) -> bool:
    """Release a reserved lease on behalf of its living creator, whose create failed: runc calls poststop then, and
    gpushare-runtime has become that runc."""
    if not storage.is_ready(state_dir):
        return False
    with leases.locked(state_dir):
        lease = leases.find(state_dir, container_id)
        if lease is None or (lease.state, lease.bundle, lease.creator_pid) != ("reserved", bundle, creator_pid):
            return False
        final = accounts.closed(state_dir, lease, known=True)
        gone = leases.drop(state_dir, container_id, lease.shares)
    if gone and ended:
        ended(final)
    return gone


def sweep(state_dir: str, assume_free: bool = False, ended: Optional[leases.Ended] = None) -> list[str]:
    """Discard all dead and partial leases, with `assume_free` damaged ones too. Return their ids."""
    with leases.locked(state_dir):
        seen = leases.view(state_dir)
        dead, partial = leases.discard_dead(state_dir, seen)
        gone = [one.lease.id for one in dead] + partial
        if assume_free:
            gone += [damage.id for damage in seen.damaged if storage.discard(state_dir, damage.id)]
    if ended:
        for one in dead:
            ended(one)
    return gone
