"""devices/<uuid>: what the containers on one device tell each other about their work (start path).

    prepare(state_dir, uuid, before)       the directory is there, with an index that names nobody
    take(state_dir, uuid, number, holders) a new page file; the caller holds the lease lock
    settle(state_dir, uuid, granted)       the index names these numbers and no others; the caller holds the lock
    free(state_dir, uuid, number)          one number less, its file gone; the caller holds the lock
    directory, path                        where they are on the host

A container gets its own page file (struct gs_pages) writable, and the whole directory read-only: so one that started
earlier sees those that start later, without a mount for each pair of them. Only the host makes files there. A tenant
can make its own page file longer, but not beyond the directory's own tmpfs, and nobody else's shorter; what it took is
cut back when somebody else needs it.
"""

from __future__ import annotations

import errno
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
INDEX = "index"  # struct gs_peers; made last, so it marks a complete directory
PAGE_SIZE = shm_abi.packer("gs_pages").size
_TMPFS = {
    "size": str(shm_abi.MAX_PEERS * PAGE_SIZE + shm_abi.packer("gs_peers").size),
    # Nobody but the host makes files here; but a page that is gone takes an inode for as long as anybody has it open
    "nr_inodes": "16384",
    "mode": "0755",
}
# A uid that owns nothing else. A program of a container that is not root cannot be the owner, who may take a lease on
# the file (fcntl, F_SETLEASE); root of a container takes any uid, so idmap.py hides the owner where files are shown.
OWNER = 4294967280
_TRIES = 8  # how often what tenants took is cut back before we give up
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ATTRIBUTES = sum(syscalls.ATTRIBUTES[name] for name in ("nosuid", "nodev", "noexec"))
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # NONBLOCK: a container may hold a lease on its own page
_WORDS = struct.Struct("<" + "Q" * (shm_abi.MAX_PEERS // 64))


def directory(state_dir: str, uuid: str) -> str:
    """devices/<uuid>; `uuid` is the driver's, as in the inventory."""
    if not uuid or "/" in uuid or uuid.startswith(".") or "\0" in uuid:
        raise KernelError(f"device uuid {shown(uuid)} cannot name a directory")
    return f"{state_dir}/{FOLDER}/{uuid}"


def path(state_dir: str, uuid: str, number: int) -> str:
    """The page file with this number."""
    return f"{directory(state_dir, uuid)}/{number}"


def is_ready(state_dir: str, uuid: str) -> bool:
    """Whether pages can be taken."""
    return os.access(f"{directory(state_dir, uuid)}/{INDEX}", os.F_OK)


def prepare(state_dir: str, uuid: str, before: int = -1) -> None:
    """Makes devices/<uuid>, a tmpfs of its own (for a user without rights over the host a plain directory). It appears
    complete. `before`: a detached mount of the one of a state directory that was lost, which is taken instead if that
    is what it is. Raises KernelError. Not under the lease lock, but for that rare case: it mounts."""
    place = directory(state_dir, uuid)
    above = os.path.dirname(place)
    try:
        os.makedirs(above, 0o700, exist_ok=True)
        lock = os.open(above, _DIRECTORY)  # which no container sees: two first starts take turns
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
    """`outside`: the device number of the file system that `place` is in."""
    below = os.open(place, _DIRECTORY)
    try:
        if rootless.is_rootless() or os.fstat(below).st_dev != outside:  # somebody has emptied ours
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
    """Whether this is such a directory. (Who made it, its mount namespace has said.)"""
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
    """The index of a directory without pages."""
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


# Pages


def take(state_dir: str, uuid: str, number: int, holders: dict[int, str]) -> None:
    """Page file `number` for a new owner: never the file of the one before, who may still have it open. Every block is
    allocated, so a store in it cannot fail. Raises KernelError, and CapacityError with the one of `holders` (container
    ids) whose page takes all the room."""
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
            f"{shown(place)} is full: pages of ended containers are still open",
            "stop the processes that have them open",
        )
    who = ", ".join(constants.short(holders.get(number, f"page {number}")) for number in grown)
    raise CapacityError(f"{shown(place)} is full, and {who} fills it again and again", f"stop {who}")


def _allocated(file: str) -> int:
    """A new file with all its blocks, or none. Raises OSError."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600)
    try:
        os.posix_fallocate(fd, 0, PAGE_SIZE)
    except BaseException:
        os.close(fd)
        os.unlink(file)
        raise
    return fd


def _cut_back(place: str) -> list[int]:
    """Page files become as they were made; which were more. Blocks behind the end count, and extended attributes, which
    take the room of inodes (tmpfs since Linux 6.6)."""
    grown = []
    for name in filter(str.isdigit, os.listdir(place)):
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
    """Whether there were extended attributes of users. More than 64 KiB of names can be neither listed nor removed:
    then only the end of the container helps, and it is named."""
    try:
        found = [name for name in os.listxattr(fd) if name.startswith("user.")]
    except OSError as error:
        return error.errno == errno.E2BIG
    for name in found:
        try:
            os.removexattr(fd, name)
        except OSError:
            pass  # its tenant was faster
    return bool(found)


def _remove(file: str) -> None:
    """A page file goes, and its memory also where somebody still has it open."""
    try:
        fd = os.open(file, os.O_WRONLY | _FLAGS)
    except FileNotFoundError:
        return
    except OSError:
        fd = -1  # a lease is on it
    if fd >= 0:
        try:
            os.ftruncate(fd, 0)
        finally:
            os.close(fd)
    os.unlink(file)


# The index


def settle(state_dir: str, uuid: str, granted: dict[int, int]) -> None:
    """Makes the index say what the leases say, with what each number was granted (region.granted): a start or a release
    that was killed has left it otherwise. Page files of nobody go. Raises KernelError."""
    _change(state_dir, uuid, granted)


def free(state_dir: str, uuid: str, number: int) -> None:
    """Nobody has `number` any more. Raises KernelError."""
    _change(state_dir, uuid, number)


def granted_at(number: int) -> int:
    """Where in an index it says what `number` was granted, in bytes."""
    return shm_abi.offset("gs_peers", "granted") + 8 * number


def _change(state_dir: str, uuid: str, to: Union[int, dict[int, int]]) -> None:
    """`to`: the numbers that are used, or the one that is free now. Stored where it is, since containers have the index
    mapped: first what a number was granted, then the numbers, then the generation, by which a reader knows that they
    changed."""
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
    """What the index says. Raises KernelError."""
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
