"""Write the loader's cache of a container: a new file beside the old one, then a rename. A bind mount would break
`ldconfig` and every package manager in the container, which replace the file by rename."""

from __future__ import annotations

import os
import stat

from ..core.model import LdEntry
from ..system import ldcache, syscalls
from . import mountpoint, rootfs

TEMPORARY = ".ld.so.cache.gpushare"  # a fixed name, so that the next start removes one left by a killed start


def extend(root: mountpoint.Root, entries: tuple[LdEntry, ...]) -> None:
    """Add `entries` to the container's cache. If the file is not clearly the image's own, leave it and add a note."""
    old = root.lookup(rootfs.LD_CACHE, os.O_PATH | os.O_NOFOLLOW)
    if old < 0:
        root.notes.append(f"loader cache not extended: no {rootfs.LD_CACHE} in the image")
        return
    before, cache, note = rootfs.parsed_cache(root.fd, old)
    if cache is None or note:
        root.notes.append(f"loader cache not extended: {note}")
        return
    dir_fd, name = root.parent(rootfs.LD_CACHE)
    status = os.fstat(old)
    try:
        content = ldcache.render(ldcache.extended(cache, entries))
    except ldcache.MalformedCache as error:
        root.notes.append(f"loader cache not extended: {error}")
        return
    try:
        _write(dir_fd, name, content, status)
    except OSError as error:
        raise syscalls.from_os_error(error, "write", rootfs.LD_CACHE) from None
    root.undo.append(lambda: _write(dir_fd, name, before, status))


def _write(dir_fd: int, name: str, content: bytes, status: os.stat_result) -> None:
    try:
        os.unlink(TEMPORARY, dir_fd=dir_fd)
    except FileNotFoundError:
        pass
    flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC
    fd = os.open(TEMPORARY, flags, 0o600, dir_fd=dir_fd)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.fchown(fd, status.st_uid, status.st_gid)
        os.fchmod(fd, stat.S_IMODE(status.st_mode))
        os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))
        os.rename(TEMPORARY, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        try:
            os.unlink(TEMPORARY, dir_fd=dir_fd)
        except FileNotFoundError:
            pass
        raise
    finally:
        os.close(fd)
