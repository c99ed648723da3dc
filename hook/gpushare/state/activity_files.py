"""devices/<uuid>: the activity files by which containers on a device see each other's work (start path).

    prepare(state_dir, uuid, before)       create the directory, with an empty index
    take(state_dir, uuid, number, holders) a new activity file; the caller holds the lease lock
    settle(state_dir, uuid, granted)       write these numbers to the index; the caller holds the lock
    free(state_dir, uuid, number)          remove a number and its file; the caller holds the lock
    directory, path                        paths on the host

A container gets its own activity file (struct gs_pages) writable, and the whole directory read-only. So it sees
containers that start later without a mount for each pair. Only the host creates files there. A tenant can extend its
own file up to the size of the directory's tmpfs, and cannot shorten another file; the host truncates it when another
container needs the space."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from typing import Union

from ..core import constants
from ..core.errors import CapacityError, KernelError, of_file, what_to_do
from ..core.quoting import shown
from ..system import filelock, rootless, syscalls
from . import shm_abi

FOLDER = "devices"
INDEX = "index"  # struct gs_peers; created last, so it marks a complete directory
PAGE_SIZE = shm_abi.packer("gs_pages").size
_TMPFS = {
    "size": str(shm_abi.MAX_PEERS * PAGE_SIZE + shm_abi.packer("gs_peers").size),
    # Only the host creates files here; a removed file keeps its inode as long as a process has it open
    "nr_inodes": "16384",
    "mode": "0755",
}
# A uid that owns nothing else. A file's owner may take a lease on it (fcntl, F_SETLEASE); a program that is not root
# cannot become this owner. A container's root can take any uid, so idmap.py hides the owner in mounts.
OWNER = 4294967280
_GONE = "gone-"  # begins the name of a removed file that a process can still write to
_TRIES = 8  # truncations of tenants' files before this gives up
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ATTRIBUTES = sum(syscalls.ATTRIBUTES[name] for name in ("nosuid", "nodev", "noexec"))
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NONBLOCK: a container may hold a file lease on its own file
_WORDS = struct.Struct("<" + "Q" * (shm_abi.MAX_PEERS // 64))


def directory(state_dir: str, uuid: str) -> str:
    """Return devices/<uuid>; `uuid` is that of the inventory."""
    if not uuid or "/" in uuid or uuid.startswith(".") or "\0" in uuid:
        raise KernelError(f"device uuid {shown(uuid)} cannot name a directory")
    return f"{state_dir}/{FOLDER}/{uuid}"


def path(state_dir: str, uuid: str, number: int) -> str:
    """Return the path of the activity file with this number."""
    return f"{directory(state_dir, uuid)}/{number}"


def is_ready(state_dir: str, uuid: str) -> bool:
    """Return whether the directory is complete."""
    return os.access(f"{directory(state_dir, uuid)}/{INDEX}", os.F_OK)


def prepare(state_dir: str, uuid: str, before: int = -1) -> None:
    """Create devices/<uuid>, a tmpfs (a plain directory for a rootless user), which appears complete. `before`: a
    detached mount of the directory from a lost state directory, used instead if it is valid. Raise KernelError. It
    mounts, so the caller does not hold the lease lock, except in that rare case."""
    place = directory(state_dir, uuid)
    above = os.path.dirname(place)
    try:
        os.makedirs(above, 0o700, exist_ok=True)
        lock = os.open(above, _DIRECTORY)  # no container sees it; orders two first starts
        try:
            filelock.take(lock, above)
            if not is_ready(state_dir, uuid):
                os.makedirs(place, 0o755, exist_ok=True)
                _make(place, os.fstat(lock).st_dev, before)
        finally:
            os.close(lock)
    except OSError as error:
        raise KernelError(f"{shown(place)}: {error.strerror}", what_to_do(error)) from error


def _make(place: str, outside: int, before: int) -> None:
    """Create the directory. `outside`: the device number of the file system that `place` is in."""
    below = os.open(place, _DIRECTORY)
    try:
        if rootless.is_rootless() or os.fstat(below).st_dev != outside:  # ours was emptied
            os.fchmod(below, 0o755)
            _fill(below)
        else:
            _mount(place, below, before)
    finally:
        os.close(below)


def _mount(place: str, below: int, before: int) -> None:
    old = before >= 0 and _is_ours(before)
    mount = os.dup(before) if old else syscalls.detached_tmpfs({"source": place, **_TMPFS}, 0, place)
    try:
        syscalls.mount_setattr(mount, _ATTRIBUTES, syscalls.MS_PRIVATE, place, clear=syscalls.ATTRIBUTES["ro"])
        if not old:
            _fill(mount)
        syscalls.move_mount(mount, below, place)
    finally:
        os.close(mount)


def _is_ours(mount: int) -> bool:
    """Return whether this is such a directory. (Its mount namespace has proved its origin.)"""
    status = os.fstat(mount)
    if (status.st_uid, stat.S_IMODE(status.st_mode)) != (0, 0o755) or syscalls.filesystem_magic(
        mount
    ) != syscalls.TMPFS_MAGIC:
        return False
    try:
        index = os.stat(INDEX, dir_fd=mount, follow_symlinks=False)
    except OSError:
        return False
    whose = (index.st_uid, index.st_gid, index.st_size)
    return stat.S_ISREG(index.st_mode) and whose == (OWNER, OWNER, shm_abi.packer("gs_peers").size)


def _fill(dir_fd: int) -> None:
    """Write the index of a directory without activity files."""
    words = [0] * _WORDS.size
    data = shm_abi.packer("gs_peers").pack(
        shm_abi.PEERS_MAGIC, shm_abi.ABI_VERSION, shm_abi.packer("gs_peers").size, 1, *words[: shm_abi.MAX_PEERS // 64]
    )
    temporary = INDEX + ".new"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _FLAGS, 0o444, dir_fd=dir_fd)
    try:
        if os.write(fd, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _give_away(fd, 0o444)
    finally:
        os.close(fd)
    os.rename(temporary, INDEX, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


def _give_away(fd: int, mode: int) -> None:
    os.fchmod(fd, mode)
    rootless.give_away(fd, OWNER)


# Activity files


def take(state_dir: str, uuid: str, number: int, holders: dict[int, str]) -> None:
    """Create activity file `number` for a new owner, never the previous owner's file, which may still be open. Every
    block is allocated, so a store cannot fail. Raise KernelError, or CapacityError that names the one of `holders`
    (container ids) whose file takes all the space."""
    file = path(state_dir, uuid, number)
    try:
        _remove(file)
        fd = _create(file, directory(state_dir, uuid), holders)
        try:
            header = (shm_abi.PAGES_MAGIC, shm_abi.ABI_VERSION, PAGE_SIZE, shm_abi.MAX_PAGES)
            os.pwrite(fd, struct.pack("<QIII", *header), 0)
            _give_away(fd, 0o666)
        finally:
            os.close(fd)
    except OSError as error:
        raise of_file(error, file) from error


def _create(file: str, place: str, holders: dict[int, str]) -> int:
    grown: list[int] = []
    for _ in range(_TRIES):
        try:
            return _allocated(file)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        grown = _cut_back(place)
    if not grown:
        raise CapacityError(
            f"{shown(place)} is full: activity files of ended containers are still open",
            "stop the processes that have them open",
        )
    who = ", ".join(constants.short(holders.get(number, f"page {number}")) for number in grown)
    raise CapacityError(f"{shown(place)} is full, and {who} fills it again and again", f"stop {who}")


def _allocated(file: str) -> int:
    """Create a file with all its blocks, or none. Raise OSError."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
    try:
        os.posix_fallocate(fd, 0, PAGE_SIZE)
    except BaseException:
        os.close(fd)
        os.unlink(file)
        raise
    return fd


def _cut_back(place: str) -> list[int]:
    """Restore activity files to their original size, and return the numbers of larger files. Blocks beyond the end
    count, and so do extended attributes, which use inode space (tmpfs since Linux 6.6). Empty removed files, too."""
    grown = []
    names = os.listdir(place)
    for name in names:
        if name.startswith(_GONE):
            _remove(f"{place}/{name}")
    for name in filter(str.isdigit, names):
        try:
            fd = os.open(f"{place}/{name}", os.O_WRONLY | _FLAGS)
        except OSError:
            continue
        try:
            status = os.fstat(fd)
            more = status.st_size > PAGE_SIZE or status.st_blocks * 512 > PAGE_SIZE
            if more:
                os.ftruncate(fd, PAGE_SIZE)
            if _strip(fd) or more:
                grown.append(int(name))
        finally:
            os.close(fd)
    return grown


def _strip(fd: int) -> bool:
    """Remove extended attributes; return whether there were any. More than 64 KiB of names can be neither listed nor
    removed; then only the end of the container helps, and the error names it."""
    try:
        found = [name for name in os.listxattr(fd) if name.startswith("user.")]
    except OSError as error:
        return error.errno == errno.E2BIG
    for name in found:
        try:
            os.removexattr(fd, name)
        except OSError:
            pass  # the tenant changed it meanwhile
    return bool(found)


def _remove(file: str) -> None:
    """Remove an activity file, and free its memory even if a process still has it open. If that process can write to
    it, the file keeps a name, since it can be filled again: see `_cut_back`."""
    try:
        fd = os.open(file, os.O_WRONLY | _FLAGS)
    except FileNotFoundError:
        return
    except OSError:
        fd = -1  # a file lease is on it
    folder, _, name = file.rpartition("/")
    if fd >= 0:
        try:
            os.ftruncate(fd, 0)
            if name.startswith(_GONE):
                _strip(fd)
        finally:
            os.close(fd)
    if not _has_writer(file):
        os.unlink(file)
    elif not name.startswith(_GONE):
        os.rename(file, f"{folder}/{_GONE}{name}-{os.stat(file).st_ino}")


def _has_writer(file: str) -> bool:
    """Return whether a process has the file open or mapped for writing: then it gives no lease for reading (fcntl(2),
    F_SETLEASE). Without the right to one, return False."""
    try:
        fd = os.open(file, os.O_RDONLY | _FLAGS)
    except OSError:
        return True  # a file lease of the container
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN
    finally:
        os.close(fd)
    return False


# The index


def settle(state_dir: str, uuid: str, granted: dict[int, int]) -> None:
    """Write the index from the leases, with the grant of each number (shm_abi.granted), since a killed start or release
    may have left it stale. Remove activity files without an owner. Raise KernelError."""
    _change(state_dir, uuid, granted)


def free(state_dir: str, uuid: str, number: int) -> None:
    """Remove `number` from the index. Raise KernelError."""
    _change(state_dir, uuid, number)


def granted_at(number: int) -> int:
    """Return the offset of the grant of `number` in an index."""
    return shm_abi.offset("gs_peers", "granted") + 8 * number


def _change(state_dir: str, uuid: str, to: Union[int, dict[int, int]]) -> None:
    """Change the index in place, since containers read it at any time: first the grants, then the numbers, then the
    generation, by which a reader detects the change. `to`: the numbers in use, or the number that is free now."""
    file = f"{directory(state_dir, uuid)}/{INDEX}"
    at_used, at_generation = shm_abi.offset("gs_peers", "used"), shm_abi.offset("gs_peers", "generation")
    try:
        fd = os.open(file, os.O_RDWR | _FLAGS)
        try:
            before = _numbers(_WORDS.unpack(os.pread(fd, _WORDS.size, at_used)))
            after = before - {to} if isinstance(to, int) else frozenset(to)
            if not isinstance(to, int):
                _grant(fd, to)
            if after != before:
                words = (sum(1 << (n & 63) for n in after if n >> 6 == word) for word in range(shm_abi.MAX_PEERS // 64))
                os.pwrite(fd, _WORDS.pack(*words), at_used)
                generation = int.from_bytes(os.pread(fd, 8, at_generation), "little")
                os.pwrite(fd, (generation + 1).to_bytes(8, "little"), at_generation)
        finally:
            os.close(fd)
        gone = (before | {to} if isinstance(to, int) else before) - after
        for number in gone:
            _remove(path(state_dir, uuid, number))
    except OSError as error:
        raise of_file(error, error.filename or file) from error


def _grant(fd: int, granted: dict[int, int]) -> None:
    known = os.pread(fd, 8 * shm_abi.MAX_PEERS, granted_at(0))
    for number, word in granted.items():
        data = word.to_bytes(8, "little")
        if known[8 * number : 8 * number + 8] != data:
            os.pwrite(fd, data, granted_at(number))


def _numbers(words: tuple[int, ...]) -> frozenset[int]:
    return frozenset(64 * at + bit for at, word in enumerate(words) if word for bit in range(64) if word >> bit & 1)


def numbers(state_dir: str, uuid: str) -> frozenset[int]:
    """Return the numbers in the index. Raise KernelError."""
    file = f"{directory(state_dir, uuid)}/{INDEX}"
    try:
        index = os.open(file, os.O_RDONLY | _FLAGS)
        try:
            data = os.pread(index, shm_abi.packer("gs_peers").size + 1, 0)
        finally:
            os.close(index)
        shm_abi.check(data, "index of pages", shm_abi.PEERS_MAGIC, shm_abi.packer("gs_peers").size)
    except OSError as error:
        raise of_file(error, file) from error
    return _numbers(_WORDS.unpack_from(data, shm_abi.offset("gs_peers", "used")))
