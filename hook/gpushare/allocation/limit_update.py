"""Change the limits of a running container. Not on the start path, except to complete a change that was killed.

    change(state_dir, id, decide)  write lease.json and the limits file as one change; takes the lock
    settled(state_dir, leases)     the leases without memory that their containers have freed since
    unfinished, finish             find and complete a change that was killed; `finish` needs the lock
    store(fd, shares)              write the limits file alone
    lend, lend_locked              put the limits of lent shares in force, or their requests; stop_lending

Other containers are admitted against lease.json. So it is written first, with all that the container may still hold.
The limits file follows, by one store for all devices (gpushare_abi.h). A command that is killed in between leaves the
file `changing` with the container's id; the next start, change or prune then writes the limits file. Until then a lease
never has less memory than the limits in force.
"""

import mmap
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Optional, TypeVar

from ..core import constants
from ..core.errors import CapacityError, DeviceError, GpushareError, KernelError, RequestError, of_file
from ..core.model import Lease, Share
from ..core.quoting import shown
from ..state import accounts, activity_files, leases, rebuild, shm_abi, storage
from ..system import syscalls
from . import backends

_GENERATION, _DEVICE = shm_abi.offset("gs_limits", "generation"), shm_abi.offset("gs_limits", "device")
_DRAINING = shm_abi.offset("gs_device_limit", "draining_bytes")
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# (lease, all live leases, uuids in unknown use) -> the new shares; raises GpushareError if they cannot be granted
Result = TypeVar("Result")
DecideFn = Callable[[Lease, tuple[Lease, ...], "leases.View"], tuple[Share, ...]]


class Changed(NamedTuple):
    """The outcome of a change. `used_bytes`: by slot, the memory in use; None if the usage file cannot be read."""

    before: Lease
    after: Lease
    used_bytes: Optional[tuple[int, ...]]


def change(state_dir: str, container_id: str, decide: DecideFn, dry_run: bool = False) -> Changed:
    """Give `container_id` the shares that `decide` returns, or with `dry_run` only report them. Raise RequestError
    if it has no lease, CapacityError if it is starting, and the errors of `decide`. After an error nothing has
    changed."""

    def locked(lost: int) -> Changed:
        with leases.locked(state_dir):
            return _change(state_dir, container_id, decide, dry_run, lost)

    return _with_lost(state_dir, container_id, locked)


def _with_lost(state_dir: str, container_id: str, work: Callable[[int], Result]) -> Result:
    """Call `work` with the limits file of a container whose directory is lost; with -1 if it is not lost or has none.
    The search for it reads mount tables, which tenants can make long: so it comes before the lock is taken."""
    if os.path.lexists(_path(state_dir, container_id)) or leases.find(state_dir, container_id) is None:
        return work(-1)
    lost = rebuild.open_limits(state_dir, container_id)
    try:
        return work(lost)
    finally:
        if lost >= 0:
            os.close(lost)


def _change(state_dir: str, container_id: str, decide: DecideFn, dry_run: bool, lost: int) -> Changed:
    """Make the change; the caller holds the lock."""
    finish(state_dir)
    seen = leases.view(state_dir)
    live = settled(state_dir, seen.live, keep=not dry_run)
    before = accounts.counted(_running(container_id, live, seen), accounts.now_ns())
    after = before._replace(shares=_kept(before.shares, decide(before, live, seen)))
    if after.shares != before.shares:
        fd = _open(state_dir, before.id, lost)
        try:
            if not dry_run:
                _mark(state_dir, after.id)
                _elsewhere(state_dir, before, after)
                leases.rewrite(state_dir, after)
                _publish(state_dir, after.shares)
                store(fd, after.shares)
        finally:
            os.close(fd)
    used = _used(state_dir, after)
    if not dry_run and after.shares != before.shares:
        after = _settled(state_dir, after, used)
        _unmark(state_dir)
    return Changed(before, after, used)


def _elsewhere(state_dir: str, before: Lease, after: Lease) -> None:
    """Change the limits that other backends enforce. This comes first: if they refuse, nothing has changed."""
    try:
        backends.change(before.shares, after.shares, storage.container_dir(state_dir, after.id))
    except GpushareError:
        _unmark(state_dir)
        raise


def _running(container_id: str, live: Sequence[Lease], seen: leases.View) -> Lease:
    for lease in live:
        if lease.id == container_id:
            if lease.state == "held":
                return lease
            raise CapacityError(
                f"container {shown(constants.short(container_id))} is starting", "try again when it runs"
            )
    for damage in seen.damaged:
        if damage.id == container_id:
            raise CapacityError(
                f"container {shown(constants.short(container_id))} has a lease that cannot be read: {damage.reason}",
                "make sure that it does not run, then `gpushare prune --assume-free`",
            )
    for lease, why in seen.dead:
        if lease.id == container_id:
            raise RequestError(f"container {shown(constants.short(container_id))} has ended: {why}", "start it again")
    raise RequestError(f"no running container {shown(container_id)}", "`gpushare list` shows containers with a share")


def _kept(before: Sequence[Share], after: Sequence[Share]) -> tuple[Share, ...]:
    """Return `after` plus what may still be in use by the previous limits: all of them, until the use is known."""
    return tuple(
        new._replace(draining_bytes=_more(new, max(_most(old), old.draining_bytes))) for old, new in zip(before, after)
    )


def _most(share: Share) -> int:
    return share.device.memory_bytes if share.memory_limit_bytes is None else share.memory_limit_bytes


def _more(share: Share, held_bytes: int) -> int:
    """Return `held_bytes` if that is more than the share's limit and cannot be taken back."""
    limit = None if share.lending == constants.EVICT else share.memory_limit_bytes
    return held_bytes if limit is not None and held_bytes > limit else 0


# Freed memory


def settled(state_dir: str, live: Iterable[Lease], keep: bool = True) -> tuple[Lease, ...]:
    """Free what was held above a lowered limit, as far as the usage file reports it freed. A usage file that cannot
    be read frees nothing. With `keep` the leases are written, and the caller holds the lock; without it the result is
    only for display."""
    return tuple(
        _settled(state_dir, lease, _used(state_dir, lease), keep) if _drains(lease) else lease for lease in live
    )


def _drains(lease: Lease) -> bool:
    return any(share.draining_bytes for share in lease.shares)


def _settled(state_dir: str, lease: Lease, used: Optional[tuple[int, ...]], keep: bool = True) -> Lease:
    """Return `share` with what is still held above its limit, at most as much as before."""
    if used is None:
        return lease
    shares = tuple(
        share._replace(draining_bytes=_more(share, min(share.draining_bytes, used[share.slot])))
        for share in lease.shares
    )
    if shares == lease.shares:
        return lease
    known = accounts.counted(lease, accounts.now_ns())
    after = known._replace(
        shares=tuple(share._replace(draining_bytes=new.draining_bytes) for share, new in zip(known.shares, shares))
    )
    if keep:
        leases.rewrite(state_dir, after)
        try:
            _store(state_dir, after.id, after.shares)
        except GpushareError:
            pass  # if the state directory is lost now, too much counts as held
    return after


def _used(state_dir: str, lease: Lease) -> Optional[tuple[int, ...]]:
    try:
        usage = storage.read_usage(state_dir, lease.id, len(lease.shares))
    except shm_abi.RegionError:
        return None
    return tuple(usage.used_bytes(share.slot) for share in lease.shares)


# Changes that were killed


def unfinished(state_dir: str) -> Optional[str]:
    """Return the container whose change was killed or is in progress; "" if nothing of it has changed yet; None if
    there is no such change."""
    try:
        with open(os.path.join(state_dir, storage.CHANGING), encoding="utf-8", errors="surrogateescape") as marker:
            return marker.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise of_file(error, str(error.filename)) from error


def finish(state_dir: str) -> None:
    """Write the limits file of a change that was killed from its lease. The caller holds the lock. Raise KernelError
    or RegionError if it cannot be written; then the marker stays."""
    container_id = unfinished(state_dir)
    if container_id is None:
        return
    lease = next((lease for lease in leases.view(state_dir).live if lease.id == container_id), None)
    if lease is not None and lease.state == "held":
        backends.change((), lease.shares, storage.container_dir(state_dir, lease.id))
        _publish(state_dir, lease.shares)
        shares = lease.shares
        _with_lost(state_dir, lease.id, lambda lost: _store(state_dir, container_id, shares, lost))
    _unmark(state_dir)


def _mark(state_dir: str, container_id: str) -> None:
    path = os.path.join(state_dir, storage.CHANGING)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            storage.write_all(fd, os.fsencode(container_id))
        finally:
            os.close(fd)
    except OSError as error:
        raise of_file(error, path) from error


def _unmark(state_dir: str) -> None:
    try:
        os.unlink(os.path.join(state_dir, storage.CHANGING))
    except FileNotFoundError:
        pass


# The limits file


def _store(state_dir: str, container_id: str, shares: Sequence[Share], lost: int = -1) -> None:
    fd = _open(state_dir, container_id, lost)
    try:
        store(fd, shares)
    finally:
        os.close(fd)


def store(fd: int, shares: Sequence[Share], lent: Optional[Collection[str]] = None) -> None:
    """Write `shares` to the limits file `fd`, and wake all waiters. A reader sees the whole change or none of it.
    `lent`: uuids of the devices where limits are in force and not requests; None: as before. Raise RegionError or
    KernelError."""
    known = shm_abi.read_limits(os.pread(fd, shm_abi.LIMITS_SIZE + 1, 0))
    if [limit.uuid for limit in known.devices] != [share.device.uuid for share in shares]:
        raise shm_abi.RegionError(f"limits file is damaged: it has {len(known.devices)} other devices")
    lent = _lent(known) if lent is None else lent
    lending = [share.slot for share in shares if share.lending == constants.EVICT and share.device.uuid in lent]
    with mmap.mmap(fd, shm_abi.LIMITS_SIZE) as file, memoryview(file) as plain, plain.cast("Q") as words:
        for index, share in enumerate(shares):  # the copy that no program reads
            words[(_DEVICE + index * shm_abi.DEVICE_SIZE + _DRAINING) // 8] = share.draining_bytes
        # An even generation has the copy `next_` in force, an odd one the other copy
        stores = [shm_abi.stores(shares, copy, lending) for copy in ("next_", "")]
        in_force = words[_GENERATION // 8] % 2
        if all(words[at // 8] == word for at, word in stores[in_force]):
            return
        for at, word in stores[1 - in_force]:
            words[at // 8] = word
        syscalls.futex_wake(file, 0)  # no waiter is there: this is a barrier between the stores
        words[_GENERATION // 8] += 1
        syscalls.futex_wake(file, _GENERATION)


def _publish(state_dir: str, shares: Sequence[Share]) -> None:
    """Publish the new grants in the index of each device, one word each, which other containers see at once. Raise
    KernelError."""
    size = shm_abi.packer("gs_peers").size
    for share in shares:
        path = f"{activity_files.directory(state_dir, share.device.uuid)}/{activity_files.INDEX}"
        try:
            fd = _writable(path)
            try:
                at = activity_files.granted_at(share.page)
                with mmap.mmap(fd, size) as file, memoryview(file) as plain, plain.cast("Q") as words:
                    words[at // 8] = shm_abi.granted(share)
            finally:
                os.close(fd)
        except FileNotFoundError:
            continue  # a lost state directory: the next start on the device publishes it
        except (OSError, ValueError) as error:
            raise KernelError(f"{shown(path)}: {getattr(error, 'strerror', error)}", "run as root") from error


def _lent(limits: shm_abi.Limits) -> frozenset[str]:
    return frozenset(limit.uuid for limit in limits.devices if limit.flags & shm_abi.DEVICE_LENDING)


# Lending


def lend(state_dir: str, lent: Collection[str], live: Sequence[Lease]) -> None:
    """For shares that an agent can take back: put their limits in force on the devices `lent`, and their requests on
    all other devices. Takes the lock if something changes in `live`. Nothing is lent on a device where a container is
    suspended or resumed just now: the driver may lose a process whose memory is not there when it is restored."""
    lendable = set(lent) - _moving(live)
    if not any(_differs(state_dir, lease, lendable) for lease in live):
        return
    with leases.locked(state_dir):
        finish(state_dir)
        live = leases.view(state_dir).live
        lend_locked(state_dir, live, set(lent) - _moving(live))


def stop_lending(state_dir: str) -> None:
    """Stop lending on the devices where a container is suspended or resumed just now."""
    live = leases.view(state_dir).live
    lent: set[str] = set()
    for lease in live:
        if any(share.lending == constants.EVICT for share in lease.shares):
            try:
                lent |= _lent(storage.read_limits(_path(state_dir, lease.id)))
            except shm_abi.RegionError:
                continue  # it is starting or ending
    lend(state_dir, lent, live)


def _moving(live: Iterable[Lease]) -> set[str]:
    phases = (constants.SUSPENDING, constants.RESUMING)
    return {share.device.uuid for lease in live for share in lease.shares if share.phase in phases}


def lend_locked(state_dir: str, live: Iterable[Lease], lent: Collection[str]) -> None:
    """The same; the caller holds the lock."""
    for lease in live:
        if _differs(state_dir, lease, lent):
            try:
                fd = _open(state_dir, lease.id)
                try:
                    store(fd, lease.shares, lent)
                finally:
                    os.close(fd)
            except GpushareError:
                continue  # it is ending, or its limits file is damaged: the other containers must not suffer


def _differs(state_dir: str, lease: Lease, lent: Collection[str]) -> bool:
    wanted = {s.device.uuid for s in lease.shares if s.lending == constants.EVICT and s.device.uuid in lent}
    if lease.state != "held" or not any(share.lending == constants.EVICT for share in lease.shares):
        return False
    try:
        limits = storage.read_limits(_path(state_dir, lease.id))
    except shm_abi.RegionError:
        return False  # it is starting or ending
    return _lent(limits) != wanted


def _writable(path: str) -> int:
    """Open a limits file for writing. Raise OSError."""
    try:
        return os.open(path, _OPEN)
    except PermissionError:  # of a rootless user: 0444
        os.chmod(path, 0o644)
        try:
            return os.open(path, _OPEN)
        finally:
            os.chmod(path, 0o444)


def _path(state_dir: str, container_id: str) -> str:
    return os.path.join(storage.container_dir(state_dir, container_id), "share", "limits")


def _open(state_dir: str, container_id: str, lost: int = -1) -> int:
    """Open the limits file of a container for writing; return a copy of `lost` if its directory is lost. Raise
    DeviceError if it has none, or KernelError."""
    path = _path(state_dir, container_id)
    try:
        return _writable(path)
    except FileNotFoundError:
        if lost >= 0:
            return os.dup(lost)
        raise DeviceError(
            f"container {shown(constants.short(container_id))} has devices and no limits: its image has no glibc",
            "limits can be set for images with glibc",
        ) from None
    except OSError as error:
        raise of_file(error, path) from error
