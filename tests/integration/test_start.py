"""Files and programs of gpushare that a container start uses."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.programs.interrupted_hook import write_adopt
from tests.support import host
from tests.support.host import WITHOUT_SNAPSHOT, Node
from tests.support.rootfs import run
from tests.support.runc import Container

pytestmark = pytest.mark.skipif(WITHOUT_SNAPSHOT, reason="no snapshot: SNAPSHOT=no, or not Python 3.11")
SHARE = {"GPUSHARE_MEMORY": "1Gi"}
MakeContainer = Callable[..., Container]


def check(log: Path) -> None:
    """A start that needs a module missing in the snapshot starts again, in the ordinary program."""
    lines = log.read_text().splitlines()
    opened = [line.split('"')[1] for line in lines if "openat(" in line and '"' in line and "ENOENT" not in line]
    assert not [path for path in opened if path.endswith((".py", ".pyc"))]


def test_runtime_reads_only_its_own_code(container: MakeContainer, node: Node, tmp_path: Path) -> None:
    assert container(["true"], env=SHARE, runtime=node.runtime()).run() == 0  # compiles node.json
    strace = ("strace", "-qq", "-e", "trace=openat", "-o", str(tmp_path / "calls"))  # also after its exec of runc
    container(["true"], env=SHARE, prefix=strace, runtime=node.runtime()).create()
    check(tmp_path / "calls")


def test_hook_reads_only_its_own_code(container: MakeContainer, node: Node, tmp_path: Path) -> None:
    hook = node.hook()._replace(program=write_adopt(tmp_path, stage="prestart"))
    assert container(["true"], env=SHARE, hook=hook).run() == 0
    container(["true"], env=SHARE, hook=hook).create()
    check(tmp_path / "calls")


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
