"""Read the machine and the DT_SONAME of an ELF file. The file is untrusted: every read is bounded, and a malformed
file counts as "not a library" (None), never as an error. Layout: System V gABI, elf(5).

    header_of(head)    -> Header | None     class and machine, from the first HEADER_BYTES bytes of a file
    number_of(machine) -> bytes             the machine as in that header
    read_library(fd)   -> Library | None    machine and soname of a shared object
"""

import os
import struct
from typing import NamedTuple, Optional

MACHINES = {62: "x86_64", 183: "aarch64", 3: "i386", 40: "arm"}  # e_machine

_MAX_HEADERS = 128  # program headers; real libraries have about ten
_MAX_DYNAMIC = 64 << 10  # bytes of PT_DYNAMIC that are read
_MAX_NAME = 256
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_STRTAB, _DT_SONAME = 0, 5, 14

HEADER_BYTES = 20  # up to e_machine


class Header(NamedTuple):
    """The begin of an ELF header."""

    bits: int  # 32 or 64
    machine: str  # "" when it is not in MACHINES


class Library(NamedTuple):
    """A shared object (ET_DYN): `soname` is "" when it has none."""

    machine: str  # "" when it is not in MACHINES
    soname: str


class _Layout(NamedTuple):
    header: struct.Struct  # from byte 16 of the file on
    segment: struct.Struct
    fields: tuple[int, int, int, int]  # of a segment: type, offset, vaddr, filesz
    dynamic: struct.Struct


_CLASS32 = _Layout(struct.Struct("<HHIIIIIHHH"), struct.Struct("<8I"), (0, 1, 2, 4), struct.Struct("<iI"))
_CLASS64 = _Layout(struct.Struct("<HHIQQQIHHH"), struct.Struct("<IIQQQQQQ"), (0, 2, 3, 5), struct.Struct("<qQ"))
CLASS32, CLASS64 = b"\x7fELF\x01\x01", b"\x7fELF\x02\x01"  # little-endian, as every GPU driver is
_LAYOUTS = {CLASS32: _CLASS32, CLASS64: _CLASS64}


def header_of(head: bytes) -> Optional[Header]:
    """Return the header of the file that begins with `head`; None when it is no little-endian ELF file."""
    if len(head) < HEADER_BYTES or head[:6] not in _LAYOUTS:
        return None
    machine = MACHINES.get(head[18] | head[19] << 8, "")
    return Header(32 * head[4], machine)


def number_of(machine: str) -> bytes:
    """Return e_machine of a name in MACHINES, as in a header; b"" for another name."""
    for number, name in MACHINES.items():
        if name == machine:
            return number.to_bytes(2, "little")
    return b""


def read_library(fd: int) -> Optional[Library]:
    """Machine and soname of the shared object open at `fd`; None when it is not a (little-endian) shared object."""
    try:
        return _read(fd)
    except (OSError, struct.error, OverflowError, ValueError):
        return None


def _read(fd: int) -> Optional[Library]:
    head = os.pread(fd, 64, 0)
    layout = _LAYOUTS.get(head[:6])
    if layout is None:
        return None
    kind, machine, _, _, phoff, _, _, _, entry_size, count = layout.header.unpack_from(head, 16)
    if kind != 3 or entry_size != layout.segment.size or count > _MAX_HEADERS:  # 3: ET_DYN
        return None
    table = os.pread(fd, entry_size * count, phoff)
    segments = []
    for raw in layout.segment.iter_unpack(table):
        segments.append(tuple(raw[i] for i in layout.fields))
    return Library(MACHINES.get(machine, ""), _soname(fd, layout, segments))


def _soname(fd: int, layout: _Layout, segments: list[tuple[int, ...]]) -> str:
    found: dict[int, int] = {}
    for kind, offset, _, size in segments:
        if kind == _PT_DYNAMIC:
            data = os.pread(fd, min(size, _MAX_DYNAMIC), offset)
            whole = len(data) - len(data) % layout.dynamic.size
            for tag, value in layout.dynamic.iter_unpack(data[:whole]):
                if tag == _DT_NULL:
                    break
                found.setdefault(tag, value)
            break
    if _DT_SONAME not in found or _DT_STRTAB not in found:
        return ""
    address = found[_DT_STRTAB] + found[_DT_SONAME]
    for kind, offset, start, size in segments:
        if kind == _PT_LOAD and start <= address < start + size:
            name, end, _ = os.pread(fd, _MAX_NAME, offset + address - start).partition(b"\0")
            return name.decode("utf-8", "surrogateescape") if end else ""
    return ""
