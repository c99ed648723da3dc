"""Operations: what a plan is made of. Plain data; `describe()` is what `explain` prints.

`needs` says who can carry an op out: "spec" (only config.json can), "namespace" (only a hook can)
or "either". Executing them is apply.py's work, and specedit.py's.
"""

from __future__ import annotations

from typing import NamedTuple, Union

from .model import LdEntry, Share


class WriteLimits(NamedTuple):
    """The limits file, on host-only storage, complete before any other op makes a device usable."""

    shares: tuple[Share, ...]
    path: str  # host path
    needs = "namespace"


class TenantTmpfs(NamedTuple):
    """The container's own writable tmpfs: exact size and inodes, holding an empty usage file."""

    path: str  # host path of the mount
    size_bytes: int
    inodes: int
    needs = "namespace"


class Mount(NamedTuple):
    """Bind mount of a host file, directory or socket."""

    source: str  # host path
    target: str  # container path
    kind: str  # "file" | "dir" | "socket"
    flags: tuple[str, ...]  # of: ro nosuid nodev noexec
    why: str
    needs = "either"


class Link(NamedTuple):
    """A symbolic link in the container's root file system (links stay links)."""

    target: str  # container path of the link
    text: str  # what it holds
    why: str
    needs = "either"


class DeviceNode(NamedTuple):
    """A device node, bind-mounted (hook) or listed in linux.devices (spec)."""

    source: str  # host path
    target: str
    major: int
    minor: int
    simulated: bool  # a regular file: no cgroup rule
    needs = "either"


class DeviceRule(NamedTuple):
    """Device-cgroup access: rw, never m. Always after WriteLimits in a plan."""

    major: int
    minor: int
    needs = "either"


class LdCache(NamedTuple):
    """Entries to add to or replace in /etc/ld.so.cache, in place and atomically."""

    entries: tuple[LdEntry, ...]
    needs = "namespace"


class ProcMask(NamedTuple):
    """/proc/driver/nvidia with the granted GPUs only and ModifyDeviceFiles: 0."""

    bus_ids: tuple[str, ...]
    needs = "namespace"


Op = Union[WriteLimits, TenantTmpfs, Mount, Link, DeviceNode, DeviceRule, LdCache, ProcMask]


class Plan(NamedTuple):
    """All ops for one container, in the order in which they are applied."""

    container_id: str
    ops: tuple[Op, ...]
    notes: tuple[str, ...] = ()  # what was skipped and why, for explain
