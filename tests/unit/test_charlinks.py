"""Links in /dev/char: each node of NVIDIA's has one, udev's and the toolkit's stay."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from gpushare.gpu import charlinks

NODES = {"nvidia0": (195, 0), "nvidia1": (195, 1), "nvidiactl": (195, 255), "nvidia-caps/nvidia-cap1": (240, 1)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, (major, minor) in {**NODES, "null": (1, 3)}.items():
        (tmp_path / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        os.mknod(tmp_path / "dev" / name, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
    (tmp_path / "dev/nvidia-plain").write_text("")
    (tmp_path / "dev/char").mkdir()
    return tmp_path


def test_links_are_made_once_and_lead_to_the_devices(root: Path) -> None:
    directory = str(root / "dev/char")
    made = charlinks.make(str(root), directory)
    assert sorted(made) == sorted(f"{directory}/{major}:{minor}" for major, minor in NODES.values())
    for name, (major, minor) in NODES.items():
        assert os.readlink(f"{directory}/{major}:{minor}") == str(root / "dev" / name)
        assert os.stat(f"{directory}/{major}:{minor}").st_rdev == os.makedev(major, minor)
    assert (charlinks.missing(str(root), directory), charlinks.make(str(root), directory)) == ({}, [])


def test_links_of_others_stay_and_wrong_ones_are_replaced(root: Path) -> None:
    directory = root / "dev/char"
    (directory / "195:0").symlink_to("../nvidia0")  # as NVIDIA's toolkit makes them
    (directory / "1:3").symlink_to("../null")
    (directory / "195:1").symlink_to("../nvidia0")
    (directory / "195:255").symlink_to("../gone")
    assert len(charlinks.make(str(root), str(directory))) == 3
    assert os.readlink(directory / "195:0") == "../nvidia0"
    assert os.stat(directory / "195:1").st_rdev == os.makedev(195, 1)
    assert charlinks.ours(str(directory)) == ["195:1", "195:255", "240:1"]


def test_host_without_udev_gets_no_links(root: Path) -> None:
    (root / "dev/char").rmdir()
    assert charlinks.make(str(root), str(root / "dev/char")) == []
    assert not (root / "dev/char").exists() and charlinks.ours(str(root / "dev/char")) == []
