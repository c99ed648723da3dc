"""Makefile: what `make` prints while it builds."""

from __future__ import annotations

import subprocess
from pathlib import Path

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
    assert "20 minutes" in done.stdout and done.stdout.count("\n") == 1
