"""elf.py on the host's own libraries, on generated headers, and on damaged files, which must be "not a library". The
target `elf` of tests/fuzz has any bytes."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Optional

import pytest
from gpushare.system import elf

MACHINE_CODES = {"x86_64": 62, "aarch64": 183, "i386": 3}


def shared_object(soname: str, machine: str = "x86_64", kind: int = 3) -> bytes:
    """A minimal 64-bit ELF: one PT_LOAD over the file, one PT_DYNAMIC with DT_STRTAB and DT_SONAME."""
    strings = b"\0" + soname.encode() + b"\0"
    dynamic = struct.pack("<qQqQqQ", 5, 0x1000 + 224, 14, 1, 0, 0)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", kind, MACHINE_CODES[machine], 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0
    )
    size = 224 + len(strings)
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, 0x1000, 0x1000, size, size, 0x1000)
    dyn = struct.pack("<IIQQQQQQ", 2, 6, 176, 0x1000 + 176, 0, len(dynamic), len(dynamic), 8)
    return header + load + dyn + dynamic + strings


def read(tmp_path: Path, data: bytes) -> Optional[elf.Library]:
    path = tmp_path / "file"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    try:
        return elf.read_library(fd)
    finally:
        os.close(fd)


def test_libc_of_this_host_is_read() -> None:
    with open("/proc/self/maps") as maps:
        path = next(line.split()[-1] for line in maps if "libc.so.6" in line or "libc-2" in line)
    fd = os.open(path, os.O_RDONLY)
    try:
        assert elf.read_library(fd) == elf.Library(os.uname().machine, "libc.so.6")
    finally:
        os.close(fd)


@pytest.mark.parametrize("machine", sorted(MACHINE_CODES))
def test_machine_and_soname_are_read(tmp_path: Path, machine: str) -> None:
    assert read(tmp_path, shared_object("libcuda.so.1", machine)) == elf.Library(machine, "libcuda.so.1")


def test_executable_or_text_is_not_library(tmp_path: Path) -> None:
    assert read(tmp_path, shared_object("x", kind=2)) is None
    assert read(tmp_path, b"#!/bin/sh\n") is None
    assert read(tmp_path, b"") is None


def test_unterminated_soname_is_empty(tmp_path: Path) -> None:
    data = shared_object("x" * 40)[:-1]
    assert read(tmp_path, data) == elf.Library("x86_64", "")


def test_huge_size_in_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(shared_object("libcuda.so.1"))
    struct.pack_into("<Q", data, 64 + 56 + 32, 1 << 62)  # PT_DYNAMIC's file size
    asked = []
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: (asked.append(size), real(fd, size, at))[1])
    read(tmp_path, bytes(data))
    assert max(asked) <= 64 << 10
