"""The engines of the behavioural suite (test_engines.py): one row each."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from simulator.simhost import make_simhost
from tests.support.engines.bare import Bare
from tests.support.engines.base import Engine
from tests.support.engines.containerd import Containerd
from tests.support.engines.crio import Crio
from tests.support.engines.docker import Docker
from tests.support.engines.image import IMAGE, make_root
from tests.support.engines.podman import Podman
from tests.support.host import BUILD, Node
from tests.support.rootfs import run
from tools import newest

GIB = 1 << 30
# First word of an engine's name, and folder of build/ -> release of Debian that has its programs (tools/newest.py)
SUITES = {"newest": newest.SUITE, "trixie": "trixie"}


class Place(NamedTuple):
    """The inputs for making an engine. Its `directory` has a short path, for socket addresses."""

    directory: Path
    image_root: Path
    driver_root: Path

    def node(self, **config: object) -> Node:
        return Node(self.directory / "node", self.driver_root, **config)


def runtime_path(name: str) -> dict[str, str]:
    """The low-level runtime that gpushare-runtime executes, as a configuration key."""
    path = shutil.which(name)
    assert path, f"no {name} in PATH"
    return {"path": path}


@contextmanager
def programs(engine: str) -> Iterator[None]:
    """For engines of another release: their programs before this machine's own."""
    before = os.environ["PATH"]
    origin = engine.split()[0]
    if origin in SUITES:
        os.environ["PATH"] = f"{newest.unpack(BUILD / origin, SUITES[origin])}:{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _bare(low_level: str, way: str) -> Callable[[Place], Engine]:
    def make(place: Place) -> Engine:
        node = place.node(runtime=runtime_path(low_level))
        return Bare(node, place.directory / "bundles", place.image_root, low_level, way)

    return make


def _podman(low_level: str, way: str) -> Callable[[Place], Engine]:
    def make(place: Place) -> Engine:
        node = place.node(runtime=runtime_path(low_level))
        return Podman(node, place.directory / "podman", place.image_root, low_level, way)

    return make


def _containerd(way: str) -> Callable[[Place], Engine]:
    return lambda place: Containerd(
        place.node(runtime=runtime_path("runc")), place.directory / "c", place.image_root, way
    )


def _crio(low_level: str, way: str) -> Callable[[Place], Engine]:
    def make(place: Place) -> Engine:
        node = place.node(runtime=runtime_path(low_level))
        return Crio(node, place.directory / "c", place.image_root, way, low_level)

    return make


def _docker(place: Place) -> Engine:
    return Docker(place.node(), place.directory / "docker", place.image_root)


ENGINES: dict[str, Callable[[Place], Engine]] = {
    "runc, hook": _bare("runc", "hook"),
    "runc, runtime": _bare("runc", "runtime"),
    "crun, hook": _bare("crun", "hook"),
    "crun, runtime": _bare("crun", "runtime"),
    "podman, hook": _podman("runc", "hook"),
    "podman, runtime": _podman("runc", "runtime"),
    "podman with crun, hook": _podman("crun", "hook"),
    "podman with crun, runtime": _podman("crun", "runtime"),
    "containerd, hook": _containerd("hook"),
    "containerd, runtime": _containerd("runtime"),
    "docker, runtime": _docker,
    # tools/newest.py
    "newest runc, hook": _bare("runc", "hook"),
    "newest runc, runtime": _bare("runc", "runtime"),
    "newest crun, hook": _bare("crun", "hook"),
    "newest crun, runtime": _bare("crun", "runtime"),
    "newest containerd, hook": _containerd("hook"),
    "newest containerd, runtime": _containerd("runtime"),
}

if shutil.which("crio"):  # no release of Debian has it: `make engines`
    ENGINES.update(
        {
            "crio, hook": _crio("runc", "hook"),
            "crio, runtime": _crio("runc", "runtime"),
            "crio with crun, hook": _crio("crun", "hook"),
            "crio with crun, runtime": _crio("crun", "runtime"),
        }
    )


@contextmanager
def engine(name: str, directory: Path, image_root: Path) -> Iterator[Engine]:
    """The engine `ENGINES[name]`, on a simulated host with one GPU of 16 GiB."""
    host = make_simhost(directory / "host", gpus=1, memory_bytes=16 * GIB, late_return_ms=0)
    with programs(name):
        made = ENGINES[name](Place(directory, image_root, host))
        try:
            yield made
        finally:
            made.close()
            made.node.close()
            run("rm", "-rf", directory)


@contextmanager
def containerd(way: str, image_root: Path) -> Iterator[Containerd]:
    """A containerd on a simulated host with two GPUs of 16 GiB. The directory's path is short, for its sockets."""
    directory = Path(tempfile.mkdtemp(prefix="gs-"))
    host = make_simhost(directory / "host", gpus=2, memory_bytes=16 * GIB, late_return_ms=0)
    made = Containerd(Node(directory / "node", host), directory / "c", image_root, way)
    try:
        made.node.cli("refresh")  # mounts the state directory; it stays mounted
        yield made
    finally:
        made.close()
        made.node.close()
        run("rm", "-rf", directory)


__all__ = ["ENGINES", "IMAGE", "Place", "containerd", "engine", "make_root", "programs"]
