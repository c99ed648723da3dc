"""Leases again, after the state directory was lost under containers that live on (rare, but on the start path).

Somebody unmounted or emptied it, or an upgrade of the host did. What was granted is still there: each live container
has its share mounted at /usr/lib/gpushare, so the kernel's mount tables say which containers there are, and their
limits files, which no container can write, say what they hold. No engine has to be asked.

A new state directory has the file `rebuild` until the first start (or `gpushare refresh`) has looked. A container whose
limits cannot be read gets a lease that cannot be read either: that blocks its devices until a person says that they are
free, `gpushare prune --assume-free`. Whoever can mount file systems, on the host or in a user namespace, can make us
see too much; too little only if every process of the container has left the share's mount behind (pivot_root).
"""

from __future__ import annotations

import errno
import os
import time

from . import decision, inroot, leasefile, linux, mountns, names, pages, procs, region, rootless, storage
from .errors import KernelError, what_to_do
from .light import NamedTuple, Optional
from .model import Device, Lease, Node, Share
from .quoting import shown

_UNREADABLE = b"the state directory was lost, and the limits of this container could not be read\n"


CONTRADICTION = ""  # the device where two mounts name one container: nobody can tell which is the real one


class Found(NamedTuple):
    """A live container that has a share mounted. `init` is its oldest process."""

    id: str
    init: procs.Process
    device: str  # "major:minor" of the state directory's former file system


def run(state_dir: str, node: Node) -> tuple[str, ...]:
    """Writes the lease of every container that has a share and no lease; their ids. Does nothing unless the state
    directory is new. The caller holds the lock. Raises KernelError."""
    marker = os.path.join(state_dir, storage.REBUILD)
    if not os.path.lexists(marker):
        return ()
    written = []
    try:
        for found in containers(state_dir):
            folder = storage.container_dir(state_dir, found.id)
            if os.path.lexists(os.path.join(folder, storage.LEASE)):
                continue
            os.makedirs(folder, 0o700, exist_ok=True)
            lease = _lease(found, node)
            storage.write_lease(state_dir, found.id, leasefile.to_json(lease) if lease else _UNREADABLE)
            for share in lease.shares if lease else ():
                _keep_pages(state_dir, found, share.device.uuid)
            written.append(found.id)
            decision.rebuilt(node.config.log, found.id, lease)
        os.unlink(marker)
    except OSError as error:
        raise KernelError(
            f"leases in {shown(state_dir)} cannot be rebuilt: {error.strerror}", what_to_do(error)
        ) from error
    return tuple(written)


def containers(state_dir: str) -> tuple[Found, ...]:
    """Every container that has a share of `state_dir`, of now or of before, mounted where containers have it."""
    oldest: dict[str, Found] = {}
    tables: dict[tuple[str, str], tuple[tuple[str, str], ...]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            view = os.readlink(f"/proc/{name}/ns/mnt"), os.readlink(f"/proc/{name}/root")
            if view not in tables:
                with open(f"/proc/{name}/mountinfo", "rb") as table:
                    tables[view] = shared_mounts(table.read(), state_dir)
        except OSError:  # gone, or a zombie
            continue
        process = procs.find(int(name)) if tables[view] else None
        if process is None:
            continue
        for container_id, device in tables[view]:
            known = oldest.get(container_id)
            if known is not None and known.device != device:
                oldest[container_id] = known._replace(device=CONTRADICTION)
            elif known is None or (process.start, process.pid) < (known.init.start, known.init.pid):
                oldest[container_id] = Found(container_id, process, device)
    return tuple(oldest[key] for key in sorted(oldest))


def shared_mounts(mountinfo: bytes, state_dir: str) -> tuple[tuple[str, str], ...]:
    """(container id, "major:minor") of each share of `state_dir` at /usr/lib/gpushare, also of one that is mounted
    over: a tenant can do that in a namespace of his own. Pure. Source: proc(5), mountinfo."""
    found = []
    for line in mountinfo.decode("utf-8", "surrogateescape").splitlines():
        fields, _, tail = line.partition(" - ")
        words, kind = fields.split(" "), tail.split(" ")
        if len(words) < 6 or len(kind) < 2 or words[4] != names.PRIVATE_DIR:
            continue
        parts = unescaped(words[3]).replace("//deleted", "").split("/")
        ours = kind[0] == "tmpfs" and unescaped(kind[1]) == state_dir and parts[:2] == ["", "containers"]
        if ours and parts[3:] == ["share"] and parts[2] not in ("", ".", ".."):
            found.append((parts[2], words[2]))
    return tuple(found)


def unescaped(word: str) -> str:
    r"""A field of mountinfo: space, tab, newline and backslash are written as \ooo."""
    head, *rest = word.split("\\")
    return head + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)


def _lease(found: Found, node: Node) -> Optional[Lease]:
    """What `found` holds; None when nobody can tell."""
    devices = {device.uuid: device for device in (*node.inventory.devices, *node.inventory.mig)}
    try:
        limits = region.read_limits(_limits_of(found))
        shares = tuple(
            _share(slot, limit, devices[limit.uuid], limits.mps_device) for slot, limit in enumerate(limits.devices)
        )
    except (OSError, KeyError, region.RegionError):
        return None
    return Lease(
        id=found.id,
        state="held",
        boot_id=procs.boot_id(),
        bundle="",
        shares=shares,
        creator_pid=found.init.pid,
        creator_start=found.init.start,
        init_pid=found.init.pid,
        init_start=found.init.start,
        cgroup=procs.cgroup_of(found.init.pid),
        created=time.time(),
        dialect="rebuilt",
        driver_version=node.inventory.driver_version,
    )


def _mounted(namespace: mountns.Namespace, path: str) -> int:
    """A copy of the container's own mount at `path`, detached. Raises OSError and KernelError. Before Linux 6.15 it
    hides owners if that does (idmap.py), and then the host cannot write there either."""
    with namespace:
        resolve = linux.RESOLVE_NO_MAGICLINKS | linux.RESOLVE_NO_SYMLINKS
        found = linux.openat2(linux.AT_FDCWD, path, os.O_PATH, resolve=resolve)
        try:
            return linux.open_tree_mapped(found, path)
        except linux.SyscallError as error:
            if error.call != "open_tree_attr":
                raise
            return linux.open_tree("", dir_fd=found)
        finally:
            os.close(found)


def _keep_pages(state_dir: str, found: Found, uuid: str) -> None:
    """The pages of a device where this container has them, so that it and those to come see each other. Where that
    cannot be, they do not, and its page's number stays its own."""
    if rootless.is_rootless() or pages.is_ready(state_dir, uuid):
        return
    try:
        namespace = mountns.Namespace(found.init.pid)
        try:
            if not namespace.is_ours():
                return
            tree = _mounted(namespace, f"{names.PEERS_DIR}/{uuid}")
        finally:
            namespace.close()
        try:
            pages.prepare(state_dir, uuid, tree)
        finally:
            os.close(tree)
    except (OSError, KernelError):
        pass  # the first start on this device makes new ones


def _share(slot: int, limit: region.Limit, device: Device, mps_device: int = 0) -> Share:
    return Share(
        slot,
        device,
        limit.memory_limit_bytes,
        limit.compute_percent,
        bool(limit.flags & region.DEVICE_COMPUTE_SOFT),
        limit.priority,
        bool(limit.flags & region.DEVICE_OVERSUBSCRIBE),
        memory_backend=next((name for name, flag in region.HOLDERS.items() if limit.flags & flag), "shim"),
        page=limit.page,
        paused=bool(limit.flags & region.DEVICE_PAUSED),
        draining_bytes=limit.draining_bytes,
        compute_backend="mps" if mps_device == slot + 1 else "shim",
        virtual_bytes=limit.virtual_bytes,
    )


def _limits_of(found: Found) -> bytes:
    """The limits file as the container sees it, if that is really ours. Raises OSError, RegionError."""
    root = os.open(f"/proc/{found.init.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fd = inroot.open_regular(root, names.LIMITS)
        except linux.SyscallError as error:
            raise region.RegionError(str(error)) from error
        if fd < 0:
            raise region.RegionError(f"{names.LIMITS} is missing")
        try:
            device = os.fstat(fd).st_dev
            if f"{os.major(device)}:{os.minor(device)}" != found.device:
                raise region.RegionError(f"{names.LIMITS} is of another file system")
            return os.pread(fd, region.LIMITS_SIZE + 1, 0)
        finally:
            os.close(fd)
    finally:
        os.close(root)


def open_limits(state_dir: str, container_id: str) -> int:
    """The limits file of a container whose directory was lost, to be written: by a copy of the container's own mount of
    it, without its `ro`. -1 when it has none. Raises KernelError."""
    found = next((one for one in containers(state_dir) if one.id == container_id), None)
    if found is None or found.device == CONTRADICTION:
        return -1
    try:
        namespace = mountns.Namespace(found.init.pid)
        try:
            if not namespace.is_ours():
                raise KernelError(
                    f"container {shown(names.short(container_id))} outlived the state directory, and has a user "
                    "namespace of its own: its limits cannot be changed any more",
                    "start it again",
                )
            tree = _mounted(namespace, names.PRIVATE_DIR)
        finally:
            namespace.close()
        try:
            linux.mount_setattr(tree, 0, linux.MS_PRIVATE, names.PRIVATE_DIR, clear=linux.ATTRIBUTES["ro"])
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = os.open("limits", flags, dir_fd=tree)
        finally:
            os.close(tree)
    except OSError as error:
        raise KernelError(
            f"container {shown(names.short(container_id))} outlived the state directory, and its limits file cannot be "
            f"written any more: {error.strerror}",
            "start it again (Linux 6.15 can change its limits)" if error.errno == errno.EACCES else "",
        ) from error
    device = os.fstat(fd).st_dev
    if f"{os.major(device)}:{os.minor(device)}" != found.device:
        os.close(fd)
        raise KernelError(f"{names.LIMITS} of {shown(names.short(container_id))} is of another file system")
    return fd
