"""Read single files and directories of an image: by descriptor, in-root, bounded (start path).

read_all(path_fd, limit)       -> bytes
library_at(root, path)         -> (real path, Library)            ("", None) when there is no regular file
directory(root, path)          -> str                             real path; "" when it is no directory
names_in(root, path)           -> list[str]                       sorted, [] when it is no directory
present(root, path, names)     -> list[str]                       those of `names` in a directory, by one look-up
matches(root, path, names)     -> list[str]                       paths below, one name or * for each level
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import islice
from typing import Union

from ..core.errors import is_exhausted
from . import elf, inroot

MAX_NAMES = 4096  # of one directory


def read_all(path_fd: int, limit: int) -> bytes:
    """Read at most `limit` bytes of the regular file that an O_PATH descriptor names. By pread: if the file is
    truncated meanwhile, the result is only shorter."""
    fd = inroot.reopen(path_fd)
    try:
        parts = []
        total = 0
        while total < limit:
            part = os.pread(fd, min(1 << 20, limit - total), total)
            if not part:
                break
            parts.append(part)
            total += len(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def library_at(root: inroot.Root, path: str) -> tuple[str, Union[elf.Library, None]]:
    """(real path in-root, library there or None); ("", None) when there is no regular file."""
    fd = inroot.open_regular(root, path)
    if fd < 0:
        return "", None
    try:
        return inroot.path_of(root, fd), elf.read_library(fd)
    finally:
        os.close(fd)


def directory(root: inroot.Root, path: str) -> str:
    """The real in-root path of a directory, through links (/lib -> /usr/lib); "" when it is no directory."""
    fd = inroot.exists(root, path, os.O_PATH | os.O_DIRECTORY)
    if fd < 0:
        return ""
    try:
        return inroot.path_of(root, fd)
    finally:
        os.close(fd)


def names_in(root: inroot.Root, path: str, limit: int = MAX_NAMES) -> list[str]:
    """At most `limit` names in a directory, sorted; [] when it is no directory."""
    fd = inroot.exists(root, path, os.O_PATH | os.O_DIRECTORY)
    if fd < 0:
        return []
    try:
        readable = inroot.reopen(fd, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(readable) as entries:
                names = [entry.name for entry in islice(entries, limit)]
        finally:
            os.close(readable)
    except OSError as error:
        if is_exhausted(error):
            raise
        return []
    finally:
        os.close(fd)
    return sorted(names)


def present(root: inroot.Root, path: str, names: Iterable[str]) -> list[str]:
    """Those of `names` that a directory has, links included; [] when it is no directory. The path is looked up once:
    most of the places where a driver could be have none."""
    fd = inroot.exists(root, path, os.O_PATH | os.O_DIRECTORY)
    if fd < 0:
        return []
    mounted = root.mounted_in(fd) if isinstance(root, inroot.View) else ()
    try:
        return [name for name in names if os.access(name, os.F_OK, dir_fd=fd, follow_symlinks=False) or name in mounted]
    finally:
        os.close(fd)


def matches(root: inroot.Root, path: str, names: tuple[str, ...], limit: int = 64) -> list[str]:
    """At most `limit` paths below a directory; each level is a name, or * for any. The last is not looked up."""
    found = [path]
    for name in names:
        found = [
            f"{one}/{below}" for one in found for below in ([name] if name != "*" else names_in(root, one, limit))
        ][:limit]
    return found
