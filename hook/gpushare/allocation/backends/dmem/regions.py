"""The kernel's dmem cgroup controller as a backend for memory (start path).

    unsupported(device, inventory) -> reason | None
    no_driver_limits(inventory)    -> reason | None   whether NVML can limit memory of a cgroup
    ops(shares, inventory, folder) -> ops           one KernelLimit for each share
    enforce(pid, limits)              -> undo          write the limits of the container's cgroup and read them back
    change(folder, before, after)                   the same for a running container; needs no process

A region is a device's memory, named by its PCI address: `nvidia/0000:01:00.0/vidmem` in dmem.capacity of the root
cgroup. dmem.max of a container's cgroup limits all of its allocations, however they are made. dmem.min has the same
value: all of the memory is promised, so that MPS does not select the container when memory is short. A container that
borrows memory (docs/lending.md) has its limit as dmem.max and its request as dmem.min. Newer kernels accept one region
a write.

If the kernel has no such controller, a driver of 615 or later accounts for each cgroup itself and gets the limit
through NVML (nvmllimits.py); then there are no regions, and config.json has nothing.

containers/<id>/dmem records the cgroup and the regions of a container. A simulated driver root has a cgroup tree of
plain files below sys/fs/cgroup.

Source: Linux 6.14, Documentation/admin-guide/cgroup-v2.rst, "DMEM", and kernel/cgroup/dmem.c; NVIDIA, "MPS v3 Memory
Partitioning" (driver 615, CUDA 13.4), which has no regions for MIG devices and counts no managed memory. There NVIDIA
recommends to set limits through NVML, since that also raises dmem.min of the parent cgroups, a promise that the kernel
keeps. gpushare promises nothing there: leases keep the sum of all grants below the device's memory.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional

from ....core import constants
from ....core.errors import CapacityError, GpushareError, KernelError
from ....core.model import Device, Inventory, Share
from ....core.ops import KernelLimit
from ....core.quoting import shown
from ....state import storage
from ....system import mountns, syscalls

CAPACITY, MAX, MIN = "dmem.capacity", "dmem.max", "dmem.min"
RECORD = "dmem"  # in containers/<id>
NO_LIMIT = "max"
_MAX_BYTES = 1 << 20
_UNIFIED = "/sys/fs/cgroup"
BY_NVML = 615  # the driver from which on it holds limits by itself where the kernel has no controller


Bounds = tuple[Optional[int], Optional[int]]  # hard and soft limit; None: no limit
_NO_BOUNDS: Bounds = (None, None)


class Held(NamedTuple):
    """The file RECORD."""

    directory: str  # the container's cgroup
    regions: dict[str, str]  # by uuid of the device
    library: str = ""  # NVML, where the driver holds the limits and there are no regions


def _tree(inventory: Inventory) -> str:
    """The root cgroup of v2; "" where it is not mounted."""
    if inventory.simulated:
        return os.path.join(inventory.root, "sys/fs/cgroup")
    return next((m.point for m in mountns.read_mounts() if m.fstype == "cgroup2" and m.root == "/"), "")


def _read(path: str) -> Optional[str]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise syscalls.from_os_error(error, "open", path) from None
    try:
        return os.read(fd, _MAX_BYTES).decode("utf-8", "replace")
    finally:
        os.close(fd)


def _address(bus_id: str) -> tuple[int, ...]:
    """0000:01:00.0 and 00000000:01:00.0 are the same; () for what is no address."""
    try:
        return tuple(int(part, 16) for part in bus_id.replace(".", ":").split(":"))
    except ValueError:
        return ()


def region_of(device: Device, capacity: str) -> str:
    """The name of the region that is this device's memory; "" when the driver has none."""
    for line in capacity.splitlines():
        name = line.partition(" ")[0]
        driver, _, rest = name.partition("/")
        address, _, kind = rest.partition("/")
        if (driver, kind) == ("nvidia", "vidmem") and _address(address) == _address(device.bus_id) != ():
            return name
    return ""


def unsupported(device: Device, inventory: Inventory) -> Optional[str]:
    """Why the kernel cannot limit memory of this device; None: it can."""
    tree = _tree(inventory)
    capacity = _read(os.path.join(tree, CAPACITY)) if tree else None
    if capacity is None and tree and _nvml(inventory):
        return None
    if capacity is None:
        return "the kernel has no dmem controller (Linux 6.14, with cgroup v2), and the driver has no limits of its own"
    if not tree.endswith(_UNIFIED):
        return f"cgroup v2 is mounted at {shown(tree)} and not at {_UNIFIED}, so runtimes write no limits there"
    if not region_of(device, capacity):
        return f"the driver has no region for {device.bus_id} in {CAPACITY} (615 or newer has one)"
    return None


def no_driver_limits(inventory: Inventory) -> Optional[str]:
    """Why the driver has no memory limits for cgroups; None: it has. NVIDIA's tools need cgroup v2 alone."""
    if not _nvml(inventory):
        return f"the driver ({inventory.driver_version}) has no memory limits, {BY_NVML} or newer has"
    return None if _tree(inventory).endswith(_UNIFIED) else f"cgroup v2 is not mounted at {_UNIFIED}"


def _nvml(inventory: Inventory) -> str:
    """The library by which the driver's own limits are set; "": it has none."""
    major = inventory.driver_version.partition(".")[0]
    if not major.isdigit() or int(major) < BY_NVML:
        return ""
    from ....gpu import driverfiles

    return driverfiles.nvml_library(inventory.files_root, inventory.driver_version)


def ops(shares: tuple[Share, ...], inventory: Inventory, folder: str) -> Sequence[KernelLimit]:
    """`folder`: containers/<id>."""
    tree = _tree(inventory)
    capacity = _read(os.path.join(tree, CAPACITY))
    library = _nvml(inventory) if capacity is None else ""
    return [
        KernelLimit(
            share.device.uuid,
            region_of(share.device, capacity or ""),
            hard or 0,
            f"{folder}/{RECORD}",
            tree if inventory.simulated else "",
            library,
            (soft or 0) if soft != hard else 0,
        )
        for share, (hard, soft) in ((share, _bounds(share)) for share in shares)
    ]


def _bounds(share: Share) -> Bounds:
    hard = share.virtual_bytes if share.lending == constants.EVICT else share.memory_limit_bytes
    return hard, share.memory_limit_bytes


# Effects


def enforce(pid: int, limits: Sequence[KernelLimit]) -> Callable[[], None]:
    """Set these limits in the cgroup of the container whose init is `pid`, and record them. On KernelError, nothing
    has changed."""
    directory = _directory(pid, limits[0].tree)
    _require_own(directory, pid)
    held = Held(directory, {limit.uuid: limit.region for limit in limits}, limits[0].library)
    done: list[str] = []

    def undo() -> None:
        for uuid in done:
            try:
                _put(held, uuid, _NO_BOUNDS)
            except GpushareError:
                pass  # the cgroup goes with its container

    try:
        for limit in limits:
            done.append(limit.uuid)
            _put(held, limit.uuid, (limit.limit_bytes, limit.soft_bytes))
        fd = os.open(limits[0].record, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            storage.write_all(fd, json.dumps(held._asdict()).encode())
        finally:
            os.close(fd)
    except BaseException:
        undo()
        raise
    return undo


def _directory(pid: int, tree: str) -> str:
    """The container's cgroup."""
    with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
        path = next((line[3:].rstrip("\n") for line in lines if line.startswith("0::")), "")
    if tree:
        return tree + path.rstrip("/")
    from ....system import cgroup

    directory = cgroup.find_cgroups(pid)[1]
    if not directory or cgroup.holds(directory, cgroup.find_cgroups(os.getpid())[1]):
        raise KernelError(
            f"the cgroup of process {pid} is not mounted here, or not its own", "mount cgroup v2 at /sys/fs/cgroup"
        )
    return directory


def _require_own(directory: str, pid: int) -> None:
    """A limit must not meet others: on a host with v1 beside v2 a container may stay in its engine's cgroup."""
    others = [word for word in (_read(f"{directory}/cgroup.procs") or "").split() if word != str(pid)]
    if others:
        raise KernelError(
            f"{shown(directory)} is not the container's own cgroup: process {others[0]} is in it",
            "use cgroup v2 alone, or the shim",
        )


def _put(held: Held, uuid: str, bounds: Bounds) -> None:
    """Set both limits. Raise KernelError, DeviceError, or CapacityError if more is in use now."""
    if held.library:
        from ....gpu import nvmllimits

        return nvmllimits.put(held.library, uuid, held.directory, *bounds)
    return _write(held.directory, held.regions[uuid], bounds)


def _write(directory: str, region: str, bounds: Bounds) -> None:
    for name, none, limit_bytes in ((MAX, NO_LIMIT, bounds[0]), (MIN, "0", bounds[1])):
        path = f"{directory}/{name}"
        text = f"{region} {none if limit_bytes is None else limit_bytes}"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.write(fd, text.encode())
            finally:
                os.close(fd)
        except FileNotFoundError:
            raise KernelError(
                f"{shown(path)} does not exist: the container's cgroup has no dmem controller",
                "write +dmem to cgroup.subtree_control of the cgroups above, or set policy.allowed_backends to shim",
            ) from None
        except OSError as error:
            if error.errno == errno.EBUSY:  # newer kernels refuse a limit below the current use
                raise CapacityError(f"{shown(path)}: more than {shown(text)} is in use", "free it first") from None
            raise syscalls.from_os_error(error, "write", path) from None
        if limit_bytes is not None and name == MAX:
            _require(path, region, limit_bytes)


def _require(path: str, region: str, limit_bytes: int) -> None:
    """Check the limit as read back. The kernel rounds down to pages."""
    for line in (_read(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if name == region and value.strip().isdigit() and int(value) <= limit_bytes:
            return
    raise KernelError(
        f"{shown(path)} does not contain {region} {limit_bytes} after it was written", "update the kernel"
    )


def change(folder: str, before: Sequence[Share], after: Sequence[Share]) -> None:
    """Change the limits of a running container; `before` empty: write all of them. Raise KernelError or
    CapacityError; then nothing has changed."""
    record = f"{folder}/{RECORD}"
    pairs = zip(before or (new._replace(memory_limit_bytes=-1) for new in after), after)
    changed = [(old, new) for old, new in pairs if _bounds(old) != _bounds(new)]
    if not changed:
        return
    try:
        held = Held(**json.loads(_read(record) or ""))
        _ = [held.regions[new.device.uuid] for _, new in changed]
    except (ValueError, TypeError, KeyError):
        raise KernelError(f"{shown(record)} does not name the container's cgroup", "start it again") from None
    done: list[tuple[str, Bounds]] = []
    try:
        for old, new in changed:
            done.append((new.device.uuid, _bounds(old)))
            _put(held, new.device.uuid, _bounds(new))
    except GpushareError:
        for uuid, bounds in done if before else ():
            try:
                _put(held, uuid, bounds)
            except GpushareError:
                pass  # the first error counts; the shim keeps the previous limits
        raise
