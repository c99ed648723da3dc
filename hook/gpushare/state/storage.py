"""The state directory: its tmpfs, each container's files, and their removal (start path).

    prepare(state_dir)            make the directory a private tmpfs with its folders
    make_share_dir(state_dir, id) the directory for /usr/lib/gpushare in the container
    store(ops), execute(op)       WriteLimits, TenantTmpfs
    discard(state_dir, id)        containers/<id> -> trash/: removed at once, under the lease lock
    empty_trash(state_dir)        unmount and delete what was discarded; idempotent, without the lock
    read_usage(state_dir, id, n)  the tenant's usage file, fully checked

Removal has two steps: nothing may be unmounted under the lock, and an id is free as soon as its lease is gone. The next
`empty_trash` (at each start, poststop and prune) completes a step that was killed.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Union

from ..core import constants
from ..core.errors import KernelError, of_file, what_to_do
from ..core.model import Share
from ..core.ops import Op, TenantTmpfs, WriteLimits
from ..core.quoting import shown
from ..system import filelock, idmap, rootless, syscalls
from . import shm_abi

if TYPE_CHECKING:
    from .usage_reader import Usage

TENANT_INODES = 2  # the root directory and `usage`
TENANT_BYTES = shm_abi.USAGE_SIZE
_STATE_OPTIONS = {"size": "256m", "nr_inodes": "262144", "mode": "0755"}
_FOLDERS = (("containers", 0o700), ("trash", 0o700), ("errors", 0o755))
_PLAIN = "rootless"  # marks a rootless directory, which is no mount
_MARKER = "lock"  # created last, so it marks a complete directory
REBUILD = "rebuild"  # present until the first start has searched for leases of living containers
FIRST = ".lock"  # lock of first starts, below the mount
CHANGING = "changing"  # present while limits of a container change: see limit_update.py
_OURS = frozenset(  # prefixes of names in it, without the dot of temporary files
    (
        *(name for name, _ in _FOLDERS),
        _PLAIN,
        _MARKER,
        REBUILD,
        CHANGING,
        "place",
        "devices",
        idmap.FOLDER,
        "mps",
        "node",
        "launcher",
        "compile",
    )
)
LEASE = "lease.json"
SHARE_MARK = "trusted.gpushare"
_CGROUP = "cgroup"  # path of a cgroup that was created for this lease
_SHARE_FOLDERS = ("driver", "rw", "pages", "peers", "mps")
_SHARE_FILES = (
    constants.REAL_CUDA,
    constants.REAL_NVML,
    constants.OWN_NVML,
)  # mount points; the directory is read-only in the container
_TENANT_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


def container_dir(state_dir: str, container_id: str) -> str:
    """Return containers/<id>, which is 0700 because any user that reaches `rw` below it could write there."""
    if not container_id or "/" in container_id or container_id in (".", "..") or "\0" in container_id:
        raise KernelError(f"container id {shown(container_id)} cannot name a directory")  # oci.py has checked it
    return os.path.join(state_dir, "containers", container_id)


def is_ready(state_dir: str) -> bool:
    """Return whether `state_dir` is our complete mount or a rootless directory; otherwise it has no lease."""
    try:
        own = os.stat(state_dir).st_dev != os.stat(os.path.dirname(os.path.abspath(state_dir))).st_dev
        ours = own or (os.access(os.path.join(state_dir, _PLAIN), os.F_OK) and rootless.is_rootless())
        return ours and stat.S_ISREG(os.stat(os.path.join(state_dir, _MARKER)).st_mode)  # /run/lock is a directory
    except OSError:
        return False


def prepare(state_dir: str) -> None:
    """Make `state_dir` a private tmpfs with its folders. Raise KernelError.

    This also mounts over a directory on a tmpfs: systemd shares /run between mount namespaces, so a tenant's file
    mounted below it would be copied into every other namespace and outlive its container. A lock orders first starts;
    a start that finds the mount without the marker completes it.
    """
    if is_ready(state_dir):
        return
    try:
        os.makedirs(state_dir, 0o700, exist_ok=True)
        filelock.require_own(state_dir)
        _refuse_foreign(state_dir)
        fd = filelock.open_own(os.path.join(state_dir, FIRST))  # any user can lock a directory, so lock a file
        try:
            filelock.take(fd, os.path.join(state_dir, FIRST))
            if not is_ready(state_dir):
                _make_state(state_dir)
        finally:
            os.close(fd)
    except OSError as error:
        hint = rootless.hint() if error.errno in (errno.EACCES, errno.EPERM) else what_to_do(error)
        raise KernelError(f"state directory {shown(state_dir)}: {error.strerror}", hint) from error


def foreign(state_dir: str) -> str:
    """Return the name of a file in it that is not gpushare's; "" if there is none. Raise OSError."""
    for name in sorted(os.listdir(state_dir)):
        if name.lstrip(".").partition(".")[0] not in _OURS and name != "lost+found":
            return name
    return ""


def _refuse_foreign(state_dir: str) -> None:
    """Raise KernelError for a directory with other files: with `--state /etc` the mount would hide all of them."""
    other = foreign(state_dir)
    if other:
        raise KernelError(
            f"state directory {shown(state_dir)}: {shown(other)} in it is not gpushare's",
            "name an empty directory, or a new one",
        )


def _make_state(state_dir: str) -> None:
    if not rootless.is_rootless():
        _mount_state(state_dir)
        return
    os.close(os.open(os.path.join(state_dir, _PLAIN), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    _make_folders(state_dir)


def _mount_state(state_dir: str) -> None:
    target = os.open(state_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    mount = -1
    try:
        parent = os.stat(os.path.dirname(os.path.abspath(state_dir)))
        if os.fstat(target).st_dev == parent.st_dev or syscalls.filesystem_magic(target) != syscalls.TMPFS_MAGIC:
            mount = syscalls.detached_tmpfs(
                {"source": state_dir, **_STATE_OPTIONS},
                syscalls.ATTRIBUTES["nosuid"] | syscalls.ATTRIBUTES["nodev"],
                state_dir,
            )
            syscalls.move_mount(mount, target, state_dir)
        else:  # an earlier start was killed between here and the marker
            mount = os.open(state_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        syscalls.mount_setattr(mount, 0, syscalls.MS_PRIVATE, state_dir)
        from . import place

        place.record(state_dir, mount)
        _make_folders(state_dir)
    finally:
        os.close(target)
        if mount >= 0:
            os.close(mount)


def _make_folders(state_dir: str) -> None:
    for name, mode in _FOLDERS:
        path = os.path.join(state_dir, name)
        try:
            os.mkdir(path)
        except FileExistsError:  # of a killed start, or of a concurrent one
            pass
        os.chmod(path, mode)
    idmap.give(os.path.join(state_dir, "containers"))
    for name in (REBUILD, _MARKER):
        os.close(os.open(os.path.join(state_dir, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def make_share_dir(state_dir: str, container_id: str, shares: Sequence[Share]) -> str:
    """Create containers/<id>/share with its mount points and return its path. Modes do not depend on the umask: any uid
    in the container reads it. Raise KernelError."""
    share = os.path.join(container_dir(state_dir, container_id), "share")
    try:
        _make_points(share, [one.device.uuid for one in shares])
    except OSError as error:
        raise of_file(error, error.filename or share) from error
    syscalls.try_setxattr(share, SHARE_MARK)  # only the host's root can set it: rebuild.py
    return share


def _make_points(share: str, uuids: Sequence[str]) -> None:
    for path in (share, *(os.path.join(share, name) for name in (*_SHARE_FOLDERS, *(f"peers/{u}" for u in uuids)))):
        os.mkdir(path)
        os.chmod(path, 0o755)
    for target in (*_SHARE_FILES, *(f"{constants.PAGES_DIR}/{uuid}" for uuid in uuids)):
        path = share + target[len(constants.PRIVATE_DIR) :]
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o444))
        os.chmod(path, 0o444)


def store(ops: tuple[Op, ...]) -> None:
    """Carry out the operations of a plan that write gpushare's files on the host. Raise KernelError."""
    for op in ops:
        if isinstance(op, (WriteLimits, TenantTmpfs)):
            execute(op)


def execute(op: Union[WriteLimits, TenantTmpfs]) -> None:
    """Write the limits file, or mount the tenant's tmpfs, below containers/<id>. Raise KernelError."""
    try:
        if isinstance(op, WriteLimits):
            _write_limits(op)
        else:
            _mount_tenant(op)
    except OSError as error:
        raise of_file(error, op.path) from error


def _write_limits(op: WriteLimits) -> None:
    """Write the limits file. It is complete before it gets its name, and 0444 because the shim only reads it."""
    nonce = int.from_bytes(os.urandom(8), "little") | 1
    temporary = op.path + ".new"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o444)
    try:
        turns = [size >> 20 for size in op.turn_bytes]
        more = (1, op.slice_us, op.switch_us, op.mps, 1000 * op.turn_ms, turns, op.round_ms)
        write_all(fd, shm_abi.pack_limits(op.shares, nonce, *more))
        os.fchmod(fd, 0o444)
    finally:
        os.close(fd)
    os.rename(temporary, op.path)


def _mount_tenant(op: TenantTmpfs) -> None:
    """Mount the tenant's tmpfs after its usage file is complete. All blocks are allocated now, so a later shortage on
    the host cannot turn a tenant's store into a SIGBUS, and nothing can grow."""
    limits = read_limits(os.path.join(os.path.dirname(op.path), "share", "limits"))
    content = shm_abi.pack_usage(limits.nonce, len(limits.devices))
    options = {"size": str(op.size_bytes), "nr_inodes": str(op.inodes), "mode": "1777"}
    flags = syscalls.ATTRIBUTES["nosuid"] | syscalls.ATTRIBUTES["nodev"] | syscalls.ATTRIBUTES["noexec"]
    os.mkdir(op.path, 0o755)
    if rootless.is_rootless():  # the user's other programs would not see a mount
        os.chmod(op.path, 0o1777)
        _write_usage(op.path, -1, content)
        return
    mount = syscalls.detached_tmpfs(options, flags, op.path)
    target = -1
    try:
        _write_usage("", mount, content)
        target = os.open(op.path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        syscalls.move_mount(mount, target, op.path)
    finally:
        os.close(mount)
        if target >= 0:
            os.close(target)


def _write_usage(directory: str, dir_fd: int, content: bytes) -> None:
    """Write the usage file with every block allocated."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(os.path.join(directory, "usage"), flags, 0o666, dir_fd=dir_fd if dir_fd >= 0 else None)
    try:
        write_all(fd, content)
        os.fchmod(fd, 0o666)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`, in several calls if needed. Raise OSError."""
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])


def write_lease(state_dir: str, container_id: str, data: bytes) -> None:
    """Write the lease by rename, so that a reader sees the old or the new one. Raise KernelError."""
    path = os.path.join(container_dir(state_dir, container_id), LEASE)
    temporary = path + ".new"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.write(fd, data) != len(data):  # a full tmpfs writes less; the start fails, the old lease stays
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError as error:
        raise of_file(error, path) from error


def discard(state_dir: str, container_id: str) -> bool:
    """Move containers/<id> with its mounts to the trash. Return False if there is none. The caller holds the lock."""
    try:
        name = f"{time.monotonic_ns():x}-{os.getpid()}"
        os.rename(container_dir(state_dir, container_id), os.path.join(state_dir, "trash", name))
    except FileNotFoundError:
        return False
    return True


def trash(state_dir: str) -> list[str]:
    """Return what `empty_trash` would remove."""
    try:
        return sorted(os.listdir(os.path.join(state_dir, "trash")))
    except FileNotFoundError:
        return []


def empty_trash(state_dir: str) -> list[str]:
    """Unmount and delete everything in the trash; several processes may do so at once. Return a line for each entry
    that could not be removed, and never raise: `prune` reports leftovers, the next start does not."""
    problems = []
    for name in trash(state_dir):
        path = os.path.join(state_dir, "trash", name)
        try:
            _unmount(os.path.join(path, "rw"))
            _remove_cgroup(os.path.join(path, _CGROUP))
            _delete(path)
        except (OSError, KernelError) as error:
            problems.append(f"{path}: {error}")
    return problems


def keep_cgroup(state_dir: str, container_id: str, directory: str) -> None:
    """Record a cgroup of `gpushare run`, which must be removed with the lease. Raise OSError."""
    path = os.path.join(container_dir(state_dir, container_id), _CGROUP)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        write_all(fd, os.fsencode(directory))
    finally:
        os.close(fd)


def _remove_cgroup(path: str) -> None:
    """Remove the cgroup that `path` names; ignore one that is in use or gone."""
    try:
        with open(path, "rb") as file:
            os.rmdir(file.read())
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY, errno.ENODEV):
            raise


def _unmount(path: str) -> None:
    """Detach every mount on `path`; a container that still runs keeps its copy."""
    while True:
        try:
            syscalls.umount(path, syscalls.MNT_DETACH | syscalls.UMOUNT_NOFOLLOW)
        except syscalls.SyscallError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):  # no mount point, or nothing there
                return
            if error.errno == errno.EPERM and not os.path.ismount(path):  # a rootless directory has no mounts
                return
            raise


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _delete(path: str) -> None:
    """Delete a tree (or a stray file) within its file system. Another process may delete it at the same time."""
    try:
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(path)
            return
        fd = os.open(path, _FOLDER)
        try:
            _delete_in(fd, status.st_dev, path)
        finally:
            os.close(fd)
        os.rmdir(path)
    except FileNotFoundError:
        pass


def _delete_in(folder: int, device: int, path: str) -> None:
    """Delete what the directory contains, by names in it: a rootless container that has it open can put a link in the
    place of a directory meanwhile, which no path may follow."""
    for name in os.listdir(folder):
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if status.st_dev != device:
                raise KernelError(f"{shown(os.path.join(path, name))} is still a mount point")
            if not stat.S_ISDIR(status.st_mode):
                os.unlink(name, dir_fd=folder)
                continue
            inside = os.open(name, _FOLDER, dir_fd=folder)
            try:
                if os.fstat(inside).st_dev == device:
                    _delete_in(inside, device, os.path.join(path, name))
            finally:
                os.close(inside)
            os.rmdir(name, dir_fd=folder)
        except FileNotFoundError:
            pass


def read_limits(path: str) -> shm_abi.Limits:
    """Read a limits file of the host. Raise RegionError."""
    return shm_abi.read_limits(_pread(path, shm_abi.LIMITS_SIZE, "limits file"))


def read_usage(state_dir: str, container_id: str, n_devices: int, counters: bool = False) -> Usage:
    """Read the usage that a container reports; with `counters` without its processes. Raise RegionError."""
    from . import usage_reader  # not on the start path

    path = os.path.join(container_dir(state_dir, container_id), "rw", "usage")
    part = usage_reader.COUNTERS_SIZE if counters else shm_abi.USAGE_SIZE
    data = _pread(path, shm_abi.USAGE_SIZE, "usage file", part)
    data = data.ljust(shm_abi.USAGE_SIZE, b"\0")
    return usage_reader.read_usage(data, n_devices, lambda started_ns: filelock.is_locked(path, started_ns, 1))


def _pread(path: str, size_bytes: int, what: str, part_bytes: int = -1) -> bytes:
    """Return a bounded copy, or its beginning, of a file that a tenant may truncate, lock or replace at any time.

    O_NONBLOCK, because a FIFO or a write lease must not block. Never mapped: a truncation would cause a SIGBUS.
    """
    try:
        fd = os.open(path, _TENANT_OPEN)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise shm_abi.RegionError(f"{what} {shown(path)} is damaged: not a regular file")
            if status.st_size != size_bytes:
                raise shm_abi.RegionError(
                    f"{what} {shown(path)} is damaged: {status.st_size} bytes, must be {size_bytes}"
                )
            return os.pread(fd, size_bytes if part_bytes < 0 else part_bytes, 0)
        finally:
            os.close(fd)
    except OSError as error:
        why = "a process of the container holds a lease on it" if error.errno == errno.EAGAIN else error.strerror
        raise shm_abi.RegionError(f"{what} {shown(path)} cannot be read: {why}") from error
