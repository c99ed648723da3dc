"""Reserve devices for a starting container: placement and lease are one step under the lock (start path).

reserve(...)             -> a lease in state "reserved", owned by the process of the start
recover(state_dir, node) -> the leases that were restored after the state directory was lost
"""

from __future__ import annotations

import os
import time
from typing import Optional

from ..core import constants
from ..core.errors import CapacityError, GpushareError, KernelError, what_to_do
from ..core.model import Bundle, Lease, Node, Request, Share
from ..core.quoting import shown
from ..request import policy
from ..state import accounts, activity_files, agentlock, leases, rebuild, shm_abi, storage
from ..state.accounts import Closed
from ..system import idmap, procs
from . import limit_update, placement, quotas


def reserve(
    state_dir: str,
    bundle: Bundle,
    request: Request,
    node: Node,
    ended: Optional[leases.Ended] = None,
) -> Lease:
    """Write a lease in state "reserved", owned by this process and placed against all live leases. Call `ended` with
    each dead lease that made room.

    Raise CapacityError if the id has a live lease, KernelError, and the errors of `placement.grant`; then nothing is
    left. containers/<id> exists on return. The caller calls `storage.empty_trash` afterwards.
    """
    dead: list[Closed] = []
    try:
        return _reserve(state_dir, bundle, request, node, dead)
    finally:
        if ended:
            for one in dead:
                ended(one)


def _reserve(state_dir: str, bundle: Bundle, request: Request, node: Node, dead: list[Closed]) -> Lease:
    me = procs.myself()
    while True:
        searched = _search(state_dir, node)
        with leases.locked(state_dir):
            if _rebuild(state_dir, node, searched) is None:
                continue
            seen = leases.view(state_dir)
            dead += leases.discard_dead(state_dir, seen)[0]
            _refuse_taken(bundle.id, seen)
            policy.refuse_second(request, bundle, seen.live)
            live = _changed(state_dir, seen.live)
            _stop_lending_alone(state_dir, live)
            ledger = placement.ledger_of(live, node.config.policy, seen.blocked(node))
            try:
                shares = placement.grant(request, node, ledger)
            except CapacityError:
                waiting = _in_line(state_dir, request, node, live, seen) if node.config.policy.suspend_idle_s else None
                if waiting is None:
                    raise
                shares = waiting
            whose = accounts.labels(bundle, request.uid)
            if node.config.policy.quotas:
                quotas.require(whose["uid"], whose["namespace"], shares, live, node.config.policy)
            new = [share.device.uuid for share in shares if not activity_files.is_ready(state_dir, share.device.uuid)]
            if not new:
                lease = Lease(
                    id=bundle.id,
                    state="reserved",
                    boot_id=procs.boot_id(),
                    bundle=bundle.path,
                    shares=tuple(share._replace(device=share.device.recorded) for share in shares),
                    creator_pid=me.pid,
                    creator_start=me.start,
                    created=time.time(),
                    dialect=request.dialect,
                    driver_version=node.inventory.driver_version,
                    sandbox=policy.pod_wide(request, bundle),
                    cri=bool(bundle.container_name),
                    began_ns=accounts.now_ns(),
                    **whose,
                )
                _make(state_dir, lease, live)
                return lease
        for uuid in new:  # first share of a device: mounting takes long, so without the lock
            activity_files.prepare(state_dir, uuid)


def _in_line(
    state_dir: str, request: Request, node: Node, live: tuple[Lease, ...], seen: leases.View
) -> Optional[tuple[Share, ...]]:
    """Return shares for a container that starts suspended: there is room once idle containers are suspended for it.
    None if there is not, if no agent runs that would resume it, or if the driver could not suspend it."""
    from . import suspension  # not in the snapshot: it needs all of ctypes

    if not agentlock.is_held(state_dir) or suspension.unable(node):
        return None
    others = tuple(
        one if suspension.refusal_of_shares(one.shares) else one._replace(shares=_suspended(one.shares)) for one in live
    )
    ledger = placement.ledger_of(others, node.config.policy, seen.blocked(node))
    try:
        shares = _suspended(placement.grant(request, node, ledger))
    except CapacityError:
        return None
    return None if suspension.refusal_of_shares(shares) else shares


def _suspended(shares: tuple[Share, ...]) -> tuple[Share, ...]:
    return tuple(share._replace(phase=constants.SUSPENDED) for share in shares)


def _refuse_taken(container_id: str, seen: leases.View) -> None:
    for lease in seen.live:
        if lease.id == container_id:
            pid = lease.init_pid or lease.creator_pid
            raise CapacityError(
                f"container id {shown(container_id)} already has a lease, {lease.state} by pid {pid} "
                f"for {shown(lease.bundle)}",
                "end it, or use another --name" if leases.ends(lease) else "delete that container, or use another id",
            )
    for damage in seen.damaged:
        if damage.id == container_id:
            raise CapacityError(
                f"container id {shown(container_id)} has a lease that cannot be read: {damage.reason}",
                "make sure that it does not run, then `gpushare prune --assume-free`",
            )


def _make(state_dir: str, lease: Lease, others: tuple[Lease, ...]) -> None:
    """Write a new lease and take its activity files. Raise KernelError or CapacityError, and leave nothing then."""
    try:
        os.mkdir(storage.container_dir(state_dir, lease.id), 0o700)
        idmap.give(storage.container_dir(state_dir, lease.id))
        leases.rewrite(state_dir, lease)
        for share in lease.shares:
            uuid = share.device.uuid
            holders = {
                one.page: (other.id, one)
                for other in (*others, lease)
                for one in other.shares
                if one.device.uuid == uuid
            }
            activity_files.take(state_dir, uuid, share.page, {page: who for page, (who, _) in holders.items()})
            activity_files.settle(state_dir, uuid, {page: shm_abi.granted(one) for page, (_, one) in holders.items()})
    except (OSError, GpushareError) as error:
        leases.drop(state_dir, lease.id, lease.shares)
        if isinstance(error, OSError):
            raise KernelError(f"directory of {shown(lease.id)}: {error.strerror}", what_to_do(error)) from error
        raise


def _changed(state_dir: str, live: tuple[Lease, ...]) -> tuple[Lease, ...]:
    """Complete a limit change that was killed. Return `live` with that change, and without memory that was freed
    since."""
    unfinished = os.path.lexists(os.path.join(state_dir, storage.CHANGING))
    if not unfinished and not any(share.draining_bytes for lease in live for share in lease.shares):
        return live
    try:
        limit_update.finish(state_dir)
    except GpushareError:  # `prune` reports it
        return live  # they still cover the previous limits
    return limit_update.settled(state_dir, live)


def _stop_lending_alone(state_dir: str, live: tuple[Lease, ...]) -> None:
    """Stop lending if the agent that could take the memory back was killed."""
    evicted = any(share.lending == constants.EVICT for lease in live for share in lease.shares)
    if evicted and not agentlock.is_held(state_dir):
        limit_update.lend_locked(state_dir, live, ())


def recover(state_dir: str, node: Node) -> tuple[str, ...]:
    """Restore the leases of a lost state directory now, not at the next start. Return the ids that got one."""
    while True:
        searched = _search(state_dir, node)
        with leases.locked(state_dir):
            written = _rebuild(state_dir, node, searched)
        if written is not None:
            return written


def _search(state_dir: str, node: Node) -> Optional[rebuild.SearchResult]:
    if not os.path.lexists(os.path.join(state_dir, storage.REBUILD)):
        return None
    return rebuild.search(state_dir, node)


def _rebuild(state_dir: str, node: Node, searched: Optional[rebuild.SearchResult]) -> Optional[tuple[str, ...]]:
    """Return the ids that got a lease; None if the state directory was lost again meanwhile."""
    if not os.path.lexists(os.path.join(state_dir, storage.REBUILD)):
        return ()
    if searched is None:
        return None
    return rebuild.run(state_dir, node, searched)
