"""gpushare doctor: the library for containers, and whether it loads over the driver."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare.core.errors import CapacityError
from gpushare.doctor import FAIL, OK, Machine, Result, shim

from tests.unit.clihost import GIB
from tests.unit.doctorhost import ask, machine, put, root

__all__ = ["machine", "root"]  # fixtures


def test_missing_or_truncated_library_fails(machine: Machine, root: Path) -> None:
    result = ask("library", machine)
    assert result.result == FAIL and "libcuda.so: No such file" in result.detail
    from tests.support.host import SHIM

    for name in shim.LIBRARIES:
        put(root, f"shim/{name}").write_bytes((SHIM / name).read_bytes()[:4096])
    assert ask("library", machine).result == FAIL  # truncated
    (root / "shim").rename(root / "other")
    assert machine.config
    assert ask("library", machine._replace(config=machine.config._replace(shim_dir=str(SHIM)))).result == OK


@pytest.mark.parametrize(
    ("answer", "result", "words"),
    [
        ({"CUDA": GIB, "NVML": GIB}, OK, "1 GiB"),
        ({"CUDA": GIB, "NVML": 16 * GIB}, FAIL, "NVML shows 16 GiB where the limit is 1 GiB"),
        ({"CUDA": 0, "NVML": 0}, FAIL, "CUDA shows 0 B and NVML shows 0 B"),
        ({}, FAIL, "CUDA shows 0 B"),
        ({"error": "cuInit returned 100", "hint": "x"}, FAIL, "cuInit returned 100"),
    ],
)
def test_answer_of_child_is_judged(answer: Any, result: str, words: str) -> None:
    said = shim.judged(answer)
    assert said.result == result and words in said.detail


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[Callable[..., Any]], None]]:
    """silent(function): replace the child's driver probe with `function`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other workers run doctor at the same time
    yield lambda function: monkeypatch.setattr(shim, "_share", function)
    assert not list(tmp_path.glob("gpushare-doctor-*"))


def test_hang_or_crash_in_child_is_reported(machine: Machine, silent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    silent(lambda *_: time.sleep(100))
    with monkeypatch.context() as soon:
        soon.setattr(shim, "_DEADLINE_S", 0.3)
        assert "did not answer within" in ask("library loads", machine).detail
    silent(lambda *_: os.kill(os.getpid(), 9))
    assert "ended by signal 9" in ask("library loads", machine).detail
    silent(lambda *_: os._exit(4))
    assert "ended by exit code 4" in ask("library loads", machine).detail

    def refused(*_: Any) -> Any:
        raise CapacityError("no room", "wait")

    silent(refused)
    assert ask("library loads", machine) == Result(FAIL, "no room", "wait")
    silent(lambda *_: {}["x"])
    assert "KeyError" in ask("library loads", machine).detail
