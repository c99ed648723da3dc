"""The files for tests of apply.py: a container's root, the host's sources, and a host directory that attacks aim at."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpushare.core.ops import Mount

from tests.integration import ns_util

LIBDIR = ns_util.LIBDIR
NAME = f"{LIBDIR}/libcuda.so.535.1"
RO = ("ro", "nosuid", "nodev")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ns_util.make_image(tmp_path_factory.mktemp("base") / "rootfs")


@pytest.fixture
def image(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "rootfs", symlinks=True))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The host's sources: a share directory, a tenant's directory, libraries, device nodes."""
    path = tmp_path / "source"
    (path / "share/driver").mkdir(parents=True)
    (path / "share/rw").mkdir()
    (path / "rw").mkdir()
    (path / "share/limits").write_text("the limits")
    (path / "shim.so").write_text("the shim")
    (path / "real.so").write_text("the driver")
    os.mknod(path / "nvidia0", 0o666 | 0o020000, os.makedev(195, 0))
    os.mknod(path / "nvidia7", 0o666 | 0o020000, os.makedev(195, 7))
    (path / "simulated0").write_text("device state")
    return path


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Path]:
    """A host directory beside the rootfs that attacks aim at. It and the mount table must stay unchanged."""
    path = tmp_path / "host"
    (path / "lib").mkdir(parents=True)
    (path / "passwd").write_text("the host's")
    before, mounts = ns_util.snapshot(path), ns_util.host_mounts()
    yield path
    assert ns_util.snapshot(path) == before
    assert ns_util.host_mounts() == mounts


def shim(source: Path, target: str = NAME) -> Mount:
    return Mount(str(source / "shim.so"), target, "file", RO, "shim")


def read(path: str) -> Callable[[], str]:
    def reader() -> str:
        with open(path) as file:
            return file.read()

    return reader
