"""make bench-start: which programs it measures and in which order, without measuring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import bench, start


class FakeNode:
    state = "s"

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
    """The programs in the order of their starts; each takes a fixed number of milliseconds."""
    started: list[str] = []
    bundle = tmp_path / "bundle"
    (bundle / "bin").mkdir(parents=True)
    (bundle / "bin" / "gpushare-runtime").touch()

    def create(directory: Path, **arguments: Any) -> start.Cost:
        program = arguments.get("runtime", ("runc",))[0]
        named = {
            "runc": "runc",
            "ours": "runtime",
            str(bundle / "bin/gpushare-runtime"): "bundle",
            str(tmp_path / "else"): "other",
            str(tmp_path / "bench/warm"): "warm",
        }
        found = "hook" if "hook" in arguments else named[program]
        started.append(found if arguments.get("env") else f"{found} without GPU")
        return start.Cost(TOOK[started[-1]], TOOK[started[-1]] / 2)

    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "warm").touch()
    (tmp_path / "else").touch()
    monkeypatch.setattr(start, "create", create)
    monkeypatch.setattr(start, "parallel_ms", lambda _, **more: [100.0 if more else 60.0] * start.PARALLEL)
    monkeypatch.setattr(start, "make_simhost", lambda *_, **__: tmp_path)
    monkeypatch.setattr(start.host, "Node", FakeNode)
    monkeypatch.setattr(start, "BUNDLE", bundle)
    monkeypatch.setattr(start, "BENCH", tmp_path / "bench")
    return started


TOOK = {
    "runc": 40.0, "hook": 60.0, "runtime": 62.0, "bundle": 70.0, "other": 103.0, "warm": 30.0,
    "runc without GPU": 39.0, "runtime without GPU": 40.0, "hook without GPU": 39.5,
}  # fmt: skip
ADDED = {
    "start.runc_ms": 40.0, "start.runtime_added_ms": 22.0, "start.hook_added_ms": 20.0, "start.nongpu_added_ms": 1.0,
    "start.bundle_added_ms": 30.0, "start.parallel50_p99_ms": 100.0, "start.parallel50_runc_p99_ms": 60.0,
    "start.warm_runc_added_ms": -10.0, "start.runtime_added_cpu_ms": 11.0, "start.runc_cpu_ms": 20.0,
    "start.hook_nongpu_added_ms": 0.5,
}  # fmt: skip


def test_every_figure_has_thirty_rounds_or_more(calls: list[str], tmp_path: Path) -> None:
    figures = {key: bench.figure(values, "ms") for key, values in start.added_ms(tmp_path).items()}
    for key, expected in ADDED.items():
        figure = figures[key]
        assert (figure.median, figure.p99, figure.unit) == (expected, expected, "ms"), key
        assert figure.n >= (50 if "parallel50" in key else 30), key
    assert "start.other_added_ms" not in figures


def test_other_wrapper_is_measured_on_same_bundle(calls: list[str], tmp_path: Path) -> None:
    found = start.added_ms(tmp_path, str(tmp_path / "else"))
    assert set(found["start.other_added_ms"]) == {63.0} and len(found["start.other_added_ms"]) >= 30


def test_every_way_starts_equally_many_rounds(calls: list[str], tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    ways: dict[str, dict[str, Any]] = {name: {"env": start.SHARE} for name in names}
    ways["b"]["hook"] = "our hook"
    start.rounds(tmp_path, ways)
    assert len(calls) == 3 * (start.WARM_UP_ROUNDS + start.ROUNDS)
    first = [calls[i : i + 3].index("hook") for i in range(0, len(calls), 3)]
    assert first == [(1 - number) % 3 for number in range(len(first))]


def test_interval_contains_median_and_narrows() -> None:
    few, many = bench.figure(range(40), "ms"), bench.figure([value / 10 for value in range(400)], "ms")
    for one in (few, many):
        assert one.low is not None and one.high is not None and one.low < one.median < one.high
    assert many.high - many.low < few.high - few.low  # type: ignore[operator]
    assert bench.figure([5.0], "ms")[4:] == (5.0, 5.0)
