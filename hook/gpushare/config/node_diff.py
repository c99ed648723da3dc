"""Compare two compiled nodes of this host, and find running containers that the change makes outdated. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from ..core import constants
from ..core.model import Device, Lease, Node
from ..core.quantity import human
from ..gpu.selectors import device_name
from .keys import effective

# fields of a device to compare; the uuid identifies it
_FIELDS = ("index", "minor", "bus_id", "model", "memory_bytes", "reserved_bytes", "context_bytes")


class Change(NamedTuple):
    """One difference. `before` None: added; `after` None: removed."""

    what: str
    before: Any
    after: Any

    def text(self) -> str:
        if self.before is None:
            return f"{self.what} ({_shown(self.after)}) is new"
        if self.after is None:
            return f"{self.what} ({_shown(self.before)}) is gone"
        return f"{self.what}: {_shown(self.before)} -> {_shown(self.after)}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else repr(value)


def between(before: Node, after: Node) -> list[Change]:
    """All differences: driver first, then devices, then configuration."""
    was, now = before.inventory, after.inventory
    pairs: list[tuple[str, Any, Any]] = [
        ("driver", was.driver_version, now.driver_version),
        ("CUDA", was.cuda_version, now.cuda_version),
    ]
    old, new = effective(before.config), effective(after.config)
    settings = [(key, old.get(key), new[key]) for key in new]
    found = [Change(*pair) for pair in pairs if pair[1] != pair[2]]
    found += _devices((*was.devices, *was.mig), (*now.devices, *now.mig))
    return found + [Change(*pair) for pair in settings if pair[1] != pair[2]]


def _devices(before: Sequence[Device], after: Sequence[Device]) -> list[Change]:
    old, new = ({device.uuid: device for device in some} for some in (before, after))
    found = [Change(f"device {uuid}", _device(old[uuid]), None) for uuid in old if uuid not in new]
    found += [Change(f"device {uuid}", None, _device(new[uuid])) for uuid in new if uuid not in old]
    for uuid in new:
        if uuid in old:
            pairs = [(name, getattr(old[uuid], name), getattr(new[uuid], name)) for name in _FIELDS]
            found += [Change(f"device {uuid} {name}", was, now) for name, was, now in pairs if was != now]
    return found


def _device(device: Device) -> str:
    size = human(device.memory_bytes) if device.memory_bytes else "memory size not known"
    return f"{device_name(device)}, {device.model}, {size}"


def outdated(leases: Sequence[Lease], node: Node) -> list[tuple[str, str]]:
    """(id, reason) of running containers that no longer match this node. A container keeps the driver's libraries from
    its start, and a kernel module of another version refuses them."""
    now = node.inventory
    known = {device.uuid for device in (*now.devices, *now.mig)}
    found: list[tuple[str, str]] = []
    for lease in leases:
        why = _why(lease, now.driver_version, known)
        if why is not None:
            found.append((constants.short(lease.id), why))
    return found


def _why(lease: Lease, driver_version: str, known: set[str]) -> Optional[str]:
    gone = [share.device.uuid for share in lease.shares if share.device.uuid not in known]
    if gone:
        return f"has {gone[0]}, which is gone"
    if lease.driver_version not in ("", driver_version):
        return f"was started with driver {lease.driver_version}"
    return None
