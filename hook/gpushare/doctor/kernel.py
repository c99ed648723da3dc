"""Checks of the kernel. They try each system call in a way that changes nothing. The kernel's version would not be
enough: distributions backport system calls, and security modules forbid some."""

from __future__ import annotations

import errno
import os
from typing import Callable, NamedTuple

from ..core.errors import KernelError
from ..gpu import driverfiles
from ..gpu.driverroot import short_read
from ..system import bpf, idmap, mountns, rootless, syscalls
from .base import FAIL, OK, SKIP, WARN, Machine, Result

_NO_FD = -1
_BAD_FD = (errno.EBADF, errno.EINVAL)  # errors of an existing system call for an invalid descriptor


class Feature(NamedTuple):
    """A system call and the Linux version that added it. `use` raises KernelError if it fails; errors in `allowed` mean
    that the call exists."""

    name: str
    since: str
    use: Callable[[], object]
    allowed: tuple[int, ...] = ()


def _and_close(fd: int) -> None:
    os.close(fd)


FEATURES = (
    Feature("move_mount", "5.2", lambda: syscalls.move_mount(_NO_FD, _NO_FD, "/"), _BAD_FD),
    Feature("open_tree", "5.2", lambda: _and_close(syscalls.open_tree("/"))),
    Feature("fsopen", "5.2", lambda: _and_close(syscalls.detached_tmpfs({}, 0, "tmpfs"))),
    Feature("pidfd_open", "5.3", lambda: _and_close(syscalls.pidfd_open(os.getpid()))),
    Feature(
        "openat2",
        "5.6",
        lambda: _and_close(syscalls.openat2(syscalls.AT_FDCWD, "/", os.O_PATH, 0, syscalls.RESOLVE_IN_ROOT)),
    ),
    Feature("mount_setattr", "5.12", lambda: syscalls.mount_setattr(_NO_FD, 0, syscalls.MS_PRIVATE, "/"), _BAD_FD),
)


def features(_: Machine) -> Result:
    release = os.uname().release
    missing, refused = [], []
    for one in FEATURES:
        try:
            one.use()
        except syscalls.SyscallError as error:
            if error.errno == errno.ENOSYS:
                missing.append(f"{one.name} (Linux {one.since})")
            elif error.errno not in one.allowed:
                refused.append(f"{one.name}: {os.strerror(error.errno)}")
    if missing:
        return Result(FAIL, f"Linux {release} lacks {', '.join(missing)}", "use a kernel of version 5.12 or newer")
    if refused:
        if os.geteuid() != 0:
            return Result(SKIP, f"Linux {release}; mounts need root")
        return Result(FAIL, "; ".join(refused), "allow mounts on this system (CAP_SYS_ADMIN, seccomp, AppArmor)")
    return Result(OK, f"Linux {release} has all {len(FEATURES)} system calls")


def file_leases(machine: Machine) -> Result:
    """Check whether each file system whose files are mounted into containers can hide their owner, so that containers
    cannot lease them; see idmap.py."""
    if machine.config is None or rootless.is_rootless():
        return Result(SKIP, "needs a configuration and root's rights over mounts")
    paths = [machine.config.shim_dir]
    if machine.inventory is not None:
        paths.append(driverfiles.cuda_library(machine.inventory.files_root, machine.inventory.driver_version))
    namespace = idmap.new_namespace()
    try:
        trees = [("the state directory's tmpfs", syscalls.detached_tmpfs({}, 0, "tmpfs"))]
        trees += [(f"{path} ({_type_of(path)})", syscalls.open_tree(path)) for path in paths if os.path.exists(path)]
        refused = [what for what, tree in trees if not idmap.hides(tree, namespace, what)]
        for _, tree in trees:
            os.close(tree)
    finally:
        os.close(namespace)
    if not refused:
        return Result(OK, f"all {len(trees)} file systems can hide the owner of files that containers see")
    if (short_read("/proc/sys/fs/leases-enable") or "").strip() == "0":
        return Result(OK, "fs.leases-enable is 0")
    return Result(
        WARN,
        f"{', '.join(refused)} cannot hide the owner of its files: root of a container can lease them (F_SETLEASE), "
        "which delays its neighbours' starts for minutes",
        "sysctl fs.leases-enable=0, and the same in /etc/sysctl.d",
    )


def _type_of(path: str) -> str:
    """Return the type of the file system of `path`."""
    status = os.stat(path)
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    return next((mount.fstype for mount in mountns.read_mounts() if mount.device == device), "a file system")


def cgroups(_: Machine) -> Result:
    """Find the cgroup hierarchy that controls device access, and check that device programs can be loaded there."""
    kinds = [mount for mount in mountns.read_mounts() if mount.fstype in ("cgroup", "cgroup2")]
    v1 = any(mount.fstype == "cgroup" and "devices" in mount.super_options.split(",") for mount in kinds)
    v2 = any(mount.fstype == "cgroup2" for mount in kinds)
    detail = "v1 and v2 (hybrid)" if v1 and v2 else "v1" if v1 else "v2" if v2 else ""
    if not detail:
        return Result(FAIL, "no cgroup hierarchy controls device access", "mount /sys/fs/cgroup")
    manager = "systemd" if os.path.isdir("/run/systemd/system") else "no systemd"
    detail = f"{detail}, {manager}"
    if not v2 or v1:
        return Result(OK, detail)
    if os.geteuid() != 0:
        return Result(SKIP, f"{detail}; its device programs need root")
    try:
        os.close(bpf.load(bpf.denying([]), "gpushare doctor"))
    except KernelError as error:
        return Result(
            WARN,
            f"{detail}; device programs cannot be loaded: {error.message}",
            "use gpushare-runtime, not the hook alone; `gpushare run` has no device cgroup here",
        )
    return Result(OK, f"{detail}; the kernel loads device programs")
