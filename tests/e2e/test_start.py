"""What a start of a container reads of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.e2e.programs.interrupted_hook import write_adopt
from tests.lib import host
from tests.lib.host import Node
from tests.lib.runc import Container

SHARE = {"GPUSHARE_MEMORY": "1Gi"}
MakeContainer = Callable[..., Container]


def check(log: Path) -> None:
    """A module that a start imports and that is in no snapshot and no pack is found by its file, and costs five times
    as much."""
    lines = log.read_text().splitlines()
    opened = [line.split('"')[1] for line in lines if "openat(" in line and '"' in line and "ENOENT" not in line]
    below = (path.rpartition("/gpushare/")[2] for path in opened if "/gpushare/" in path and ".py" in path)
    ours = {Path(path).name.partition(".")[0] for path in below if not path.startswith("libexec/")}
    if (host.BIN.parent / "libexec" / "snapshot").exists():
        assert not [path for path in opened if path.endswith((".py", ".pyc", ".pack"))]
        return
    of_bundle = {"__init__", "bundled", "packed"}  # its pack is found by a module; ours has what loads it
    assert ours == (of_bundle if any("/_internal/" in path for path in opened) else set())
    assert len([path for path in opened if path.endswith(".pack")]) == 1


def test_runtime_reads_no_code_but_its_own(container: MakeContainer, node: Node, tmp_path: Path) -> None:
    assert container(["true"], env=SHARE, runtime=node.runtime()).run() == 0  # compiles node.json
    strace = ("strace", "-qq", "-e", "trace=openat", "-o", str(tmp_path / "calls"))  # also after it has become runc
    container(["true"], env=SHARE, prefix=strace, runtime=node.runtime()).create()
    check(tmp_path / "calls")


def test_hook_reads_no_code_but_its_own(container: MakeContainer, node: Node, tmp_path: Path) -> None:
    hook = node.hook()._replace(program=write_adopt(tmp_path, stage="prestart"))
    assert container(["true"], env=SHARE, hook=hook).run() == 0
    container(["true"], env=SHARE, hook=hook).create()
    check(tmp_path / "calls")
