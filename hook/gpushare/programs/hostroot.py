"""Carry out a plan on the host's own root, in a private mount namespace: for `gpushare run`.

Nothing on the host is written. Existing files are mounted over. If a mount point is missing, its directory first gets
a *layer*: an overlay with a private tmpfs as its upper directory (for /dev, a tmpfs with every entry bind-mounted,
since an overlay of a user opens no devices). Layers are read-only for the program, because its writes would be lost. A
host with the driver in the usual places needs no layer.

    needed(plan)          the plan without what the host has already
    layers_of(ops)        directories that need a layer, such as "/dev"
    HostRoot              an apply.ContainerRoot that creates files in layers only
"""

from __future__ import annotations

import os
import stat
from typing import Union

from ..core import constants
from ..core.errors import KernelError
from ..core.model import LdEntry
from ..core.ops import DeviceNode, Link, Mount, Op, Plan
from ..core.quoting import shown
from ..inject import apply, rootfs
from ..system import ldcache, mountns, syscalls

_DEV = "/dev"
_TMPFS = {"size": "16m", "mode": "0755"}


def needed(plan: Plan) -> Plan:
    """Remove mounts of a file over itself, and links that exist: the host has its own driver."""
    ops, notes = [], list(plan.notes)
    for op in plan.ops:
        if isinstance(op, Mount) and (_same(op.source, op.target) or _missing_socket(op, notes)):
            continue
        if isinstance(op, Link) and _same(op.target, os.path.join(os.path.dirname(op.target), op.text)):
            continue
        ops.append(op)
    return plan._replace(ops=tuple(ops), notes=tuple(notes))


def _same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _missing_socket(op: Mount, notes: list[str]) -> bool:
    """Return whether a daemon's socket of another driver root has no mount point. /run changes, so it gets no layer."""
    missing = op.kind == "socket" and not os.path.exists(op.target)
    if missing:
        notes.append(f"{op.target} is left out: it is not on this host")
    return missing


def layers_of(ops: tuple[Op, ...]) -> list[str]:
    """Return the resolved directories in which `ops` create something; parents first."""
    found = set()
    for op in ops:
        if isinstance(op, DeviceNode):
            if not _is_device(op):
                found.add(_DEV)
        elif isinstance(op, (Mount, Link)) and not _is_covered(op):
            found.add(_existing_directory(op.target))
    return sorted(found)


def _is_covered(op: Union[Mount, Link]) -> bool:
    """Return whether `op` covers something that exists. (A dangling link is replaced; everything below our own
    directory is in its source.)"""
    if op.target.startswith(constants.PRIVATE_DIR + "/"):
        return True
    return os.path.lexists(op.target) if isinstance(op, Mount) else os.path.exists(op.target)


def _is_device(op: DeviceNode) -> bool:
    try:
        status = os.lstat(op.target)
    except OSError:
        return False
    return not op.simulated and stat.S_ISCHR(status.st_mode) and status.st_rdev == os.makedev(op.major, op.minor)


def _existing_directory(path: str) -> str:
    above = os.path.dirname(path)
    while not os.path.isdir(above):
        above = os.path.dirname(above)
    above = os.path.realpath(above)
    if above == "/":
        raise KernelError(f"{shown(path)} is not on this host", f"mkdir {shown(os.path.dirname(path))}")
    return above


def hidden_nodes(ops: tuple[Op, ...]) -> dict[str, tuple[int, int]]:
    """Return {path: (major, minor)} of nodes of GPUs and MIG devices in /dev that the plan does not grant."""
    granted = {op.target for op in ops if isinstance(op, DeviceNode)}
    found = {}
    for directory, prefix in ((_DEV, "nvidia"), (f"{_DEV}/nvidia-caps", "nvidia-cap")):
        for name in _listing(directory):
            path = f"{directory}/{name}"
            if name.startswith(prefix) and name[len(prefix) :].isdigit() and path not in granted:
                status = os.lstat(path)
                if stat.S_ISCHR(status.st_mode):
                    found[path] = (os.major(status.st_rdev), os.minor(status.st_rdev))
    return found


def _listing(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


class HostRoot(apply.ContainerRoot):
    """The root of this process's mount namespace. `scratch`: an existing directory, covered by a tmpfs meanwhile."""

    def __init__(self, scratch: str) -> None:
        fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        super().__init__(fd, (0, 0))
        self.keep(fd)
        self.scratch = scratch
        self._layers: list[tuple[int, str]] = []
        # New mounts of the host propagate here, ours do not propagate to the host
        syscalls.mount_setattr(fd, 0, syscalls.MS_SLAVE, "/", recursive=True)
        tree = self.keep(syscalls.detached_tmpfs(_TMPFS, syscalls.ATTRIBUTES["nosuid"], scratch))
        self.attach(tree, self.keep(os.open(scratch, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)), scratch)

    def require_writable(self, dir_fd: int, path: str) -> None:
        """Allow writes in our own layers only: everything else is the host's."""
        if not self.is_own(dir_fd):
            raise KernelError(f"{shown(path)} would have to be created on the host", "create it there, empty")

    def add_layers(self, directories: list[str]) -> None:
        """Add a layer over each directory. All are prepared before one is attached, so overlays never stack."""
        below = {point for directory in directories for point in _mounts_below(directory)}
        trees = [(point, syscalls.open_tree(point, recursive=True)) for point in sorted(below)]
        try:
            for number, directory in enumerate(directories):
                scratch = f"{self.scratch}/{number}"
                layer = self._dev(scratch) if directory == _DEV else self._overlay(directory, scratch)
                self._layers.append((self.keep(layer), directory))
            for point, tree in sorted((*trees, *((path, fd) for fd, path in self._layers))):
                fd = os.open(point, os.O_PATH | os.O_CLOEXEC)
                self.attach(tree, self.keep(fd), point)
        finally:
            for _, tree in trees:
                os.close(tree)

    def _overlay(self, directory: str, scratch: str) -> int:
        status = os.stat(directory)
        os.makedirs(f"{scratch}/upper")
        os.mkdir(f"{scratch}/work")
        os.chmod(f"{scratch}/upper", stat.S_IMODE(status.st_mode))
        try:
            return syscalls.detached_overlay(directory, f"{scratch}/upper", f"{scratch}/work")
        except syscalls.SyscallError as error:
            raise KernelError(
                f"cannot put a private layer over {shown(directory)}: {os.strerror(error.errno)}",
                "docs/run.md lists the mount points that must exist",
            ) from None

    def _dev(self, scratch: str) -> int:
        """Return a tmpfs with everything of /dev except NVIDIA's nodes; the plan mounts its nodes later. It is filled
        in a hidden place, one entry at a time, since the process may have few descriptors left."""
        os.mkdir(scratch)
        layer = syscalls.detached_tmpfs(_TMPFS, syscalls.ATTRIBUTES["nosuid"], _DEV)
        try:
            _attach(layer, scratch)
        finally:
            os.close(layer)
        for name in _listing(_DEV):
            path, copy = f"{_DEV}/{name}", f"{scratch}/{name}"
            mode = os.lstat(path).st_mode
            if name.startswith("nvidia"):
                continue
            if stat.S_ISLNK(mode):
                os.symlink(os.readlink(path), copy)
                continue
            os.mkdir(copy) if stat.S_ISDIR(mode) else os.close(os.open(copy, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
            tree = syscalls.open_tree(path, recursive=True)
            try:
                _attach(tree, copy)
            finally:
                os.close(tree)
        return syscalls.open_tree(scratch, recursive=True)

    def hide(self, path: str) -> None:
        """Mount a node over itself with nodev, so that not even root can open it."""
        fd = self.lookup(path, os.O_PATH | os.O_NOFOLLOW)
        tree = self.keep(syscalls.open_tree("", dir_fd=fd))
        syscalls.mount_setattr(tree, syscalls.ATTRIBUTES["nodev"], syscalls.MS_PRIVATE, path)
        self.attach(tree, fd, path)

    def extend_ld_cache(self, entries: tuple[LdEntry, ...]) -> None:
        """Mount a file of our own over the host's, so that `ldconfig` cannot replace it."""
        cache, note = rootfs.read_cache(self.fd)
        try:
            content = ldcache.render(ldcache.extended(cache, entries)) if cache is not None and not note else b""
        except ldcache.MalformedCache as error:
            content, note = b"", str(error)
        if not content:
            self.notes.append(f"loader cache not extended: {note}")
            return
        path = f"{self.scratch}/ld.so.cache"
        with open(path, "wb") as file:
            file.write(content)
        os.chmod(path, 0o644)
        tree = self.keep(syscalls.open_tree(path))
        syscalls.mount_setattr(tree, syscalls.ATTRIBUTES["ro"], syscalls.MS_PRIVATE, path)
        self.attach(tree, self.mount_point(rootfs.LD_CACHE, "file"), rootfs.LD_CACHE)

    def finish(self) -> None:
        """Make the layers read-only, and unmount the tmpfs that holds them."""
        for fd, directory in self._layers:
            syscalls.mount_setattr(fd, syscalls.ATTRIBUTES["ro"], syscalls.MS_PRIVATE, directory)
        syscalls.umount(self.scratch)
        self.close()


def _attach(tree: int, path: str) -> None:
    target = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        syscalls.move_mount(tree, target, path)
    finally:
        os.close(target)


def _mounts_below(directory: str) -> list[str]:
    """Return the topmost mount points below `directory`. (The layer of /dev handles its own.)"""
    if directory == _DEV:
        return []
    points = sorted({mount.point for mount in mountns.read_mounts() if mount.point.startswith(directory + "/")})
    return [point for point in points if not any(point.startswith(other + "/") for other in points)]
