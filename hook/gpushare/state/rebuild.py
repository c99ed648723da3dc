"""Restore leases after the state directory was lost under running containers (rare, but on the start path).

    search(state_dir, node)         -> SearchResult  without the lease lock
    run(state_dir, node, searched)  -> ids       write the leases, under the lock

An administrator or an upgrade of the host unmounted or emptied the directory. Each live container still has its share
mounted at /usr/lib/gpushare. So the kernel's mount tables name the containers, and their limits files, which no
container can write, have the grants. No engine is involved.

A new state directory has the file `rebuild` until the first start (or `gpushare refresh`) has searched. A container
whose limits file is unreadable gets an unreadable lease, which blocks its devices until an administrator runs
`gpushare prune --assume-free`.

Containers of a state directory that another host of this kernel uses at the same path stay with it: see place.py.

Any user can mount a tmpfs that looks like a state directory in a user namespace. File owners prove nothing: a namespace
can map the host's uid 0 and pass its mount to a namespace that does not. So a mount counts in a mount namespace of our
own user namespace, or if it is of the state directory's present file system. Elsewhere (containers with user
namespaces) it counts if the directory has `storage.SHARE_MARK`, an attribute that only the host's root can set. Other
mounts are ignored. The search misses a container whose processes have all left the share, by pivot_root or to a user
namespace of another uid."""

import errno
import os
import time
from typing import NamedTuple, Optional

from ..core import constants
from ..core.errors import KernelError, what_to_do
from ..core.model import Device, Lease, Node, Share
from ..core.quoting import shown
from ..system import mountns, procs, rootless, syscalls
from . import accounts, activity_files, audit_log, journal, leasefile, leases, mounttables, place, shm_abi, storage

_UNREADABLE = b"the state directory was lost, and the limits of this container could not be read\n"


CONTRADICTION = ""  # `device` if two mounts name one container and either may be real


class Found(NamedTuple):
    """A live container with a mounted share. `init` is its oldest process."""

    id: str
    init: procs.Process
    device: str  # "major:minor" of the state directory's former file system
    ours: bool = True  # its mount namespace belongs to our own user namespace


class SearchResult(NamedTuple):
    """The result of a search. `marker`: the identity of the file `rebuild` that caused it."""

    marker: tuple[int, int]
    found: tuple[tuple[Found, Optional[Lease]], ...]


def _marker(state_dir: str) -> Optional[tuple[int, int]]:
    try:
        status = os.stat(os.path.join(state_dir, storage.REBUILD), follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def search(state_dir: str, node: Node) -> Optional[SearchResult]:
    """Search for containers that may need a lease, with their grants; None unless the state directory is new. Never
    call it with the lease lock: it reads other mount tables and takes over the activity files of devices."""
    marker = _marker(state_dir)
    if marker is None:
        return None
    every, remarks = _search(state_dir)
    made = {one.id: _lease(one, node) for one in every}
    for one in every:
        lease = made[one.id]
        for share in lease.shares if lease else ():
            _keep_activity_files(state_dir, one, share.device.uuid)
    known = journal.restored(node.config, [lease for lease in made.values() if lease is not None])
    made.update((lease.id, lease) for lease in known)
    for remark in remarks:
        audit_log.searched(node.config.log, remark)
    return SearchResult(marker, tuple((one, made[one.id]) for one in every))


def run(state_dir: str, node: Node, searched: SearchResult) -> Optional[tuple[str, ...]]:
    """Write a lease for every container with a share and no lease; return their ids. None: the directory was lost
    again, so search again. The caller holds the lock: nothing else creates leases until the marker is gone. Raise
    KernelError."""
    marker = _marker(state_dir)
    if marker is None:
        return ()
    if marker != searched.marker:
        return None
    written = []
    try:
        for found, lease in searched.found:
            folder = storage.container_dir(state_dir, found.id)
            if os.path.lexists(os.path.join(folder, storage.LEASE)):
                continue
            os.makedirs(folder, 0o700, exist_ok=True)
            storage.write_lease(state_dir, found.id, leasefile.to_json(lease) if lease else _UNREADABLE)
            written.append(found.id)
            audit_log.rebuilt(node.config.log, found.id, lease)
        os.unlink(os.path.join(state_dir, storage.REBUILD))
    except OSError as error:
        raise KernelError(
            f"leases in {shown(state_dir)} cannot be rebuilt: {error.strerror}", what_to_do(error)
        ) from error
    return tuple(written)


def containers(state_dir: str) -> tuple[Found, ...]:
    """Return every container with a share of `state_dir`, present or lost, mounted at its usual place."""
    return _search(state_dir)[0]


def _search(state_dir: str) -> tuple[tuple[Found, ...], tuple[str, ...]]:
    """Return `containers`, and one line for each reason why mounts or containers were ignored."""
    oldest: dict[str, Found] = {}
    now = _now(state_dir)
    ignored: list[int] = []
    tables, left_out = mounttables.read(mounttables.ROOT)
    every = [
        Found(container_id, table.process, device, table.owner == mounttables.OURS)
        for table in tables
        for container_id, device in shared_mounts(table.mountinfo, state_dir)
    ]
    ours = [(table.process.pid, table.mountinfo) for table in tables if table.owner == mounttables.OURS]
    elsewhere = place.elsewhere(state_dir, ours, frozenset(one.device for one in every) - {now})
    for one in every:
        if one.device in elsewhere:
            continue
        if not one.ours and one.device != now and not _is_marked(one):
            ignored.append(one.init.pid)
            continue
        known = oldest.get(one.id)
        if known is not None and known.device != one.device:
            oldest[one.id] = known._replace(device=CONTRADICTION)
        elif known is None or (one.init.start, one.init.pid) < (known.init.start, known.init.pid):
            oldest[one.id] = one
    remarks = [left_out] if left_out else []
    if elsewhere:
        count = len({one.id for one in every if one.device in elsewhere})
        remarks.append(f"{count} containers have shares of a state directory that is in use at another place")
    if ignored:
        remarks.append(
            f"{len(ignored)} mounts that look like shares were ignored, because any user can create such mounts; "
            f"the first is of pid {ignored[0]}"
        )
    return tuple(oldest[key] for key in sorted(oldest)), tuple(remarks)


def _now(state_dir: str) -> str:
    """Return the device number of the state directory, which may only have been emptied; "" for rootless files."""
    try:
        here, above = os.stat(state_dir).st_dev, os.stat(os.path.dirname(os.path.abspath(state_dir))).st_dev
    except OSError:
        return ""
    return "" if here == above else f"{os.major(here)}:{os.minor(here)}"


def _is_marked(found: Found) -> bool:
    try:
        share = _share_dir(found)
        try:
            return bool(os.getxattr(f"/proc/self/fd/{share}", storage.SHARE_MARK))
        finally:
            os.close(share)
    except OSError:
        return False


def shared_mounts(mountinfo: bytes, state_dir: str) -> tuple[tuple[str, str], ...]:
    """Return (container id, "major:minor") of each share of `state_dir` at /usr/lib/gpushare, also if a tenant has
    mounted over it in its own namespace. Pure. Source: proc(5), mountinfo."""
    found = []
    for line in mountinfo.decode("utf-8", "surrogateescape").splitlines():
        fields, _, tail = line.partition(" - ")
        words, kind = fields.split(" "), tail.split(" ")
        if len(words) < 6 or len(kind) < 2 or words[4] != constants.PRIVATE_DIR:
            continue
        parts = unescaped(words[3]).replace("//deleted", "").split("/")
        ours = kind[0] == "tmpfs" and unescaped(kind[1]) == state_dir and parts[:2] == ["", "containers"]
        if ours and parts[3:] == ["share"] and parts[2] not in ("", ".", ".."):
            found.append((parts[2], words[2]))
    return tuple(found)


def unescaped(word: str) -> str:
    r"""Unescape a field of mountinfo: space, tab, newline and backslash are written as \ooo."""
    head, *rest = word.split("\\")
    return head + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)


def _lease(found: Found, node: Node) -> Optional[Lease]:
    """Return the lease of `found`, without what only the journal knows; None if its grants are unreadable."""
    devices = {device.uuid: device for device in (*node.inventory.devices, *node.inventory.mig)}
    try:
        limits = shm_abi.read_limits(_limits_of(found))
        shares = tuple(
            _share(slot, limit, devices[limit.uuid], limits.mps_device) for slot, limit in enumerate(limits.devices)
        )
    except (OSError, KeyError, shm_abi.RegionError):
        return None
    lease = Lease(
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
        began_ns=accounts.now_ns(),
        uid=_uid(found.init.pid),
        dialect="rebuilt",
        driver_version=node.inventory.driver_version,
    )
    return leases.of_init(lease, found.init.pid)


def _uid(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1


def _mounted(namespace: mountns.Namespace, path: str) -> int:
    """Return a detached copy of the container's mount at `path`. Raise OSError or KernelError. Before Linux 6.15 the
    copy hides owners if the mount does (idmap.py), so the host cannot write there either."""

    def copy() -> int:
        resolve = syscalls.RESOLVE_NO_MAGICLINKS | syscalls.RESOLVE_NO_SYMLINKS
        found = syscalls.openat2(syscalls.AT_FDCWD, path, os.O_PATH, resolve=resolve)
        try:
            return syscalls.open_tree_mapped(found, path)
        except syscalls.SyscallError as error:
            if error.call != "open_tree_attr":
                raise
            return syscalls.open_tree("", dir_fd=found)
        finally:
            os.close(found)

    return namespace.inside(copy)


def _keep_activity_files(state_dir: str, found: Found, uuid: str) -> None:
    """Take over the activity files of a device from where this container has them, so that it and later containers see
    each other. If that fails they do not, and the number of its file stays reserved."""
    if rootless.is_rootless() or activity_files.is_ready(state_dir, uuid):
        return
    try:
        namespace = mountns.Namespace(found.init.pid)
        try:
            if not namespace.is_ours():
                return
            tree = _mounted(namespace, f"{constants.PEERS_DIR}/{uuid}")
        finally:
            namespace.close()
        try:
            activity_files.prepare(state_dir, uuid, tree)
        finally:
            os.close(tree)
    except (OSError, KernelError):
        pass  # the first start on this device creates new ones


def _share(slot: int, limit: shm_abi.Limit, device: Device, mps_device: int = 0) -> Share:
    return Share(
        slot,
        device,
        limit.memory_limit_bytes,
        limit.compute_percent,
        bool(limit.flags & shm_abi.DEVICE_COMPUTE_SOFT),
        limit.priority,
        bool(limit.flags & shm_abi.DEVICE_OVERSUBSCRIBE) and not limit.lending,
        memory_backend=next((name for name, flag in shm_abi.HOLDERS.items() if limit.flags & flag), "shim"),
        page=limit.page,
        paused=bool(limit.flags & shm_abi.DEVICE_PAUSED),
        draining_bytes=limit.draining_bytes,
        compute_backend="mps" if mps_device == slot + 1 else "shim",
        virtual_bytes=limit.virtual_bytes,
        lending=limit.lending,
        phase=constants.SUSPENDING if limit.flags & shm_abi.DEVICE_SUSPENDED else "",  # it counts until it is resumed
    )


def _share_dir(found: Found) -> int:
    """Open a share's directory as the container sees it, if it is the mount that was found. Raise OSError. In a foreign
    namespace the look-up uses only what the kernel has cached, since a FUSE server could block it forever.
    """
    root = os.open(f"/proc/{found.init.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        resolve = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS | syscalls.RESOLVE_NO_SYMLINKS
        if not found.ours:
            resolve |= syscalls.RESOLVE_CACHED
        share = syscalls.openat2(root, constants.PRIVATE_DIR, os.O_PATH | os.O_DIRECTORY, resolve=resolve)
    except syscalls.SyscallError as error:
        raise OSError(error.errno, str(error)) from error
    finally:
        os.close(root)
    device = os.fstat(share).st_dev
    if f"{os.major(device)}:{os.minor(device)}" != found.device:
        os.close(share)
        raise OSError(f"{constants.PRIVATE_DIR} is on another file system")
    return share


def _limits_of(found: Found) -> bytes:
    """Read the limits file of a share. Raise OSError."""
    share = _share_dir(found)
    try:
        fd = os.open("limits", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=share)
        try:
            device = os.fstat(fd).st_dev
            if f"{os.major(device)}:{os.minor(device)}" != found.device:
                raise OSError(f"{constants.LIMITS} is on another file system")
            return os.pread(fd, shm_abi.LIMITS_SIZE + 1, 0)
        finally:
            os.close(fd)
    finally:
        os.close(share)


def open_limits(state_dir: str, container_id: str) -> int:
    """Open the limits file of a container with a lost directory for writing, through a copy of the container's mount
    without `ro`. -1 if it has none. Raise KernelError."""
    found = next((one for one in containers(state_dir) if one.id == container_id), None)
    if found is None or found.device == CONTRADICTION:
        return -1
    try:
        namespace = mountns.Namespace(found.init.pid)
        try:
            if not namespace.is_ours():
                raise KernelError(
                    f"container {shown(constants.short(container_id))} was running when the state directory was "
                    "made again, and has a user namespace of its own: its limits cannot be changed any more",
                    "start it again",
                )
            tree = _mounted(namespace, constants.PRIVATE_DIR)
        finally:
            namespace.close()
        try:
            syscalls.mount_setattr(tree, 0, syscalls.MS_PRIVATE, constants.PRIVATE_DIR, clear=syscalls.ATTRIBUTES["ro"])
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            fd = os.open("limits", flags, dir_fd=tree)
        finally:
            os.close(tree)
    except OSError as error:
        raise KernelError(
            f"container {shown(constants.short(container_id))} was running when the state directory was made again, "
            f"so its limits cannot be changed any more: {error.strerror}",
            "start it again; Linux 6.15 and later need no restart" if error.errno == errno.EACCES else "",
        ) from error
    device = os.fstat(fd).st_dev
    if f"{os.major(device)}:{os.minor(device)}" != found.device:
        os.close(fd)
        raise KernelError(f"{constants.LIMITS} of {shown(constants.short(container_id))} is on another file system")
    return fd
