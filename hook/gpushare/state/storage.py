"""The state directory: its tmpfs, each container's files, and their removal (start path).

    prepare(state_dir)            the directory is a tmpfs of our own, private, with its folders
    make_share_dir(state_dir, id) what the container will see at /usr/lib/gpushare
    execute(op)                   WriteLimits, TenantTmpfs
    discard(state_dir, id)        containers/<id> -> trash/: gone at once, under the lease lock, whatever is in it
    empty_trash(state_dir)        unmounts and deletes what was discarded; idempotent, without the lock
    read_usage(state_dir, id, n)  the tenant's page, believing nothing

Removal has two steps because a mount must not be undone under the lock, and a name is free the moment its lease is.
A process killed in either step leaves something that the next `empty_trash` (each start, poststop and prune) finishes.
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
_PLAIN = "rootless"  # there when the directory is a user's own and no mount
_MARKER = "lock"  # made last: its presence says that the directory is complete
REBUILD = "rebuild"  # there from the making of the directory until leases of living containers were looked for
FIRST = ".lock"  # of first starts, below the mount
CHANGING = "changing"  # there while limits of a living container change: see limit_update.py
_OURS = frozenset(  # beginnings of names in it, without the dot of temporary files
    (
        *(name for name, _ in _FOLDERS),
        _PLAIN,
        _MARKER,
        REBUILD,
        CHANGING,
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
HELD = "held"  # of earlier versions, beside a lease that is only reserved: whose it became (leasefile.held)
_CGROUP = "cgroup"  # path of a cgroup that was made for this lease alone
_SHARE_FOLDERS = ("driver", "rw", "pages", "peers", "mps")
_SHARE_FILES = (constants.REAL_CUDA, constants.REAL_NVML)  # mount points; the directory is read-only in the container
_TENANT_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


def container_dir(state_dir: str, container_id: str) -> str:
    """containers/<id>: 0700, since `rw` below it is writable by anybody who can reach it."""
    if not container_id or "/" in container_id or container_id in (".", "..") or "\0" in container_id:
        raise KernelError(f"container id {shown(container_id)} cannot name a directory")  # oci.py refused it before
    return os.path.join(state_dir, "containers", container_id)


def is_ready(state_dir: str) -> bool:
    """True when our own mount is on `state_dir` (or it is a user's own) and complete; else it holds no lease."""
    try:
        own = os.stat(state_dir).st_dev != os.stat(os.path.dirname(os.path.abspath(state_dir))).st_dev
        ours = own or os.access(os.path.join(state_dir, _PLAIN), os.F_OK)
        return ours and stat.S_ISREG(os.stat(os.path.join(state_dir, _MARKER)).st_mode)  # /run/lock is a directory
    except OSError:
        return False


def prepare(state_dir: str) -> None:
    """Makes `state_dir` a private tmpfs of our own with its folders. Raises KernelError.

    Also where the directory is on a tmpfs already: /run is shared between mount namespaces on a systemd host, so a
    tenant's page mounted below it would be copied into every other namespace and outlive its container.
    A lock orders first starts; one that comes between mount and marker finishes what is left, as the other does.
    """
    if is_ready(state_dir):
        return
    try:
        os.makedirs(state_dir, 0o700, exist_ok=True)
        filelock.require_own(state_dir)
        _refuse_foreign(state_dir)
        fd = filelock.open_own(os.path.join(state_dir, FIRST))  # any user can lock a directory
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
    """The name of something in it that is not ours, "" where there is none. Raises OSError."""
    for name in sorted(os.listdir(state_dir)):
        if name.lstrip(".").partition(".")[0] not in _OURS and name != "lost+found":
            return name
    return ""


def _refuse_foreign(state_dir: str) -> None:
    """Raises KernelError for somebody else's directory: `--state /etc` would hide all that is there below a mount."""
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
        except FileExistsError:  # of a start that was killed, or of one that does the same just now
            pass
        os.chmod(path, mode)
    idmap.give(os.path.join(state_dir, "containers"))
    for name in (REBUILD, _MARKER):
        os.close(os.open(os.path.join(state_dir, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def make_share_dir(state_dir: str, container_id: str, shares: Sequence[Share]) -> str:
    """containers/<id>/share with its mount points; returns its path. Modes do not depend on the umask: any uid in the
    container reads it. Raises KernelError."""
    share = os.path.join(container_dir(state_dir, container_id), "share")
    try:
        _make_points(share, [one.device.uuid for one in shares])
    except OSError as error:
        raise of_file(error, error.filename or share) from error
    syscalls.try_setxattr(share, SHARE_MARK)  # only root of this host can: rebuild.py
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
    """Carry out the operations of a plan that are files of ours on the host. Raises KernelError."""
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
    """Complete before it has its name; 0444, since the shim's only use is to read."""
    nonce = int.from_bytes(os.urandom(8), "little") | 1
    temporary = op.path + ".new"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o444)
    try:
        turns = [size >> 20 for size in op.turn_bytes]
        more = (1, op.slice_us, op.switch_us, op.mps, 1000 * op.turn_ms, turns)
        write_all(fd, shm_abi.pack_limits(op.shares, nonce, *more))
        os.fchmod(fd, 0o444)
    finally:
        os.close(fd)
    os.rename(temporary, op.path)


def _mount_tenant(op: TenantTmpfs) -> None:
    """The tenant's tmpfs with its usage file, attached only when the file is complete. All blocks are allocated now, so
    nothing that happens on the host later can turn a tenant's store into a SIGBUS, and nothing can grow."""
    limits = read_limits(os.path.join(os.path.dirname(op.path), "share", "limits"))
    content = shm_abi.pack_usage(limits.nonce, len(limits.devices))
    options = {"size": str(op.size_bytes), "nr_inodes": str(op.inodes), "mode": "1777"}
    flags = syscalls.ATTRIBUTES["nosuid"] | syscalls.ATTRIBUTES["nodev"] | syscalls.ATTRIBUTES["noexec"]
    os.mkdir(op.path, 0o755)
    if rootless.is_rootless():  # a mount of ours would not be seen by the user's other programs
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
    """The usage file, every block of it written, so all are allocated."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(os.path.join(directory, "usage"), flags, 0o666, dir_fd=dir_fd if dir_fd >= 0 else None)
    try:
        write_all(fd, content)
        os.fchmod(fd, 0o666)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """All of it, however little the kernel takes at once. Raises OSError."""
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])


def write_lease(state_dir: str, container_id: str, data: bytes) -> None:
    """By rename: a reader sees the old lease or the new one. Raises KernelError."""
    path = os.path.join(container_dir(state_dir, container_id), LEASE)
    temporary = path + ".new"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.write(fd, data) != len(data):  # a full tmpfs writes less: the start fails, the lease stays whole
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError as error:
        raise of_file(error, path) from error


def discard(state_dir: str, container_id: str) -> bool:
    """Takes containers/<id> away, mounts and all. False when there is none. The caller holds the lock."""
    try:
        name = f"{time.monotonic_ns():x}-{os.getpid()}"
        os.rename(container_dir(state_dir, container_id), os.path.join(state_dir, "trash", name))
    except FileNotFoundError:
        return False
    return True


def trash(state_dir: str) -> list[str]:
    """What `empty_trash` would remove."""
    try:
        return sorted(os.listdir(os.path.join(state_dir, "trash")))
    except FileNotFoundError:
        return []


def empty_trash(state_dir: str) -> list[str]:
    """Unmounts and deletes all that was discarded; several processes may do so at once. Returns what could not be
    removed, one line each, and raises nothing: leftovers are a matter for `prune`, not for the next start."""
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
    """`directory` goes when the lease does: nobody else knows of a cgroup that `gpushare run` made. Raises OSError."""
    path = os.path.join(container_dir(state_dir, container_id), _CGROUP)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        write_all(fd, os.fsencode(directory))
    finally:
        os.close(fd)


def _remove_cgroup(path: str) -> None:
    """The cgroup that `path` names; one that is in use, or gone with those above it, is let be."""
    try:
        with open(path, "rb") as file:
            os.rmdir(file.read())
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY, errno.ENODEV):
            raise


def _unmount(path: str) -> None:
    """Detaches every mount on `path`; a container that still runs keeps its own copy."""
    while True:
        try:
            syscalls.umount(path, syscalls.MNT_DETACH | syscalls.UMOUNT_NOFOLLOW)
        except syscalls.SyscallError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):  # not a mount point, or nothing there
                return
            if error.errno == errno.EPERM and not os.path.ismount(path):  # a user's own directory has no mounts
                return
            raise


def _delete(path: str) -> None:
    """Deletes a tree (or a stray file) of ours, never leaving its file system; somebody else may be deleting it too."""
    device = os.lstat(path).st_dev if os.path.lexists(path) else 0
    for folder, folders, files in os.walk(path, topdown=False):
        for name in (*files, *folders):
            inside = os.path.join(folder, name)
            try:
                status = os.lstat(inside)
                if status.st_dev != device:
                    raise KernelError(f"{shown(inside)} is still a mount point")
                os.rmdir(inside) if stat.S_ISDIR(status.st_mode) else os.unlink(inside)
            except FileNotFoundError:
                pass
    try:
        os.rmdir(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
    except FileNotFoundError:
        pass


def read_limits(path: str) -> shm_abi.Limits:
    """The limits file that we wrote. Raises RegionError."""
    return shm_abi.read_limits(_pread(path, shm_abi.LIMITS_SIZE, "limits file"))


def read_usage(state_dir: str, container_id: str, n_devices: int) -> Usage:
    """What a container says that it uses. Raises RegionError."""
    from . import usage_reader  # no start reads it

    path = os.path.join(container_dir(state_dir, container_id), "rw", "usage")
    return usage_reader.read_usage(_pread(path, shm_abi.USAGE_SIZE, "usage file"), n_devices)


def _pread(path: str, size_bytes: int, what: str) -> bytes:
    """A bounded copy of a file that somebody else may be truncating, locking or replacing right now.

    O_NONBLOCK: a FIFO or a write lease must not hold us up; never mapped: a truncation would be a SIGBUS.
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
            return os.pread(fd, size_bytes, 0)
        finally:
            os.close(fd)
    except OSError as error:
        why = "a process of the container holds a lease on it" if error.errno == errno.EAGAIN else error.strerror
        raise shm_abi.RegionError(f"{what} {shown(path)} cannot be read: {why}") from error
