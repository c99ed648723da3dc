"""Choose the driver's own file where several directories have a file of its name.

    new(root, version, ...)            -> Search   one search; `skipped` collects the files that are not used
    first(search, paths, kind, stem)   -> str      real path of the first usable file, "" if there is none
    plain_file(search, path)           -> str      real path of a file that is not empty, "" if there is none
    why_not(search, name)              -> str      the skipped files of a name, for an error message
    has_version(path, version)         -> bool     whether a program contains the string of a driver version

Hosts have other files under the driver's names: a script in /usr/bin that executes the program elsewhere, a linker
script, a 32-bit library, an empty file after an interrupted installation, a link to another version. In a container
such a script finds no program, and such a library cannot be loaded. So a file must have the ELF header of a program or
library for this machine. Each start reads the headers of the files that it uses: a result in node.json would be wrong
after the administrator replaced a file.

Runs on the start path.
"""

import os
import stat
from collections.abc import Iterable
from typing import NamedTuple

from ..core.errors import is_exhausted
from ..system import elf
from .driverroot import in_root

_ENOENT, _ENOTDIR, _ELOOP = 2, 20, 40  # errno
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_EXECUTABLE, _SHARED = b"\2\0", b"\3\0"  # e_type
_MAX_PROGRAM = 64 << 20  # bytes; nvidia-smi has less than one MiB
_32_BIT = {"x86_64": "i386", "aarch64": "arm"}  # machine of the kernel -> of its 32-bit programs
_TYPES = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Kind(NamedTuple):
    """A kind of ELF file, as its header shows it."""

    name: str
    types: tuple[bytes, ...]
    begin: bytes = elf.CLASS64
    bits: int = 64


LIBRARY = Kind("library", (_SHARED,))
LIBRARY_32 = Kind("library", (_SHARED,), elf.CLASS32, 32)
PROGRAM = Kind("program", (_EXECUTABLE, _SHARED))


class Skipped(NamedTuple):
    """A file that has the name of a driver file and is not used. `why` follows "is": "a script"."""

    path: str
    why: str


class Search(NamedTuple):
    """One search for the files of a driver version below a driver root."""

    root: str
    version: str
    stale: tuple[str, ...]  # programs of another version, see Inventory.stale_programs
    thorough: bool  # also examine the files after the first usable one, to report them
    machine: str
    number: bytes  # e_machine of this machine
    known: dict[str, str]  # path -> real path, "" if the file is not usable
    places: dict[str, bool]  # for in_root
    skipped: list[Skipped]


def new(root: str, version: str, stale: tuple[str, ...] = (), thorough: bool = False) -> Search:
    """Begin a search."""
    machine = os.uname().machine
    return Search(root, version, stale, thorough, machine, elf.number_of(machine), {}, {}, [])


def first(search: Search, paths: Iterable[str], kind: Kind, stem: str = "") -> str:
    """Return the real path of the first usable file, "" if there is none. A stale program is used only if there is no
    other. `stem`: the files are libraries `<stem>.so.<version>`, and a link must not lead to another version."""
    found = other = ""
    for path in paths:
        real = _usable(search, path, kind, stem)
        if real in search.stale:
            other = other or real
        elif real:
            found = found or real
            if not search.thorough:
                break
    if found and other:
        _skip(search, other, f"a program of another driver than {search.version}")
    return found or other


def why_not(search: Search, name: str) -> str:
    """Return the skipped files with this name and their reasons: ": <path> is an empty file"; "" if there are none."""
    reasons = ", ".join(f"{one.path} is {one.why}" for one in search.skipped if one.path.endswith(f"/{name}"))
    return f": {reasons}" if reasons else ""


def plain_file(search: Search, path: str) -> str:
    """Return the real path of a regular file that is not empty; "" if there is none."""
    try:
        status, real = os.lstat(path), path
        if stat.S_ISLNK(status.st_mode):
            real = _in_root(search, path)
            status = os.lstat(real)
    except OSError:
        return ""
    return real if stat.S_ISREG(status.st_mode) and status.st_size else ""


def _skip(search: Search, path: str, why: str) -> None:
    one = Skipped(path, why)
    if one not in search.skipped:
        search.skipped.append(one)


def _usable(search: Search, path: str, kind: Kind, stem: str) -> str:
    """Return the real path of a usable file, "" for any other. A bind mount would follow a link out of the root."""
    if path not in search.known:
        real, why = _examined(search, path, kind, stem)
        if why:
            _skip(search, path, why)
        search.known[path] = "" if why else real
    return search.known[path]


def _examined(search: Search, path: str, kind: Kind, stem: str) -> tuple[str, str]:
    """Return (real path, "") or ("", why the file is not used); ("", "") if there is no file."""
    real = path
    try:
        head = _head(path, os.O_NOFOLLOW)
    except OSError as error:
        if is_exhausted(error):
            raise
        if error.errno in (_ENOENT, _ENOTDIR):
            return "", ""
        head = b""
        if error.errno == _ELOOP:
            real = _in_root(search, path)
            name = os.path.basename(real)
            if not real:
                return "", "a link to a missing file"
            if stem and _version(name, stem) not in ("", search.version):
                return "", f"a link to {name}"
            head = _readable(real)
    if head[:6] == kind.begin and head[16:18] in kind.types and head[18:] == _number(search, kind):
        return real, ""
    why = _why(real, head, kind)
    return ("" if why else real), why


def _in_root(search: Search, path: str) -> str:
    return in_root(search.root, path[len(search.root) :], search.places) or ""


def _head(path: str, flags: int = 0) -> bytes:
    fd = os.open(path, _FLAGS | flags)
    try:
        return os.read(fd, elf.HEADER_BYTES)
    except IsADirectoryError:
        return b""
    finally:
        os.close(fd)


def _readable(path: str) -> bytes:
    """Return the header; b"" if it cannot be read."""
    try:
        return _head(path)
    except OSError as error:
        if is_exhausted(error):
            raise
        return b""


def _version(name: str, stem: str) -> str:
    """Return the driver version in the name of a library; "" if it has none: libcuda.so.1."""
    ending = name[len(stem) + 4 :] if name.startswith(f"{stem}.so.") else ""
    return ending if "." in ending and ending.replace(".", "").isdigit() else ""


def _number(search: Search, kind: Kind) -> bytes:
    return search.number if kind.bits == 64 else elf.number_of(_32_BIT.get(search.machine, ""))


def _why(path: str, head: bytes, kind: Kind) -> str:
    """Return why a file does not fit; "" for a regular file whose content this user may not read."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return _TYPES.get(stat.S_IFMT(status.st_mode), "no regular file")
        if not status.st_size:
            return "an empty file"
        if not head:
            return "" if not os.access(path, os.R_OK) else "a file that cannot be read"
    except OSError as error:
        return f"a file that cannot be read ({error.strerror})"
    header = elf.header_of(head)
    if head.startswith(b"#!"):
        return "a script"
    if header is None:
        return "no ELF file (a linker script or damaged)" if kind.name == "library" else "no ELF file"
    if header.bits != kind.bits:
        return f"a {header.bits}-bit {kind.name}"
    if head[16:18] not in kind.types:
        return f"an ELF file that is no {kind.name}"
    return f"a {kind.name} for {header.machine or 'another machine'}"


def has_version(path: str, version: str) -> bool:
    """Return whether a program contains the string of a driver version. Reads the whole file."""
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_PROGRAM)
    except OSError:
        return False
    wanted = version.encode()
    at = content.find(wanted)
    while at >= 0:
        end = at + len(wanted)
        if not any(byte in b"0123456789." for byte in (content[at - 1 : at] if at else b"") + content[end : end + 1]):
            return True
        at = content.find(wanted, at + 1)
    return False
