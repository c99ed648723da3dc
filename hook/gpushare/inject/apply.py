"""Carry out a plan in a container, from outside and before its first instruction, or undo all of it.

There are three phases. On the host: limits and storage, then a detached copy of every mount source, so that no source
can be swapped later; a copy vanishes with this process. In the container's mount namespace: mounts, links, the loader's
cache, the /proc mask. On the host again: device access, last, so that no device is usable before its limits are in
place.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import Union

from ..allocation.backends.dmem import regions as dmem
from ..core import constants
from ..core.errors import DeviceError, GpushareError, KernelError, of_source
from ..core.model import Bundle, LdEntry
from ..core.ops import (
    DEVICE_FLAGS,
    Cover,
    DeviceNode,
    ImageFile,
    InPlace,
    KernelLimit,
    Mount,
    Plan,
    call,
)
from ..core.quoting import shown
from ..state import storage
from ..system import cgroup, idmap, inroot, mountns, rootless, syscalls
from . import cachefile, mountpoint, mountrules, proc_nvidia_mask, rootfs


class Applied:
    """The effects of `apply`. `undo` reverts them, last first; `close` keeps them. `notes`: skipped operations;
    `warnings`: what the container may lose later."""

    def __init__(self, namespace: mountns.Namespace) -> None:
        self._namespace = namespace
        self._access: list[Callable[[], None]] = []
        self._root: Union[mountpoint.Root, None] = None
        self._trees: list[int] = []
        self.hider: Union[idmap.Hider, None] = None
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def undo(self) -> None:
        """Revert everything that the kernel allows; raise the first failure at the end."""
        failures: list[Exception] = []
        _run_all(self._access, failures)
        if self._root is not None and self._root.undo:
            try:
                steps = self._root.undo
                self._namespace.inside(lambda: _run_all(steps, failures))
            except KernelError as error:
                failures.append(error)
        self.close()
        if failures:
            raise KernelError(f"undo: {failures[0]}", "remove the container")

    def close(self) -> None:
        for fd in self._trees:
            os.close(fd)
        self._trees.clear()
        if self.hider is not None:
            self.hider.close()
        if self._root is not None:
            self._root.close()
        self._namespace.close()


def _run_all(steps: list[Callable[[], None]], failures: list[Exception]) -> None:
    while steps:
        try:
            steps.pop()()
        except (OSError, GpushareError) as error:
            failures.append(error)


def apply(plan: Plan, bundle: Bundle, pid: int, state_dir: str = "") -> Applied:
    """Apply `plan` to the container whose init is `pid`. Raise GpushareError; then nothing of the plan is left. With
    `state_dir`, mounts hide the owner of their files (idmap.py)."""
    return _carry_out(_apply, plan, bundle, pid, state_dir)


def adopt(plan: Plan, bundle: Bundle, pid: int, state_dir: str = "") -> Applied:
    """Apply the operations that config.json does not hold. Each InPlace of `plan` must exist already, as its runtime
    should have mounted it. Raise as `apply` does."""
    return _carry_out(_adopt, plan, bundle, pid, state_dir)


def _carry_out(
    steps: Callable[[Plan, Bundle, int, Applied], None], plan: Plan, bundle: Bundle, pid: int, state_dir: str
) -> Applied:
    applied = Applied(mountns.Namespace(pid))
    applied.hider = idmap.Hider(state_dir) if state_dir else None
    try:
        steps(plan, bundle, pid, applied)
    except BaseException as error:
        try:
            applied.undo()
        except KernelError as second:
            if isinstance(error, GpushareError):
                error.draft += f" (and {second.message})"
        if isinstance(error, OSError):
            raise syscalls.from_os_error(error, "apply", str(error.filename or plan.container_id)) from None
        raise
    return applied


def store(plan: Plan) -> None:
    """Write the limits file and the tenant's tmpfs. Both are in the container's state directory, which is removed with
    its lease, so nothing has to be undone here."""
    storage.store(plan.ops)


def copies(plan: Plan, kept: list[int], hider: Union[idmap.Hider, None] = None) -> dict[int, int]:
    """Return {index of an operation: a detached copy of its source}. Add each copy to `kept`, for closing."""
    trees: dict[int, int] = {}
    directories: list[Union[Mount, InPlace]] = []
    for index, op in enumerate(plan.ops):
        if isinstance(op, (Mount, ImageFile)):
            _make_point_in_source(op, directories)
        if isinstance(op, (Mount, InPlace)) and op.kind == "dir":
            directories.append(op)
        if isinstance(op, (Mount, Cover, DeviceNode)):
            trees[index] = _detached_copy(op, hider)
            kept.append(trees[index])
    return trees


def put(root: mountpoint.Root, plan: Plan, trees: dict[int, int]) -> None:
    """Run the steps in the mount namespace of `root`, which this process has entered."""
    for index, op in enumerate(plan.ops):
        put_one = getattr(op, "put", None)
        if put_one is not None:
            put_one(root, trees.get(index, -1))


def _apply(plan: Plan, bundle: Bundle, pid: int, applied: Applied) -> None:
    store(plan)
    trees = copies(plan, applied._trees, applied.hider)
    mounts = mountns.read_mounts(containing=mountns.CGROUPS)
    rules = Access(plan).rules
    simulated = any(isinstance(op, DeviceNode) and op.simulated for op in plan.ops)  # a simulated device has no rule
    if (rules or simulated) and not rootless.is_rootless():  # a rootless container has no device cgroup
        cgroup.own_cgroups(pid, mounts)
    root_fd = rootfs.open_root(bundle, pid)
    root = applied._root = ContainerRoot(root_fd, applied._namespace.owner)
    root.keep(root_fd)
    applied._namespace.require_alive()
    applied._namespace.inside(lambda: put(root, plan, trees))
    applied.notes.extend(root.notes)
    _enforce_limits(plan, pid, applied)
    if rules and not rootless.is_rootless():
        _tell_systemd(pid, rules, mounts, bundle, applied)
        applied._access.append(cgroup.allow_devices(pid, rules, mounts, bundle.cgroups_path))
        applied._namespace.require_alive()


def _tell_systemd(
    pid: int, rules: list[tuple[int, int]], mounts: list[mountns.MountEntry], bundle: Bundle, applied: Applied
) -> None:
    """Before `allow_devices`, which changes all programs of the cgroup: systemd adds one with the rules that it has."""
    try:
        undo = cgroup.tell_systemd(pid, rules, mounts, bundle.cgroups_path)
    except KernelError as error:
        applied.warnings.append(f"the GPU is lost at systemctl daemon-reload: {error.message}")
        return
    if undo is not None:
        applied._access.append(undo)


def _enforce_limits(plan: Plan, pid: int, applied: Applied) -> None:
    limits = Access(plan).limits
    if limits:
        applied._access.append(dmem.enforce(pid, limits))
        applied._namespace.require_alive()


def _adopt(plan: Plan, bundle: Bundle, pid: int, applied: Applied) -> None:
    sources = {op.target: os.stat(op.source) for op in plan.ops if isinstance(op, InPlace)}
    trees = copies(plan, applied._trees, applied.hider)
    root_fd = rootfs.open_root(bundle, pid)
    root = applied._root = ContainerRoot(root_fd, applied._namespace.owner)
    root.keep(root_fd)
    applied._namespace.require_alive()

    def claim_and_put() -> None:
        for target, source in sources.items():
            root.claim(target, source)
        put(root, plan, trees)

    applied._namespace.inside(claim_and_put)
    applied.notes.extend(root.notes)
    _enforce_limits(plan, pid, applied)


def _make_point_in_source(op: Union[Mount, ImageFile], directories: list[Union[Mount, InPlace]]) -> None:
    """Create a mount point below the container's own directory, in its source on the host, since the mount is
    read-only; its parent exists (state/storage.py). Raise KernelError for one that is missing below any other directory
    of the plan: an image's links can lead there, and the source is the host's, or all containers of a device see it."""
    for below in directories:
        path = below.source + op.target[len(below.target) :]
        if not op.target.startswith(below.target + "/") or os.path.lexists(path):
            continue
        if below.target != constants.PRIVATE_DIR or not os.path.isdir(os.path.dirname(path)):
            raise KernelError(
                f"{shown(op.target)} is below {shown(below.target)}, where gpushare mounts a directory of the host",
                "remove the image's link that leads there",
            )
        if op.kind == "dir":
            os.mkdir(path, 0o755)
        else:
            flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC
            os.close(os.open(path, flags, 0o444))


def _detached_copy(op: Union[Mount, Cover, DeviceNode], hider: Union[idmap.Hider, None]) -> int:
    """Return the source as a private, detached mount with the attributes of the operation."""
    try:
        tree = syscalls.open_tree(op.source)
    except syscalls.SyscallError as error:
        raise of_source(error.errno, op.source) from None
    names = DEVICE_FLAGS[op.simulated] if isinstance(op, DeviceNode) else op.flags
    try:
        status = os.fstat(tree)
        _check_source(op, status)
        attributes = sum(syscalls.ATTRIBUTES[name] for name in names)
        if hider is None or not _hide(hider, op, tree, attributes, status):
            syscalls.mount_setattr(tree, attributes, syscalls.MS_PRIVATE, op.source)
    except BaseException:
        os.close(tree)
        raise
    return tree


def _hide(
    hider: idmap.Hider, op: Union[Mount, Cover, DeviceNode], tree: int, attributes: int, status: os.stat_result
) -> bool:
    """Set the attributes and hide the owner. Return False if the file system cannot hide it."""
    more = 0 if isinstance(op, DeviceNode) else hider.attributes(op.target, op.kind, op.flags, status)
    try:
        if more:
            syscalls.mount_setattr(tree, attributes | more, syscalls.MS_PRIVATE, op.source, userns=hider.fd)
    except syscalls.SyscallError as error:
        if not hider.refused(error, status.st_dev):
            raise
        return False
    return bool(more)


def _check_source(op: Union[Mount, Cover, DeviceNode], status: os.stat_result) -> None:
    if not isinstance(op, DeviceNode):
        if not mountrules.SOURCES[op.kind](status.st_mode):
            raise DeviceError(f"{shown(op.source)} is {mountrules.type_name(status.st_mode)}, not a {op.kind}")
    elif op.simulated:
        if not stat.S_ISREG(status.st_mode):
            raise DeviceError(f"{shown(op.source)} is {mountrules.type_name(status.st_mode)}, not a simulated device")
    elif not stat.S_ISCHR(status.st_mode) or status.st_rdev != os.makedev(op.major, op.minor):
        raise DeviceError(
            f"{shown(op.source)} is not the character device {op.major}:{op.minor}", "run gpushare refresh"
        )


class ContainerRoot(mountpoint.Root):
    """A container's root, with what operations do in it (`put` of core/ops.py)."""

    def show_image_file(self, source: str, target: str, flags: tuple[str, ...]) -> None:
        """Mount a file of the image at a second place. The plan was made from the file at `source`; a process that can
        write to the image may have replaced it since."""
        fd = self.lookup(source, os.O_PATH | os.O_NOFOLLOW)
        mode = os.fstat(fd).st_mode if fd >= 0 else 0
        if fd < 0 or not stat.S_ISREG(mode) or inroot.path_of(self.fd, fd) != source:
            what = mountrules.type_name(mode) if fd >= 0 and not stat.S_ISREG(mode) else "not where it was"
            raise KernelError(
                f"{shown(source)} of the image is {what}: it was changed while the container was being started",
                "stop what is writing to the container's file system",
            )
        if self.is_own(fd):
            raise KernelError(f"{shown(source)} of the image is covered already", "start the container again")
        tree = self.keep(syscalls.open_tree("", dir_fd=fd))
        attributes = sum(syscalls.ATTRIBUTES[name] for name in flags)
        syscalls.mount_setattr(tree, attributes, syscalls.MS_PRIVATE, source)
        self.attach(tree, self.mount_point(target, "file"), target)

    def has_device(self, target: str, major: int, minor: int) -> bool:
        """Whether the image or the engine has this device there already; then note it."""
        fd = self.lookup(target, os.O_PATH | os.O_NOFOLLOW)
        status = os.fstat(fd) if fd >= 0 else None
        if status is None or not stat.S_ISCHR(status.st_mode) or status.st_rdev != os.makedev(major, minor):
            return False
        self.notes.append(f"{shown(target)} is there already")
        return True

    def link(self, target: str, text: str) -> None:
        """Make the symbolic link `target`, or replace one that leads nowhere, or cover the library that is there."""
        dir_fd, name = self.parent(target)
        if self.may_make(target) and self._make_link(target, text, dir_fd, name):  # most are not there yet
            return
        there = self.lookup(target, os.O_PATH | os.O_NOFOLLOW)
        if there < 0:
            self.require_writable(dir_fd, target)
            if not self._make_link(target, text, dir_fd, name):
                raise syscalls.SyscallError("symlinkat", target, errno.EEXIST)
            return
        if stat.S_ISLNK(os.fstat(there).st_mode):
            old = os.readlink("", dir_fd=there)
            if old == text:
                return
            if self.lookup(target) < 0:  # it leads nowhere, so no process can be using what it names
                self.require_writable(dir_fd, target)
                self._replace_link(target, text, dir_fd, name, old)
                return
        self._cover_library(target, text)

    def _make_link(self, target: str, text: str, dir_fd: int, name: str) -> bool:
        """Return False if something is there."""
        try:
            os.symlink(text, name, dir_fd=dir_fd)
        except FileExistsError:
            return False
        except OSError as error:
            raise syscalls.from_os_error(error, "symlinkat", target) from None
        self.undo.append(lambda: _unlink_link(dir_fd, name, text))
        if self.owner != (0, 0):
            os.chown(name, *self.owner, dir_fd=dir_fd, follow_symlinks=False)
        return True

    def _replace_link(self, target: str, text: str, dir_fd: int, name: str, old: str) -> None:
        def put(text: str) -> None:
            temporary = f".{name}.gpushare"
            try:
                os.unlink(temporary, dir_fd=dir_fd)  # left by a killed start
            except FileNotFoundError:
                pass
            os.symlink(text, temporary, dir_fd=dir_fd)
            os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

        try:
            put(text)
        except OSError as error:
            raise syscalls.from_os_error(error, "symlinkat", target) from None
        self.undo.append(lambda: put(old))

    def _cover_library(self, target: str, text: str) -> None:
        """Mount what the link would lead to over the library that the image has under its name (an own libcuda.so.1,
        say), so that the name means the same."""
        existing = self.library_behind(target)
        if not stat.S_ISREG(os.fstat(existing).st_mode):
            kind = mountrules.type_name(os.fstat(existing).st_mode)
            raise KernelError(f"{shown(target)} is {kind} where a link must be", "remove it from the image")
        meant_path = os.path.join(os.path.dirname(target), text)
        meant = self.lookup(meant_path)
        if meant < 0 or not self.is_own(meant):
            raise KernelError(f"{shown(target)} is in the way of a link to {shown(text)}", "remove it from the image")
        if os.path.samestat(os.fstat(existing), os.fstat(meant)):
            return
        tree = self.keep(syscalls.open_tree("", dir_fd=meant))
        syscalls.mount_setattr(tree, 0, syscalls.MS_PRIVATE, meant_path)
        self.attach(tree, existing, target)
        self.notes.append(f"{shown(target)} of the image is covered ({shown(inroot.path_of(self.fd, existing))})")

    def extend_ld_cache(self, entries: tuple[LdEntry, ...]) -> None:
        cachefile.extend(self, entries)

    def mask_proc(self, bus_ids: tuple[str, ...], capabilities: tuple[str, ...]) -> None:
        proc_nvidia_mask.cover(self, bus_ids, capabilities)


class Access:
    """The grants at the end of a plan: device rules, and limits in the container's cgroup."""

    def __init__(self, plan: Plan) -> None:
        self.rules: list[tuple[int, int]] = []
        self.limits: list[KernelLimit] = []
        call(plan.ops, "grant", self)


def _unlink_link(dir_fd: int, name: str, text: str) -> None:
    try:
        if os.readlink(name, dir_fd=dir_fd) == text:
            os.unlink(name, dir_fd=dir_fd)
    except FileNotFoundError:
        pass
