"""Serialise a lease as lease.json, and parse it (start path). Pure.

to_json(lease)               -> bytes
from_json(data, id)          -> Lease     raises ValueError for a file of any other shape
"""

from __future__ import annotations

import json
from typing import Any

from ..core import constants
from ..core.model import Device, Lease, Share
from ..core.quoting import shown
from . import shm_abi

# JSON types of fields; a lease of another shape is damaged
_LEASE: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "state": (str,),
    "boot_id": (str,),
    "bundle": (str,),
    "shares": (list,),
    "creator_pid": (int,),
    "creator_start": (int,),
    "init_pid": (int,),
    "init_start": (int,),
    "cgroup": (str,),
    "first": (bool,),
    "cgroup_dir": (str,),
    "cgroup_id": (int,),
    "created": (float, int),
    "dialect": (str,),
    "driver_version": (str,),
    "sandbox": (str,),
    "cri": (bool,),
    "began_ns": (int,),
    "counted_ns": (int,),
    "uid": (int,),
    "namespace": (str,),
    "pod": (str,),
    "container": (str,),
    "image": (str,),
}
_SHARE: dict[str, tuple[type, ...]] = {
    "slot": (int,),
    "device": (dict,),
    "memory_limit_bytes": (int, type(None)),
    "compute_percent": (int, type(None)),
    "soft": (bool,),
    "priority": (int,),
    "oversubscribe": (bool,),
    "clamped": (str,),
    "page": (int,),
    "paused": (bool,),
    "draining_bytes": (int,),
    "memory_backend": (str,),
    "compute_backend": (str,),
    "virtual_bytes": (int,),
    "granted_ns": (int,),
    "granted_byte_ns": (int,),
    "lending": (str,),
    "phase": (str,),
    "suspended_bytes": (int,),
    "suspended_ns": (int,),
}
_DEVICE: dict[str, tuple[type, ...]] = {
    "index": (int,),
    "uuid": (str,),
    "minor": (int,),
    "bus_id": (str,),
    "model": (str,),
    "memory_bytes": (int,),
    "context_bytes": (int,),
    "granularity_bytes": (int,),
    "brand": (str,),
    "arch": (str,),
    "parent": (str,),
    "mig_index": (int,),
    "gpu_instance": (int,),
    "compute_instance": (int,),
}
_LATEST = 1e12  # seconds
MOST = 1 << 127  # above any number of bytes times nanoseconds, and small enough for a float


def to_json(lease: Lease) -> bytes:
    """Return lease.json: objects with the field names of model.py."""
    shares = [
        {**share._asdict(), "device": {name: getattr(share.device, name) for name in _DEVICE}} for share in lease.shares
    ]
    return json.dumps({**lease._asdict(), "shares": shares}).encode()


def _fields(value: Any, types: dict[str, tuple[type, ...]], what: str) -> dict[str, Any]:
    """Return `value` if it has exactly these fields with these types (a bool is no int). Raise ValueError."""
    if not isinstance(value, dict) or value.keys() != types.keys():
        raise ValueError(f"{what} has fields of another version of gpushare")
    for name, allowed in types.items():
        one = value[name]
        if not isinstance(one, allowed) or (isinstance(one, bool) and bool not in allowed):
            raise ValueError(f"{what}.{name} is {shown(one)}")
        if isinstance(one, int) and not -MOST < one < MOST:
            raise ValueError(f"{what}.{name} is out of range")
    return value


def from_json(data: bytes, container_id: str) -> Lease:
    """Parse the result of `to_json`. Raise ValueError."""
    try:
        fields = _fields(json.loads(data), _LEASE, "lease")
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if fields["id"] != container_id or fields["state"] not in ("reserved", "held"):
        raise ValueError(f"id {shown(fields['id'])}, state {shown(fields['state'])}")
    shares = []
    for item in fields["shares"]:
        share = _fields(item, _SHARE, "share")
        shares.append(Share(**{**share, "device": Device(**_fields(share["device"], _DEVICE, "device"))}))
    if not 0 <= fields["created"] < _LATEST:
        raise ValueError(f"lease.created is {shown(fields['created'])}")
    for slot, one in enumerate(shares):
        sizes = (one.memory_limit_bytes or 0, one.draining_bytes, one.virtual_bytes, one.compute_percent or 0)
        if (
            one.slot != slot
            or min(*sizes, one.suspended_bytes, one.suspended_ns, one.granted_ns, one.granted_byte_ns) < 0
            or not 0 <= one.page < shm_abi.MAX_PEERS
            or not 0 <= one.priority <= 0xFFFF
            or (one.compute_percent or 0) > shm_abi.NO_PERCENT
        ):
            raise ValueError(f"share {slot} has impossible numbers")  # it would distort the sums, or the index
        if not {one.memory_backend, one.compute_backend} <= set(constants.BACKENDS):
            raise ValueError(f"share {slot} has a backend of another version of gpushare")
        if one.lending not in ("", constants.MOVABLE, constants.EVICT):
            raise ValueError(f"share {slot} borrows memory by a way of another version of gpushare")
        if one.phase not in ("", constants.SUSPENDING, constants.SUSPENDED, constants.RESUMING):
            raise ValueError(f"share {slot} is suspended by a way of another version of gpushare")
    return Lease(**{**fields, "shares": tuple(shares)})
