"""Facts about an ELF file, from binutils."""

from __future__ import annotations

import re
from pathlib import Path

from .rootfs import run

X86_64, AARCH64 = "Advanced Micro Devices X86-64", "AArch64"


def machine(path: Path) -> str:
    match = re.search(r"Machine: +(.*)", run("readelf", "--file-header", path))
    assert match, path
    return match[1].strip()


def glibc(path: Path) -> tuple[int, ...]:
    """The newest glibc version of the symbols that it needs."""
    names = re.findall(r"Name: GLIBC_([0-9.]+)", run("readelf", "--version-info", path))
    assert names, f"{path} needs no C library"
    return max(tuple(map(int, name.split("."))) for name in names)
