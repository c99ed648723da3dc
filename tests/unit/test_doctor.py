"""gpushare doctor: its table and its command. Each module of checks has a test file beside this one."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpushare import doctor
from gpushare.doctor import CHECKS, FAIL, OK, SKIP, WARN, Machine, Result
from gpushare.system import rootless

from tests.unit.doctorhost import machine, root

__all__ = ["machine", "root"]  # fixtures


def test_check_names_are_unique_and_documented() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names) and all(check.meaning for check in CHECKS)


def test_failing_check_does_not_hide_others(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Machine) -> Result:
        raise ZeroDivisionError("x")

    for error, words in ((broken, "ZeroDivisionError"), (lambda _: os.stat("/none/x"), "/none/x: No such")):
        result = doctor.answer(doctor.Check("x", "", error), machine)
        assert result.result == FAIL and words in result.detail


def test_ordinary_user_skips_files_of_root(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(_: Machine) -> Result:
        raise PermissionError(errno.EACCES, "Permission denied", "/var/lib/x")

    check = doctor.Check("x", "", closed)
    assert doctor.answer(check, machine) == Result(FAIL, "/var/lib/x: Permission denied", "run as root")
    monkeypatch.setattr(rootless, "is_rootless", lambda: True)
    assert doctor.answer(check, machine) == Result(SKIP, "needs root: /var/lib/x: Permission denied")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """answers(result, ...): the results of the checks, in the order of the table."""

    def set_(*results: Result) -> None:
        checks = tuple(
            doctor.Check(f"check {number}", "", lambda _, one=result: one)
            for number, result in enumerate(results)  # type: ignore[misc]
        )
        monkeypatch.setattr(doctor, "CHECKS", checks)

    return set_


def test_warnings_alone_are_no_failure(cli: Callable[..., Any], answers: Callable[..., None]) -> None:
    answers(Result(OK, "well"), Result(WARN, "odd", "look"))
    code, text, error = cli("doctor")
    assert (code, error) == (0, "") and text.endswith("\n\nno failures, 1 warning, 2 checks\n")
    answers(Result(FAIL, "broken", "mend"), Result(FAIL, "too", ""))
    value = json.loads(cli("doctor", "--format", "json")[1])
    assert (value["failures"], value["warnings"]) == (2, 0)


def test_broken_configuration_is_one_failed_row(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("version: 1\nmemory_overcomit: 2\n")
    code, text, error = cli("--config", str(tmp_path / "bad.yaml"), "doctor", "--format", "json")
    assert (code, error) == (1, "")
    found = {one["name"]: one for one in json.loads(text)["checks"]}
    assert found["configuration"]["result"] == "fail" and "memory_overcomit" in found["configuration"]["detail"]
    assert found["driver"]["result"] == found["library"]["result"] == "skip"
    assert found["kernel"]["result"] == "ok"
