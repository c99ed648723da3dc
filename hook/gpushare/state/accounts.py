"""Account for what each share was granted and used since its start.

    labels(bundle, uid)              -> dict       fields of a Lease that tell whose it is
    counted(lease, now_ns)           -> Lease      with its grants counted up to now; before they change
    accounts(lease, usage, now_ns)   -> tuple[Account, ...]      by slot
    closed(state_dir, lease, known)  -> Closed     the final account, before the lease is removed

Grants are the lease's: limits multiplied by time. Use is the shim's count in the usage file, which the container can
write, so each number is capped by what is possible. Times are of CLOCK_BOOTTIME, which cannot be set."""

import time
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from ..core.model import Bundle, Lease, Share
from ..request import oci
from . import storage
from .shm_abi import MAX_SLOTS, NO_PERCENT, RegionError

if TYPE_CHECKING:
    from .usage_reader import Usage

_MAX_LABEL = 256  # characters
_REFUSAL_NS = 100  # least time that a refusal takes


class Account(NamedTuple):
    """One share since its start. None: not known, because there is no readable usage file."""

    granted_ns: int  # device time: the compute limit multiplied by time
    granted_byte_ns: int  # memory that no other container could get, multiplied by time
    used_ns: Optional[int] = None  # device time, borrowed time included
    used_byte_ns: Optional[int] = None
    peak_bytes: Optional[int] = None
    refused: Optional[int] = None  # allocations
    throttled_ns: Optional[int] = None  # that its compute limit held threads back, summed over threads
    suspended_ns: int = 0  # without anything granted


class Closed(NamedTuple):
    """A lease that has ended, with its final account. `known` False: its end was not reported, so `end_ns` is the last
    sign of life, if there was one, else the time at which the dead lease was found."""

    lease: Lease
    accounts: tuple[Account, ...]
    end_ns: int
    known: bool


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def labels(bundle: Bundle, uid: int) -> dict[str, Any]:
    """Return the fields of a Lease that tell whose it is. Only a CRI's annotations name a pod or an image."""
    said = bundle.annotations
    names = {"namespace": oci.pod_namespace, "pod": oci.pod_name, "container": oci.container_name}
    texts = {key: find(said) for key, find in names.items()}
    return {"uid": uid, **{key: text[:_MAX_LABEL] for key, text in {**texts, "image": oci.image_name(said)}.items()}}


def began_ns(lease: Lease) -> int:
    """Return the start of a lease; of one that an earlier version wrote, by the host's clock."""
    return lease.began_ns or max(0, now_ns() - int(max(0.0, time.time() - lease.created) * 1e9))


def counted(lease: Lease, now: int) -> Lease:
    """Return `lease` with what it was granted counted up to `now`. Call before its limits change."""
    since = lease.counted_ns or began_ns(lease)
    took = max(0, now - since)
    shares = tuple(
        share._replace(
            granted_ns=share.granted_ns + took * _percent(share) // NO_PERCENT,
            suspended_ns=share.suspended_ns + (0 if share.counts else took),
            granted_byte_ns=share.granted_byte_ns + took * (held_bytes(share) if share.counts else 0),
        )
        for share in lease.shares
    )
    return lease._replace(shares=shares, began_ns=began_ns(lease), counted_ns=max(since, now))


def _percent(share: Share) -> int:
    if not share.counts:
        return 0
    return NO_PERCENT if share.compute_percent is None else share.compute_percent


def held_bytes(share: Share) -> int:
    """Return the memory that the ledger counts for a share that is not suspended."""
    if share.memory_limit_bytes is None:
        return share.device.memory_bytes
    return max(share.memory_limit_bytes, share.draining_bytes)


def accounts(lease: Lease, usage: "Optional[Usage]", now: int) -> tuple[Account, ...]:
    """Return the account of each share up to `now`."""
    age_ns = max(0, now - began_ns(lease))
    return tuple(_account(share, usage, age_ns) for share in counted(lease, now).shares)


def _account(share: Share, usage: "Optional[Usage]", age_ns: int) -> Account:
    granted = Account(share.granted_ns, share.granted_byte_ns, suspended_ns=share.suspended_ns)
    if usage is None or share.slot >= len(usage.buckets):
        return granted
    bucket, memory = usage.buckets[share.slot], usage.memory[share.slot]
    in_use = usage.used_bytes(share.slot)
    used_byte_ns = memory.byte_ns + in_use * memory.since_ns(time.monotonic_ns())
    if memory.until_ns or not in_use:  # else a shim of an earlier version
        most = share.device.memory_bytes * age_ns if share.lending else granted.granted_byte_ns
        granted = granted._replace(
            used_byte_ns=min(used_byte_ns, most or used_byte_ns),
            peak_bytes=min(memory.peak_bytes, share.device.memory_bytes or memory.peak_bytes),
        )
    return granted._replace(
        used_ns=min(bucket.busy_ns, age_ns),
        refused=min(usage.refused[share.slot], age_ns // _REFUSAL_NS),
        throttled_ns=min(bucket.waited_ns, age_ns * MAX_SLOTS),
    )


def closed(state_dir: str, lease: Lease, known: bool) -> Closed:
    """Return the final account of a dead lease whose files still exist. `known`: it ended just now."""
    end = now_ns()
    try:
        usage = storage.read_usage(state_dir, lease.id, len(lease.shares), counters=True)
    except RegionError:
        usage = None
    if not known:
        seen = [memory.until_ns for memory in usage.memory if memory.until_ns] if usage else []
        if seen:
            end = min(end, max(began_ns(lease), end - max(0, time.monotonic_ns() - max(seen))))
    return Closed(lease, accounts(lease, usage, end), end, known)
