"""The host's own root as the place where a plan is put: for `gpushare run`, in a mount namespace of its own.

Nothing of the host is ever written. What exists is mounted over; where a mount point is missing, its directory first
gets a *layer*: an overlay whose upper half is a private tmpfs (for /dev, a tmpfs with every entry bound into it, since
an overlay made by a user opens no devices). Layers are read-only for the program: what it would write there would be
lost, so it is told. On a host whose driver lies in the usual places no layer is needed at all.

    needed(plan)          what of a plan this host does not have already
    layers_of(ops)        directories that need a layer; "/dev" among them
    HostRoot              an apply.ContainerRoot that creates in layers only
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
    """Without mounts of a file over itself, and without links that lead where they should: the host's own driver."""
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
    """A daemon's socket of another driver root: /run is alive, so it gets no layer."""
    missing = op.kind == "socket" and not os.path.exists(op.target)
    if missing:
        notes.append(f"{op.target} is left out: it is not on this host")
    return missing


def layers_of(ops: tuple[Op, ...]) -> list[str]:
    """The directories, without links, in which something of `ops` must be made; parents before what is below them."""
    found = set()
    for op in ops:
        if isinstance(op, DeviceNode):
            if not _is_device(op):
                found.add(_DEV)
        elif isinstance(op, (Mount, Link)) and not _is_covered(op):
            found.add(_existing_directory(op.target))
    return sorted(found)


def _is_covered(op: Union[Mount, Link]) -> bool:
    """Whether `op` is put over something that exists. (A link that leads nowhere is replaced; below our own directory
    everything is in its source.)"""
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
    """{path: (major, minor)} of NVIDIA's nodes for single GPUs and MIG devices in /dev that the plan does not grant."""
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
    """The root of this process's own mount namespace. `scratch`: an existing directory that a tmpfs
    covers meanwhile."""

    def __init__(self, scratch: str) -> None:
        fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        super().__init__(fd, (0, 0))
        self.keep(fd)
        self.scratch = scratch
        self._layers: list[tuple[int, str]] = []
        # A mount of the host still reaches us (a disk that is plugged in), none of ours reaches the host
        syscalls.mount_setattr(fd, 0, syscalls.MS_SLAVE, "/", recursive=True)
        tree = self.keep(syscalls.detached_tmpfs(_TMPFS, syscalls.ATTRIBUTES["nosuid"], scratch))
        self.attach(tree, self.keep(os.open(scratch, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)), scratch)

    def require_writable(self, dir_fd: int, path: str) -> None:
        """In our own layers only: everything else is the host's."""
        if not self.is_own(dir_fd):
            raise KernelError(f"{shown(path)} would have to be made on the host", "create it there, empty")

    def add_layers(self, directories: list[str]) -> None:
        """All are prepared before one is attached: overlays are then one deep, however their directories nest."""
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
                f"no private layer can be put over {shown(directory)}: {os.strerror(error.errno)}",
                "see `gpushare run` in the documentation for the mount points that would have to be there",
            ) from None

    def _dev(self, scratch: str) -> int:
        """A tmpfs with everything of /dev but NVIDIA's nodes: those of the plan are mounted into it afterwards. Put
        together where nobody looks, one entry at a time: a process may have few descriptors left."""
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
        """A node that cannot be opened, not even by root: mounted over itself, with nodev."""
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
        """Layers become read-only; the tmpfs that holds them is out of reach."""
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
    """Mount points below `directory` that are below no other one there. (The layer of /dev has its own.)"""
    if directory == _DEV:
        return []
    points = sorted({mount.point for mount in mountns.read_mounts() if mount.point.startswith(directory + "/")})
    return [point for point in points if not any(point.startswith(other + "/") for other in points)]
