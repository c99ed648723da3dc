"""A container start uses no Python of the host. One that needs a module missing in the snapshot would: it starts again
in the ordinary program."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import host
from tests.support.host import WITHOUT_SNAPSHOT, Node
from tests.support.rootfs import run
from tests.support.runc import Container

pytestmark = pytest.mark.skipif(WITHOUT_SNAPSHOT, reason="no snapshot: SNAPSHOT=no, or not Python 3.11")
SHARE = {"GPUSHARE_MEMORY": "1Gi"}
MakeContainer = Callable[..., Container]


@contextlib.contextmanager
def no_python(empty: Path) -> Iterator[None]:
    """Make every Python of the host, the tree and the bundle non-executable in this mount namespace. `empty`: a new
    file."""
    empty.touch(0o644)
    libexec = host.BIN.parent / "libexec"
    found = [*Path("/usr/bin").glob("python*"), Path(sys.executable), *libexec.glob("_internal/python3")]
    covered: list[str] = []
    try:
        for path in sorted({os.path.realpath(path) for path in found}):
            run("mount", "--bind", empty, path)
            covered.append(path)
        assert not can_start(libexec / "gpushare-runtime")
        yield
    finally:
        for path in covered:
            run("umount", path)


def can_start(program: Path) -> bool:
    try:
        return subprocess.run([program, "--version"], capture_output=True).returncode == 0
    except PermissionError:
        return False


def test_start_needs_no_python(container: MakeContainer, node: Node, way: str, tmp_path: Path) -> None:
    assert container(["true"], env=SHARE, **node.way(way)).run() == 0  # compiles node.json
    with no_python(tmp_path / "empty"):
        one = container(["true"], env=SHARE, **node.way(way))
        one.create()
        assert one.id in node.leases()
        one.start()
        assert one.wait() == 0
        one.delete()
        assert one.id not in node.leases()
