"""The table of planted faults does not rot: each fault applies, and its test exists."""

from __future__ import annotations

import collections
import os
import subprocess
import sys

import pytest

from tests import planted
from tests.planted import Fault, __main__
from tests.support.host import TREE

FAULTS = planted.faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_applies(fault: Fault) -> None:
    """If not, change `old` and `new` to the text that is there now."""
    before = (TREE / fault.file).read_text()
    after = fault.planted_in(before)
    assert after != before
    if fault.file.endswith(".py"):
        compile(after, fault.file, "exec")


def test_fault_that_does_not_apply_is_an_error() -> None:
    fault = Fault("name", "what", "file", "a", "b", "test")
    assert fault.planted_in("cat") == "cbt"
    for text, times in (("dog", 0), ("banana", 3)):
        with pytest.raises(ValueError, match=f"must occur once in file, and occurs {times} times"):
            fault.planted_in(text)


def test_every_area_has_its_faults() -> None:
    counts = collections.Counter(next(area for area in planted.AREAS if one.file.startswith(area)) for one in FAULTS)
    assert {area: number for area, number in planted.AREAS.items() if counts[area] < number} == {}
    assert len(FAULTS) >= 60


def test_named_tests_exist_and_are_in_make_test() -> None:
    tests = sorted({one.test for one in FAULTS})
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "--no-header", "-m", "not long", *tests]
    environment = {**os.environ, "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=TREE, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    found = done.stdout.splitlines()
    assert [test for test in tests if not any(line == test or line.startswith(f"{test}[") for line in found)] == []


def test_results_and_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run whose programs are replaced: one fault is caught, one survives, one test fails anyway."""
    faults = [Fault(name, "what", "shim/x.c", "a", "b", f"tests/{name}.py::test") for name in ("one", "two", "three")]
    monkeypatch.setattr(__main__, "selected", lambda names: faults)
    monkeypatch.setattr(__main__, "make_copy", lambda: None)
    monkeypatch.setattr(__main__, "build", lambda snapshot: "")
    monkeypatch.setattr(__main__, "failing", lambda chosen: {"tests/three.py::test"})
    monkeypatch.setattr(
        __main__, "try_one", lambda fault: ({"one": "caught", "two": "survived"}[fault.name], "1 passed")
    )
    assert __main__.main([]) == 1
    lines = capsys.readouterr().out
    assert "caught         one" in lines and "survived       two" in lines and "fails anyway   three" in lines
    assert lines.endswith("planted: 1 caught, 1 survived, 1 fails anyway\n")
    faults[1:] = []
    assert __main__.main([]) == 0
