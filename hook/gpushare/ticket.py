"""containers/<id>/adopt: what the launcher does as the createRuntime hook, so that Python starts once and not twice
(start path).

    write(state_dir, bundle, lease, record, tree, log, hider)    writes it when the launcher can do all that is left

The file is words, each ended by a NUL:

    version, bundle, root.path, "<creator pid> <its start time>"
    where, facts                       of the line that release.c writes: decision.py
    "page" uuid number                 its page file, which goes when the lease does (release.c)
    "mount" device inode target        once for each mount of config.json: what must be at `target` by now
    "mask"                             containers/<id>/proc stands over /proc/driver/nvidia, where there is one
    "then"                             the lease is held from here on
    "bind" device inode attributes target source     a mount to make; the inode is of `source`
    "link" target text                 a name that is not there yet, or is this very link
    "cache" inode size seconds nanoseconds     of the image's ld.so.cache; the new one is in containers/<id>/ld.so.cache
    "end"

It is only ever a shorter way: without it, or when anything is not as it says, adopt.py does the work from the record in
config.json. Nothing is written for what the launcher cannot do: copies of image files, covers. Nor is anything that an
image made large: the state directory is one for all containers. The cache goes as soon as it was used.
"""

from __future__ import annotations

import os
import stat
from typing import Any, Optional

from . import decision, idmap, imagefiles, inroot, ldcache, linux, mountrules, procmask, rootfs, storage
from .applied import Record
from .model import Bundle, LdEntry, Lease
from .ops import DEVICE_FLAGS, DeviceNode

FILE = "adopt"
CACHE = storage.CACHE
PROC = "proc"
VERSION = "gpushare-adopt-5"
# Of each container, for as long as its start takes and as long as it lives: 1000 of them must fit (storage.prepare)
MAX_CACHE_BYTES = 128 << 10  # one of 500 libraries has 40 KiB
MAX_BYTES = 64 << 10


def write(
    state_dir: str, bundle: Bundle, lease: Lease, record: Record, tree: inroot.View, log: str, hider: idmap.Hider
) -> None:
    """Never raises for what only costs time, as a full state directory does. The caller owns containers/<id>."""
    folder = storage.container_dir(state_dir, bundle.id)
    try:
        words = _words(bundle, lease, record, tree, folder, log, hider)
        data = b"".join(os.fsencode(word) + b"\0" for word in words or ())
        if words is not None and len(data) <= MAX_BYTES and not any("\0" in word for word in words):
            return _create(os.path.join(folder, FILE), data)
    except OSError:
        pass
    for name in (FILE, CACHE):
        try:
            os.unlink(os.path.join(folder, name))
        except FileNotFoundError:
            pass
    return None


def _words(
    bundle: Bundle, lease: Lease, record: Record, tree: inroot.View, folder: str, log: str, hider: idmap.Hider
) -> Optional[list[str]]:
    """None: not for the launcher."""
    before = [VERSION, bundle.path, bundle.rootfs, f"{lease.creator_pid} {lease.creator_start}"]
    before += [log, decision.facts(lease)]
    for share in lease.shares:  # first, where the launcher looks for them at the end
        before += ["page", share.device.uuid, str(share.page)]
    after = ["then"]
    below: list[str] = []  # how paths below its mounts begin
    for kind, *fields in record.ops:
        if kind == "Mount":
            target, source = fields[0], fields[1]
            status = os.stat(source)
            before += ["mount", str(status.st_dev), str(status.st_ino), target]
        elif kind in ("Bind", "Device"):
            target, words = _bind(kind, fields, hider)
            if words is None or target.startswith(tuple(below)):
                return None  # in the launcher all mounts are made at once
            below.append(target + "/")
            after += words
        elif kind == "Link":
            after += ["link", fields[0], fields[1]]
        elif kind == "LdCache":
            words = _cache(tree, [LdEntry(*entry) for entry in fields[0]], folder)
            if words is None:
                return None
            after += words
        elif kind == "ProcMask":
            words = _mask(fields[0], fields[1], folder)
            if words is None:
                return None
            before += words
        else:
            return None
    return [*before, *after, "end"]


def _bind(kind: str, fields: list[Any], hider: idmap.Hider) -> tuple[str, Optional[list[str]]]:
    """(target, words for a mount that the launcher makes); no words where apply.py would refuse the source."""
    hidden = 0
    if kind == "Bind":
        target, source, what, flags = fields
        status = os.stat(source)
        hidden = hider.attributes(target, what, flags, status)
        right = mountrules.SOURCES[what](status.st_mode)
    else:
        op = DeviceNode(*fields)
        target, source, flags = op.target, op.source, DEVICE_FLAGS[op.simulated]
        status = os.stat(source)
        real = stat.S_ISCHR(status.st_mode) and status.st_rdev == os.makedev(op.major, op.minor)
        right = stat.S_ISREG(status.st_mode) if op.simulated else real
    attributes = sum(linux.ATTRIBUTES[flag] for flag in flags)
    numbers = (status.st_dev, status.st_ino, attributes | hidden)
    return target, ["bind", *map(str, numbers), target, source] if right else None


def _mask(bus_ids: list[str], capabilities: list[str], folder: str) -> Optional[list[str]]:
    """Puts the mask's files beside the ticket; no words where the kernel has no NVIDIA driver."""
    try:
        made = procmask.prepare(os.path.join(folder, PROC), tuple(bus_ids), tuple(capabilities))
    except OSError:
        return None  # the hook finds out what is wrong, and says so
    return ["mask"] if made else []


def _cache(tree: inroot.View, entries: list[LdEntry], folder: str) -> Optional[list[str]]:
    """Writes the new cache beside the ticket; no words when the old one is right already."""
    try:
        fd = inroot.open_in(tree, rootfs.LD_CACHE, os.O_PATH | os.O_NOFOLLOW)
    except linux.SyscallError:
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or inroot.is_mounted_over(tree, fd):
            return None
        old = imagefiles.read_all(fd, ldcache.MAX_BYTES)
        new = ldcache.render(ldcache.extended(ldcache.parse(old), entries))
    except (OSError, ldcache.MalformedCache):
        return None
    finally:
        os.close(fd)
    if new == old:
        return []
    if len(new) > MAX_CACHE_BYTES:
        return None
    _create(os.path.join(folder, CACHE), new)
    seconds, nanoseconds = divmod(status.st_mtime_ns, 10**9)
    return ["cache", *map(str, (status.st_ino, status.st_size, seconds, nanoseconds))]


def _create(path: str, data: bytes) -> None:
    """Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        storage.write_all(fd, data)
    finally:
        os.close(fd)
