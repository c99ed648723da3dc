"""make test-all: parts, summary and exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.host import TREE
from tools import everything
from tools.everything import Part


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(everything, "LOGS", tmp_path / "logs")
    return tmp_path / "logs"


def shell(name: str, script: str) -> Part:
    return Part(name, f"about {name}", ("sh", "-c", script), {"WORD": "given"})


def test_failing_part_is_named_and_next_part_runs(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [shell("one", "echo $WORD"), shell("two", "echo why; exit 3"), shell("three", "exit 0")]
    assert everything.run_all(parts) == 1
    assert (logs / "one.log").read_text() == "given\n"
    shown = capsys.readouterr().out
    assert "2/3  two: why" in shown and "3/3  three: passed" in shown
    summary = (logs / "summary").read_text()
    assert [line.split()[1] for line in summary.splitlines()[:3]] == ["passed", "FAILED", "passed"]
    assert "make test-all PARTS=two\n" in summary and summary in shown


def test_passing_parts_exit_with_zero(logs: Path) -> None:
    assert everything.run_all([shell("one", "true"), shell("two", "true")]) == 0
    assert "again" not in (logs / "summary").read_text()


def test_interrupt_ends_part_and_skips_rest(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the part."""
    wait = subprocess.Popen.wait

    def wait_and_tell(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        (tmp_path / "waits").touch()
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_and_tell)
    script = f"until [ -e {tmp_path}/waits ]; do :; done; kill -INT {os.getpid()}; exec sleep 600"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert everything.run_all([shell("one", script), shell("two", "true")]) == 1
    finally:
        signal.signal(signal.SIGINT, before)
    assert "PARTS='one two'" in (logs / "summary").read_text()
    assert not (logs / "two.log").exists()


def test_unknown_part_is_named() -> None:
    command = [sys.executable, "-m", "tools.everything", "attacks", "kill"]
    done = subprocess.run(command, cwd=TREE, capture_output=True, text=True)
    assert done.returncode == 2 and "no part 'kill'; there are test attacks" in done.stderr


@pytest.mark.parametrize("part", everything.PARTS, ids=lambda part: part.name)
def test_every_part_is_make_target(part: Part) -> None:
    done = subprocess.run([*part.command, "--dry-run"], cwd=TREE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
