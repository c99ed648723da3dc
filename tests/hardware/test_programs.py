"""The programs that users run, with stand-ins for PyTorch, and how gpu-check judges their speed."""

from __future__ import annotations

import sys
import time
import types
from typing import Any

import pytest

from tests.hardware import checks_programs, fakes
from tests.hardware.tenants import programs


# Natively 100 steps/s; device time of a step in ms (None: not known), steps/s at 50 %
@pytest.mark.parametrize(
    ("kernels_ms", "got", "verdict", "words"),
    [
        (9.0, 55, "held", "49.5 % of the device time; natively it uses 90 %, so 56 % is possible"),
        (9.0, 42, "missed", "42.0 % of native speed"),
        (9.0, 70, "missed", "63.0 % of the device time"),
        (4.0, 99, "held", "natively it uses 40 %, so 100 % is possible"),
        (4.0, 50, "missed", "50.0 % of native speed (10.0 ms a step)"),
        (None, 50, "held", "charged 50.0 %"),
        (None, 80, "held", ""),
        (None, 42, "missed", ""),
    ],
)
def test_speed_is_judged_by_the_device_time_of_a_step(
    kernels_ms: float | None, got: float, verdict: str, words: str
) -> None:
    values = {"native_per_s": 100.0, "got_per_s": got, "charged_percent": 50.0}
    result = checks_programs.judge(values, kernels_ms and kernels_ms / 1e3)
    assert result.verdict == verdict and words in result.note, result.note


def test_overlapping_kernels_count_once() -> None:
    assert programs.covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert programs.covered([]) == 0


def profiler(*events: tuple[str, str, float, float]) -> types.ModuleType:
    """Return a module that reports these events: name, kind of device, start and end in microseconds."""

    class Profile:
        def __init__(self, **_: Any) -> None: ...
        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *_: object) -> None: ...
        def events(self) -> list[Any]:
            return [
                fakes.namespace(name=name, device_type=kind, time_range=fakes.namespace(start=start, end=end))
                for name, kind, start, end in events
            ]

    module = types.ModuleType("torch.profiler")
    vars(module).update(profile=Profile, ProfilerActivity=fakes.namespace(CUDA="cuda"))
    return module


def served(monkeypatch: pytest.MonkeyPatch, step_s: float) -> list[dict[str, Any]]:
    """Return what a program reports: that it is ready, its steps, and its profile."""
    torch = fakes.torch(fakes.Device(1 << 30))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(programs.PROGRAMS, "sleeps", lambda _: lambda: time.sleep(step_s))
    lines = iter([{"at": time.monotonic(), "settle_s": 0.05, "run_s": 0.2}, {"profile": True}])
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(programs, "say", lambda **what: said.append(what))
    monkeypatch.setattr(programs, "listen", lambda: next(lines))
    with pytest.raises(StopIteration):
        programs.program("sleeps")
    return said


def test_program_reports_its_steps_and_their_device_time(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [
        ("gemm", "DeviceType.CUDA", 0.0, 5000.0),
        ("aten::mm", "DeviceType.CPU", 0.0, 90_000.0),
        ("ProfilerStep#1", "DeviceType.CUDA", 0.0, 90_000.0),
    ]
    monkeypatch.setitem(sys.modules, "torch.profiler", profiler(*events))
    _, report, profile = served(monkeypatch, 0.01)
    assert profile == {"kernels_s": pytest.approx(5e-3 / programs.PROFILED), "why": None}
    assert 20 < report["per_s"] <= 100 and report["to_s"] - report["from_s"] >= 0.1


def test_profiler_that_does_not_work_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.profiler", types.ModuleType("torch.profiler"))
    profile = served(monkeypatch, 0.01)[2]
    assert profile["kernels_s"] is None and "AttributeError" in profile["why"]


def test_program_without_steps_reports_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert served(monkeypatch, 0.3)[1]["per_s"] == 0
