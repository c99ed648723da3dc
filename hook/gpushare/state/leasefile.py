"""Serialise a lease as lease.json, and parse it (start path). Pure.

to_json(lease)               -> bytes
from_json(data, id)          -> Lease     raises ValueError for a file of any other shape
held(lease, data)            -> Lease     a reserved lease, updated by the file `held` beside it; raises ValueError

Earlier versions wrote `held` instead of a new lease.json. It is complete by its rename and has four lines: the version,
the creator's pid and start time (which must be the lease's), init's pid and start time, and the cgroup. They wrote it
only for an init that is the first process of its pid namespace.
"""

from __future__ import annotations

import json
from typing import Any

from ..core import constants
from ..core.model import Device, Lease, Share
from ..core.quoting import shown

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
HELD_VERSION = "gpushare-held-2"
_HELD_BEFORE = "gpushare-held-1"  # does not record whether init is the first process of its pid namespace
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
# Fields that earlier versions did not write, with their defaults
_LATER = ("brand", "arch", "parent", "mig_index", "gpu_instance", "compute_instance")
_LATEST = 1e12  # seconds
# No activity file: no other container gets this number
_EARLIER_SHARE: dict[str, Any] = {"clamped": "", "page": 0, "paused": False, "draining_bytes": 0, "virtual_bytes": 0}
_EARLIER_SHARE.update(
    (name, Share._field_defaults[name])
    for name in ("memory_backend", "compute_backend", "granted_ns", "granted_byte_ns", "lending")
)
_EARLIER_LEASE: dict[str, Any] = {"sandbox": "", "cri": True}  # annotations were trusted
_EARLIER_LEASE.update(
    (name, Lease._field_defaults[name])
    for name in ("first", "cgroup_dir", "cgroup_id", "began_ns", "counted_ns")
    + ("uid", "namespace", "pod", "container", "image")
)
_EARLIER_DEVICE = {name: Device._field_defaults[name] for name in _LATER}


def to_json(lease: Lease) -> bytes:
    """Return lease.json: objects with the field names of model.py. `lending` is left out of a share that borrows
    nothing, so that earlier versions can read it."""
    shares = [
        {
            **{name: value for name, value in share._asdict().items() if value or name != "lending"},
            "device": {name: getattr(share.device, name) for name in _DEVICE},
        }
        for share in lease.shares
    ]
    return json.dumps({**lease._asdict(), "shares": shares}).encode()


def _fields(value: Any, types: dict[str, tuple[type, ...]], what: str) -> dict[str, Any]:
    """Return `value` if it has exactly these fields with these types (a bool is no int). Raise ValueError."""
    if not isinstance(value, dict) or value.keys() != types.keys():
        raise ValueError(f"{what} has fields of another version of gpushare")
    for name, allowed in types.items():
        if not isinstance(value[name], allowed) or (isinstance(value[name], bool) and bool not in allowed):
            raise ValueError(f"{what}.{name} is {shown(value[name])}")
    return value


def _completed(value: Any, earlier: dict[str, Any]) -> Any:
    """Return `value` of an earlier version with the missing fields."""
    return {**earlier, **value} if isinstance(value, dict) else value


def from_json(data: bytes, container_id: str) -> Lease:
    """Parse the result of `to_json`. Raise ValueError."""
    try:
        fields = _fields(_completed(json.loads(data), _EARLIER_LEASE), _LEASE, "lease")
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if fields["id"] != container_id or fields["state"] not in ("reserved", "held"):
        raise ValueError(f"id {shown(fields['id'])}, state {shown(fields['state'])}")
    shares = []
    for item in fields["shares"]:
        share = _fields(_completed(item, _EARLIER_SHARE), _SHARE, "share")
        device = share["device"]
        if device.keys().isdisjoint(_LATER):
            device = {**device, **_EARLIER_DEVICE}
        shares.append(Share(**{**share, "device": Device(**_fields(device, _DEVICE, "device"))}))
    if not 0 <= fields["created"] < _LATEST:
        raise ValueError(f"lease.created is {shown(fields['created'])}")
    for slot, one in enumerate(shares):
        sizes = (one.memory_limit_bytes or 0, one.draining_bytes, one.virtual_bytes, one.compute_percent or 0)
        if one.slot != slot or min(*sizes, one.granted_ns, one.granted_byte_ns) < 0:
            raise ValueError(f"share {slot} has impossible numbers")  # it would distort the sums
        if not {one.memory_backend, one.compute_backend} <= set(constants.BACKENDS):
            raise ValueError(f"share {slot} has a backend of another version of gpushare")
        if one.lending not in ("", constants.MOVABLE, constants.EVICT):
            raise ValueError(f"share {slot} borrows memory by a way of another version of gpushare")
    return Lease(**{**fields, "shares": tuple(shares)})


def held(lease: Lease, data: bytes) -> Lease:
    """Return `lease` as an earlier version passed it to the container's init. Raise ValueError."""
    lines = data.decode("utf-8", "surrogateescape").split("\n")
    if (
        len(lines) != 5
        or lines[0] not in (HELD_VERSION, _HELD_BEFORE)
        or lines[1] != f"{lease.creator_pid} {lease.creator_start}"
    ):
        raise ValueError("its file `held` is of another lease, or damaged")
    pid, _, start = lines[2].partition(" ")
    if not (pid.isdigit() and start.isdigit()) or lines[4]:
        raise ValueError("its file `held` is damaged")
    first = lines[0] == HELD_VERSION
    return lease._replace(state="held", init_pid=int(pid), init_start=int(start), cgroup=lines[3], first=first)
