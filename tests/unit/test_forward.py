"""Forward compatibility: which driver files of an image count, and that two versions are never mixed."""

from __future__ import annotations

import os

import pytest
from gpushare.core.model import Image
from gpushare.gpu import forward
from gpushare.gpu.drivertable import COMPAT

from tests.unit import pure
from tests.unit.test_rootfs import Tree, debian, tree  # noqa: F401  fixtures

DIRECTORY = "/usr/local/cuda-12.4/compat"
NEWER = "550.54.15"
SHARES = (pure.share(0, 0, 1 << 30),)


def library(image: Tree, stem: str, version: str = NEWER, directory: str = DIRECTORY) -> None:
    image.library(f"{directory}/{stem}.so.{version}", f"{stem}.so.1")


def test_files_of_one_version_are_found(debian: Tree) -> None:  # noqa: F811
    for stem in COMPAT:
        library(debian, stem)
    library(debian, "libnvidia-nvvm", "545.1.1")
    debian.link("/usr/local/cuda", "cuda-12.4")
    found = debian.probe()
    assert found.compat_version == NEWER
    assert found.compat_files == tuple((stem, f"{DIRECTORY}/{stem}.so.{NEWER}") for stem in COMPAT)


def test_newest_version_is_selected(debian: Tree) -> None:  # noqa: F811
    for version, directory in (("550.9.1", "cuda-12.4"), ("550.54.15", "cuda-12.5"), ("545.99", "cuda-12.3")):
        library(debian, "libcuda", version, f"/usr/local/{directory}/compat")
    library(debian, "libcudadebugger", "550.9.1", "/usr/local/cuda-12.5/compat")
    found = debian.probe()
    assert found.compat_files == (("libcuda", "/usr/local/cuda-12.5/compat/libcuda.so.550.54.15"),)


@pytest.mark.parametrize("kind", ["link", "link out", "fifo", "text", "other machine", "odd version"])
def test_link_or_non_library_is_ignored(debian: Tree, kind: str) -> None:  # noqa: F811
    path = f"{DIRECTORY}/libcuda.so.{NEWER}"
    debian.library("/opt/libcuda.so.1")
    if kind.startswith("link"):
        debian.link(path, "/opt/libcuda.so.1" if kind == "link" else "/etc/shadow")
    elif kind == "fifo":
        (debian.path / DIRECTORY[1:]).mkdir(parents=True)
        os.mkfifo(debian.path / path[1:])
    elif kind == "text":
        debian.write(path, b"#!/bin/sh")
    elif kind == "other machine":
        debian.library(path, "libcuda.so.1", machine="i386")
    else:
        debian.library(f"{DIRECTORY}/libcuda.so.1x.2", "libcuda.so.1")
    assert debian.probe().compat_files == ()


def test_linked_directory_is_reported_by_real_path(debian: Tree) -> None:  # noqa: F811
    debian.link("/usr/local/cuda-12.4", "/opt/cuda")
    library(debian, "libcuda", directory="/opt/cuda/compat")
    assert dict(debian.probe().compat_files) == {"libcuda": f"/opt/cuda/compat/libcuda.so.{NEWER}"}


def image(version: str, *stems: str) -> Image:
    files = tuple((stem, f"{DIRECTORY}/{stem}.so.{version}") for stem in stems)
    return pure.image(compat_version=version, compat_files=files)


@pytest.mark.parametrize("version", ["535.999.1", "470.1.1", ""])
def test_same_or_older_branch_is_not_used(version: str) -> None:
    notes: list[str] = []
    assert forward.newest(pure.files(), image(version, "libcuda"), SHARES, notes) == pure.files()
    assert notes == []


def test_image_libraries_replace_host_libraries() -> None:
    notes: list[str] = []
    hosts = pure.files(libraries=(pure.library("libnvidia-nvvm", "so.4"), pure.library("libnvidia-gpucomp")))
    found = forward.newest(hosts, image(NEWER, "libcuda", "libnvidia-ptxjitcompiler"), SHARES, notes)
    assert found.cuda.in_image and found.cuda.links == (
        ("libcuda.so.1", f"libcuda.so.{NEWER}"),
        ("libcuda.so", "libcuda.so.1"),
    )
    assert [(one.stem, one.in_image) for one in found.libraries] == [
        ("libnvidia-ptxjitcompiler", True),
        ("libnvidia-gpucomp", False),
    ]
    assert found.nvml == hosts.nvml
    assert "libnvidia-nvvm: not in the image's compat directory" in notes[1]


def test_without_compute_only_shim_uses_image_libcuda() -> None:
    hosts = pure.files(libraries=(), asked_cuda=False)
    found = forward.newest(hosts, image(NEWER, *COMPAT), SHARES, [])
    assert found.cuda.in_image and found.libraries == ()


def test_unsupported_brand_keeps_host_files() -> None:
    notes: list[str] = []
    shares = (SHARES[0]._replace(device=pure.device(0, brand="geforce")),)
    assert forward.newest(pure.files(), image(NEWER, "libcuda"), shares, notes) == pure.files()
    assert "brand geforce has no forward compatibility" in notes[0]
