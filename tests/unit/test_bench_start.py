"""make bench-start: what it measures and in which order, without measuring anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench import bench, start


class FakeNode:
    def __init__(self, *_: Any) -> None:
        pass

    def runtime(self, program: Any = "ours") -> tuple[str, ...]:
        return (str(program), "--gpushare-config", "c")

    def hook(self) -> str:
        return "our hook"

    def close(self) -> None:
        pass


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What was started, in order; each takes as many milliseconds as its kind says."""
    started: list[str] = []
    bundle = tmp_path / "bundle"
    (bundle / "bin").mkdir(parents=True)
    (bundle / "bin" / "gpushare-runtime").touch()

    def kind(arguments: dict[str, Any]) -> str:
        program = arguments.get("runtime", ("runc",))[0]
        named = {
            "runc": "runc",
            "ours": "runtime",
            str(bundle / "bin/gpushare-runtime"): "bundle",
            "/opt/else": "other",
        }
        found = "hook" if "hook" in arguments else named[program]
        return found if arguments.get("env") else f"{found} without GPU"

    def create(directory: Path, **arguments: Any) -> float:
        started.append(kind(arguments))
        return TOOK[started[-1]]

    monkeypatch.setattr(start, "create_ms", create)
    monkeypatch.setattr(start, "parallel_ms", lambda _, **more: [100.0 if more else 60.0] * start.PARALLEL)
    monkeypatch.setattr(start, "make_simhost", lambda *_, **__: tmp_path)
    monkeypatch.setattr(start.host, "Node", FakeNode)
    monkeypatch.setattr(start, "BUNDLE", bundle)
    return started


TOOK = {
    "runc": 40.0, "hook": 60.0, "runtime": 62.0, "bundle": 70.0, "other": 103.0,
    "runc without GPU": 39.0, "runtime without GPU": 40.0,
}  # fmt: skip
ADDED = {
    "start.runc_ms": 40.0, "start.runtime_added_ms": 22.0, "start.hook_added_ms": 20.0, "start.nongpu_added_ms": 1.0,
    "start.bundle_added_ms": 30.0, "start.parallel50_p99_ms": 100.0, "start.parallel50_runc_p99_ms": 60.0,
}  # fmt: skip


def test_every_promised_figure_is_of_thirty_pairs_or_more(calls: list[str], tmp_path: Path) -> None:
    figures = {key: bench.figure(values, "ms") for key, values in start.added_ms(tmp_path).items()}
    for key, expected in ADDED.items():
        figure = figures[key]
        assert (figure.median, figure.p99, figure.unit) == (expected, expected, "ms"), key
        assert figure.n >= (50 if "parallel50" in key else 30), key
    assert "start.other_added_ms" not in figures


def test_another_wrapper_is_measured_on_the_same_bundle(calls: list[str], tmp_path: Path) -> None:
    found = start.added_ms(tmp_path, "/opt/else")
    assert set(found["start.other_added_ms"]) == {63.0} and len(found["start.other_added_ms"]) >= 30


def test_who_goes_first_alternates(calls: list[str], tmp_path: Path) -> None:
    start.added_ms(tmp_path)
    first = calls[: 2 * (start.WARM_UP_PAIRS + start.PAIRS)]
    pairs = [first[i : i + 2] for i in range(0, len(first), 2)]
    assert pairs == [["runc", "hook"] if i % 2 == 0 else ["hook", "runc"] for i in range(len(pairs))]
