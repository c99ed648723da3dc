"""What a start of a container reads of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.e2e.programs.interrupted_hook import write_adopt
from tests.lib.host import Node
from tests.lib.runc import Container

SHARE = {"GPUSHARE_MEMORY": "1Gi"}
MakeContainer = Callable[..., Container]


def check(log: Path) -> None:
    """A start with a module that is not in the snapshot begins again, in the ordinary program."""
    lines = log.read_text().splitlines()
    opened = [line.split('"')[1] for line in lines if "openat(" in line and '"' in line and "ENOENT" not in line]
    assert not [path for path in opened if path.endswith((".py", ".pyc"))]


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
