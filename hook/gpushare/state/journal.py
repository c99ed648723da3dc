"""The usage journal: what each share was granted and used, on disk, for `gpushare usage` (start path).

    path_of(config)                      -> str        "" : there is none
    opened(config)                       -> int        a descriptor; -1 if there is none
    started(fd, lease), undone(fd, lease)              one line for a container that starts, or could not after all
    ending(config, state_dir, by)        -> leases.Ended    one line for each container that ends, here and in the log
    checkpoint(config, state_dir)                      one line for each container that runs
    entries(path)                        -> (entries, number of unreadable lines)
    restored(config, leases)             -> leases     with what the journal knows, after the state directory was lost

One JSON object a line; each has everything about its container, so that no line needs another one. A write is one call
on a file opened for appending, so lines of concurrent writers do not mix. A line that a full disk or a crash cut short
is skipped by readers, and the next line begins on a line of its own. A file that has half of usage.journal_size becomes
`.1` and replaces the one before; running containers are then written again. Space is reserved when a file is made, so
that a disk that fills up later loses nothing. Nothing here raises: a start never fails because of the journal."""

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Optional

from ..core import constants
from ..core.errors import GpushareError
from ..core.model import Config, Lease
from ..core.quantity import size_bytes
from ..system import procs, rootless, syscalls
from . import accounts, audit_log, leases, shm_abi, storage
from .accounts import Account, Closed
from .leasefile import MOST

AUTO, NOWHERE = "auto", "none"  # of the key usage.journal; anything else is a path
PATH = "/var/lib/gpushare/usage.log"
OLDER = ".1"  # the name of the file before it ends so
_OF_A_USER = ".local/state/gpushare/usage.log"
VERSION = 1
START, SO_FAR, END = "start", "so_far", "end"
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MAX_LINE = 64 << 10
_LATEST_S = 1e11  # unix seconds
_MOST_RESTORED = 256 << 20  # bytes of each file, which takes a second
_ID = b'"id":"'  # in a line, before anything that an image chose
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE


class Held(NamedTuple):
    """One share in an entry: what it holds now, and its account so far."""

    uuid: str
    memory_bytes: int
    compute_percent: int
    account: Account


class Entry(NamedTuple):
    """One line. Times with _ns are CLOCK_BOOTTIME of the boot `boot`; `time_s` is what the host's clock said at
    `up_ns`."""

    what: str  # START, SO_FAR or END
    time_s: float
    boot: str
    up_ns: int  # when it was written
    id: str
    began_ns: int
    end_ns: int  # up to when the accounts are complete
    known: bool  # of an END: that it was reported
    uid: int
    namespace: str
    pod: str
    container: str
    image: str
    by: str
    shares: tuple[Held, ...]


def _home(uid: int) -> str:
    """Return the home of a local user, or "". A hook has no HOME, and the snapshot cannot load NSS modules."""
    with contextlib.suppress(OSError), open("/etc/passwd", encoding="utf-8", errors="surrogateescape") as users:
        for line in users:
            entry = line.rstrip("\n").split(":")
            if len(entry) == 7 and entry[2] == str(uid):
                return entry[5]
    return ""


def path_of(config: Config) -> str:
    if config.usage_journal == NOWHERE:
        return ""
    if config.usage_journal != AUTO:
        return config.usage_journal
    if config.state_dir == constants.STATE_DIR:
        return PATH
    if rootless.is_rootless() and config.state_dir == rootless.state_dir():
        home = _home(rootless.real_uid())
        return os.path.join(home, _OF_A_USER) if home else ""
    return ""  # another state directory, as of a test: its containers are not this host's


def opened(config: Config) -> int:
    path = path_of(config)
    if not path:
        return -1
    try:
        fd = os.open(path, _FLAGS)
    except FileNotFoundError:
        return _created(path, config)
    except OSError:
        return -1
    return _regular(fd)


def _created(path: str, config: Config) -> int:
    try:
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        fd = _regular(os.open(path, _FLAGS | os.O_CREAT, 0o600))
    except OSError:
        return -1
    try:
        if fd >= 0:
            syscalls.fallocate(fd, _KEEP_SIZE, _half(config), path)
    except GpushareError:
        pass  # the disk has less, or its file system cannot reserve space
    return fd


def _regular(fd: int) -> int:
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return -1


def _half(config: Config) -> int:
    return size_bytes("usage.journal_size", config.usage_journal_size) // 2


def _append(fd: int, record: dict[str, Any]) -> None:
    line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line
        os.write(fd, line)
    except OSError:
        pass


def _record(what: str, lease: Lease, books: tuple[Account, ...], end_ns: int, known: bool, by: str) -> dict[str, Any]:
    return {
        "v": VERSION,
        "what": what,
        "time": round(time.time(), 3),
        "boot": lease.boot_id,
        "up_ns": accounts.now_ns(),
        "id": lease.id,
        "began_ns": accounts.began_ns(lease),
        "end_ns": end_ns,
        "known": known,
        "by": by,
        **{name: getattr(lease, name) for name in _LABELS},
        "shares": [
            {
                "uuid": share.device.uuid,
                "memory_bytes": accounts.held_bytes(share),
                "compute_percent": shm_abi.NO_PERCENT if share.compute_percent is None else share.compute_percent,
                **account._asdict(),
            }
            for share, account in zip(lease.shares, books)
        ],
    }


_LABELS = ("uid", "namespace", "pod", "container", "image")


def started(fd: int, lease: Lease) -> None:
    """Write the start of a container."""
    _at_start(fd, START, lease, accounts.began_ns(lease))


def undone(fd: int, lease: Lease) -> None:
    """Write that a start failed after `started`."""
    _at_start(fd, END, lease, accounts.now_ns())


def _at_start(fd: int, what: str, lease: Lease, now: int) -> None:
    if fd >= 0:
        _append(fd, _record(what, lease, accounts.accounts(lease, None, now), now, True, "start"))


def ending(config: Optional[Config], state_dir: str, by: str) -> leases.Ended:
    """Return a leases.Ended that writes each release to the log of decisions and to the journal."""

    def end(closed: Closed) -> None:
        if config is None:
            return
        audit_log.released(config.log, closed, by)
        _ended(config, state_dir, closed, by)

    return end


def _ended(config: Config, state_dir: str, closed: Closed, by: str) -> None:
    fd = opened(config)
    if fd >= 0:
        _append(fd, _record(END, closed.lease, closed.accounts, closed.end_ns, closed.known, by))
        _finish(fd, config, state_dir)


def checkpoint(config: Config, state_dir: str) -> None:
    """Write every running container, so that less is lost if the host fails."""
    fd = opened(config)
    if fd >= 0:
        _write_running(fd, state_dir)
        _finish(fd, config, state_dir)


def _write_running(fd: int, state_dir: str) -> None:
    try:
        live = leases.view(state_dir).live
    except GpushareError:
        return
    for lease in live:
        now, usage = accounts.now_ns(), None
        try:
            usage = storage.read_usage(state_dir, lease.id, len(lease.shares))
        except shm_abi.RegionError:
            pass
        _append(fd, _record(SO_FAR, lease, accounts.accounts(lease, usage, now), now, True, "checkpoint"))


def _finish(fd: int, config: Config, state_dir: str) -> None:
    """Replace a file that has its size, and close `fd`. The lock is that of the file itself: a process that waited for
    it finds another file at the path."""
    path = path_of(config)
    try:
        if os.fstat(fd).st_size >= _half(config):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(path), os.fstat(fd)):
                os.rename(path, path + OLDER)
                new = _created(path, config)
                if new >= 0:
                    _write_running(new, state_dir)
                    os.close(new)
    except OSError:
        pass  # another process does it
    os.close(fd)


# Reading


def entries(path: str) -> tuple[list[Entry], int]:
    """Return all entries, oldest first, and how many lines could not be read. Raise OSError, but not for a missing
    file."""
    found: list[Entry] = []
    unreadable = 0
    for line in _lines(path):
        try:
            found.append(_entry(line))
        except _UNREADABLE:
            unreadable += 1
    return found, unreadable


_UNREADABLE = (ValueError, KeyError, TypeError, RecursionError)  # of _entry


def _lines(path: str, most: int = 0) -> Iterator[bytes]:
    """Yield lines that are not empty, oldest first; a longer one than any entry in parts, which are unreadable. With
    `most`, only of the last bytes of each file. Raise OSError, but not for a missing file."""
    for name in (path + OLDER, path):
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            continue
        if _regular(fd) < 0:
            raise OSError(errno.EINVAL, "not a regular file", name)
        with os.fdopen(fd, "rb") as file:
            if most:
                file.seek(max(0, os.fstat(fd).st_size - most))
            while line := file.readline(_MAX_LINE):
                if line.strip(b"\n\0"):
                    yield line


def _entry(line: bytes) -> Entry:
    """Parse a line. Raise one of _UNREADABLE."""
    value = json.loads(line)
    if value["v"] != VERSION or value["what"] not in (START, SO_FAR, END):
        raise ValueError("of another version")
    time_s = value["time"]
    if not isinstance(time_s, (int, float)) or not 0 <= time_s < _LATEST_S:
        raise ValueError("time")
    fields: dict[str, Any] = {"what": value["what"], "time_s": float(time_s), "known": value["known"] is True}
    fields.update((name, _text(value[name])) for name in ("boot", "id", *_LABELS[1:], "by"))
    fields.update((name, _whole(value[name])) for name in ("up_ns", "began_ns", "end_ns"))
    return Entry(**fields, uid=_whole(value["uid"], -1), shares=tuple(_held(one) for one in value["shares"]))


def _held(value: dict[str, Any]) -> Held:
    granted = [_whole(value[name]) for name in Account._fields[:2]]
    used = [None if value[name] is None else _whole(value[name]) for name in Account._fields[2:-1]]
    suspended_ns = _whole(value.get("suspended_ns", 0))  # 0.1.0 wrote none
    account = Account(*granted, *used)._replace(suspended_ns=suspended_ns)
    return Held(_text(value["uuid"]), _whole(value["memory_bytes"]), _whole(value["compute_percent"]), account)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("not text")
    return value


def _whole(value: Any, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < MOST:
        raise ValueError("not a number")
    return value


def restored(config: Config, lost: Sequence[Lease]) -> tuple[Lease, ...]:
    """Return leases that were made again after the state directory was lost, with whose they are and what they were
    granted before, as far as the journal knows. A start waits for this, so it reads the journal once, and parses only
    the last lines of each container."""
    path = path_of(config)
    try:
        last = _last_lines(path, lost) if path and lost else {}
    except OSError:
        return tuple(lost)
    return tuple(_restored(one, last.get(os.fsencode(one.id), ())) for one in lost)


def _last_lines(path: str, lost: Iterable[Lease]) -> dict[bytes, tuple[bytes, ...]]:
    """Map containers of this boot to their last two lines, since a crash can have cut the last one short."""
    boot = f'"boot":{json.dumps(procs.boot_id())}'.encode()
    last: dict[bytes, tuple[bytes, ...]] = {os.fsencode(one.id): () for one in lost}
    for line in _lines(path, _MOST_RESTORED):
        before, _, after = line.partition(_ID)
        container_id = after.partition(b'"')[0]
        if container_id in last and boot in before:
            last[container_id] = (*last[container_id][-1:], line)
    return last


def _restored(lease: Lease, lines: Sequence[bytes]) -> Lease:
    for line in reversed(lines):
        try:
            last = _entry(line)
        except _UNREADABLE:
            continue
        if last.what == END or [one.uuid for one in last.shares] != [share.device.uuid for share in lease.shares]:
            break
        shares = tuple(
            share._replace(granted_ns=one.account.granted_ns, granted_byte_ns=one.account.granted_byte_ns)
            for share, one in zip(lease.shares, last.shares)
        )
        labels = {name: getattr(last, name) for name in _LABELS}
        return lease._replace(shares=shares, began_ns=last.began_ns, counted_ns=last.end_ns, **labels)
    return lease
