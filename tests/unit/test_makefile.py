"""Makefile: what `make` prints while it builds."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.support import host
from tests.support.host import TREE
from tests.support.terminal import Terminal

RULE = "all:\n\t$(call progress,CC one.c)\n\t$(call progress,CC two.c)\n\t@echo done: longer than the line before\n"


def makefile(folder: Path) -> Path:
    """A file with the definition of `progress` and two steps."""
    (line,) = (line for line in (TREE / "Makefile").read_text().splitlines() if line.startswith("progress ="))
    path = folder / "Makefile"
    path.write_text(f"{line}\n{RULE}")
    return path


def test_progress_is_a_line_each_without_a_terminal(tmp_path: Path) -> None:
    command = ["make", "--silent", "-f", str(makefile(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "  CC one.c\n  CC two.c\ndone: longer than the line before\n"
    assert (
        subprocess.run([*command, "V=1"], capture_output=True, text=True, check=True).stdout
        == "done: longer than the line before\n"
    )


def test_progress_is_one_line_on_a_terminal(tmp_path: Path) -> None:
    with Terminal(["make", "--silent", "-f", str(makefile(tmp_path))], 80, 10) as one:
        text = one.expect("done")
        assert one.end() == 0
    assert b"CC one.c" in one.raw and text == "done: longer than the line before\n"


def test_duration_is_shown_before_all_tests() -> None:
    done = subprocess.run(["make", "say-test"], cwd=TREE, capture_output=True, text=True, check=True)
    assert re.search(r"about \d+ minutes", done.stdout) and done.stdout.count("\n") == 1


def test_edit_after_the_build_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Makefile").write_text("built: program-$(SNAPSHOT)\nprogram-%: source\n\ttouch $@\n")
    (tmp_path / "source").touch()
    monkeypatch.setattr(host, "TREE", tmp_path)
    monkeypatch.setattr(host, "BUILD", tmp_path)
    monkeypatch.setenv("MAKEFLAGS", "n")  # of a make that runs the tests
    assert not host.is_built()
    (tmp_path / "program-yes").touch()
    assert host.is_built()
    os.utime(tmp_path / "program-yes", (1, 1))
    assert not host.is_built()
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / ".no").touch()
    (tmp_path / "program-no").touch()
    assert host.is_built()


def test_build_has_what_tests_run() -> None:
    """The programs, and what has copies of Python code: the snapshot and the tables of the launchers."""
    done = subprocess.run(
        ["make", "-n", "-W", "hook/gpushare/core/model.py", "-W", "shim/core/quota.c", "built"],
        cwd=TREE,
        capture_output=True,
        text=True,
    )
    assert "hook/snapshot/make" in done.stdout and "hook/launcher/tables.py" in done.stdout
    assert "-c -o build/shim/obj/cuda/core/quota.o" in done.stdout


@pytest.mark.parametrize(
    ("test", "programs", "built", "told"),
    [
        ("tests/integration/test_run.py::test", None, False, True),
        ("tests/shim/test_live.py::test", None, False, True),
        ("tests/integration/test_run.py::test", None, True, False),
        ("tests/unit/test_plan.py::test", None, False, False),
        ("tests/integration/test_run.py::test", "build/dist/gpushare", False, False),
    ],
)
def test_session_tells_that_its_programs_are_old(
    test: str, programs: Any, built: bool, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    reporter: Any = SimpleNamespace(
        stats={"passed": [SimpleNamespace(nodeid=test)]}, write_line=lambda line, red: lines.append(line)
    )
    config: Any = SimpleNamespace(getoption=lambda name: programs)
    monkeypatch.setattr(host, "is_built", lambda: built)
    conftest.pytest_terminal_summary(reporter, config)
    assert lines == ([conftest.OLD_BUILD] if told else [])
