"""Rules for what a mount may cover, and the errors for what it may not (start path). Pure."""

from __future__ import annotations

import stat
from collections.abc import Callable

from ..core.errors import KernelError
from ..core.quoting import shown

# Directories below which the target of a link may be covered: prefix, and the rest of its first component
_LIBRARY_DIRS = (
    ("/lib", ("", "32", "64", "x32")),
    ("/usr/lib", ("", "32", "64", "x32")),
    ("/usr/local/lib", ("", "32", "64")),
    ("/usr/local/cuda", None),  # any version
    ("/opt/cuda", None),
)

# kind of mount -> test of its source
SOURCES: dict[str, Callable[[int], bool]] = {"file": stat.S_ISREG, "dir": stat.S_ISDIR, "socket": stat.S_ISSOCK}
# kind of mount -> file types that it can cover
_ACCEPTED: dict[str, tuple[Callable[[int], bool], ...]] = {
    "file": (stat.S_ISREG,),
    "dir": (stat.S_ISDIR,),
    "socket": (stat.S_ISREG, stat.S_ISSOCK),
    "device": (stat.S_ISREG, stat.S_ISCHR),
}
_TYPES = (
    (stat.S_ISREG, "a regular file"),
    (stat.S_ISDIR, "a folder"),  # docker exits with 126 if an error contains the kernel's "is a directory"
    (stat.S_ISLNK, "a link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def type_name(mode: int) -> str:
    return next((name for test, name in _TYPES if test(mode)), "of an unknown type")


def is_library_path(path: str) -> bool:
    """Return whether a resolved `path` is below a library directory, where the target of a link may be covered."""
    for directory, suffixes in _LIBRARY_DIRS:
        if path.startswith(directory):
            rest, slash, _ = path[len(directory) :].partition("/")
            if slash and (suffixes is None or rest in suffixes):
                return True
    return False


def accepts(kind: str, mode: int) -> bool:
    """Return whether a mount of `kind` can cover a file of this type."""
    return any(test(mode) for test in _ACCEPTED[kind])


def wrong_type(path: str, kind: str, mode: int) -> KernelError:
    wanted = "a directory" if kind == "dir" else "a file"
    return KernelError(f"{shown(path)} is {type_name(mode)} where {wanted} must be", "remove it from the image")


def not_a_library(path: str, real: str) -> KernelError:
    return KernelError(
        f"{shown(path)} is a link to {shown(real)}, which is not in a library directory", "remove it from the image"
    )


def in_volume(path: str, point: str, host: str) -> KernelError:
    return KernelError(
        f"{shown(path)} would be created in the volume at {shown(point)} (on the host: {shown(host)})",
        "mount the volume elsewhere, or create it there, empty",
    )


def in_shared_volume(path: str, point: str, host: str) -> KernelError:
    return KernelError(
        f"{shown(path)} would appear on the host as well: the volume at {shown(point)} "
        f"(on the host: {shown(host)}) has shared mount propagation",
        "mount the volume as rslave or rprivate, or elsewhere",
    )
