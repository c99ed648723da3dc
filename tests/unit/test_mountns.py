"""The mount table with arbitrary names: any user who may mount chooses some of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from gpushare.system import mountns

NAMES = ["a\rb", "a\nb", "a b\tc", "a\\040b", "a\r36 35 0:1 / /proc rw - proc proc rw", "\N{SNOWMAN}\u2028\x85"]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_odd_mount_point_is_one_entry(tmp_path: Path, name: str) -> None:
    before = len(mountns.read_mounts())
    point = tmp_path / name.replace("/", "-")
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "gpushare-test", point], check=True)
    try:
        entries = mountns.read_mounts()
        assert len(entries) == before + 1
        assert [entry.fstype for entry in entries if entry.point == str(point)] == ["tmpfs"]
    finally:
        subprocess.run(["umount", point], check=True)
