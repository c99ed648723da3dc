"""How gpu-check judges what it measured: figures in, verdict out."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import pytest

from tests.gpu import checks_busy, checks_compute, checks_driver
from tests.gpu.machine import Machine
from tests.gpu.session import Session, interval

MS = 1_000_000


class Told:
    """A program that says what it was told to say."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers: Iterator[dict[str, Any]] = iter(answers)

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def go(self, **_: Any) -> None:
        pass

    def hear(self) -> dict[str, Any]:
        return next(self.answers)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    where: tuple[Any, ...] = ("libcuda.so.1", "libnvidia-ml.so.1", tmp_path, {}, (), None)
    what = ("some GPU", "GPU-0", "0000:01:00.0", 1 << 34, (9, 0), 132, "580.0", 13000)
    machine = Machine._make([*where, *what, "", None, (0, 0)])
    return Session(machine, time.monotonic() + 60, False, tmp_path, None, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(0.30, "held"), (0.309, "held"), (0.311, "missed"), (0.288, "missed"), (1.0, "missed")]
)
def test_a_share_alone_is_within_a_point(
    session: Session, monkeypatch: pytest.MonkeyPatch, ratio: float, verdict: str
) -> None:
    monkeypatch.setattr(checks_compute, "ratios", lambda *_, **__: ({"ratio": ratio}, []))
    assert checks_compute.alone(session, 30).verdict == verdict


def test_what_the_device_did_not_count_is_missed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_compute, "ratios", lambda *_, **__: ({"ratio": 0.3}, ["the device counted 0.5"]))
    assert checks_compute.alone(session, 30).verdict == "missed"


@pytest.mark.parametrize(("low", "high", "verdict"), [(0.98, 1.01, "held"), (0.97, 0.98, "missed"), (0.5, 1.5, "held")])
def test_no_limit_is_native_speed_as_far_as_can_be_told(
    session: Session, monkeypatch: pytest.MonkeyPatch, low: float, high: float, verdict: str
) -> None:
    values = {"ratio": (low + high) / 2, "ci95": [low, high]}
    monkeypatch.setattr(checks_compute, "ratios", lambda *_, **__: (values, []))
    assert checks_compute.uncapped(session).verdict == verdict


# Kernels per second of native before, of both shares twice, of native after
@pytest.mark.parametrize(
    ("together", "verdict"),
    [
        ((300, 700), "held"),
        ((285, 665), "held"),  # 5 % went to switches
        ((330, 670), "missed"),  # one has too much
        ((250, 700), "missed"),  # one lacks what the other one does not
        ((255, 595), "missed"),  # both lack too much
        ((475, 475), "missed"),  # no limits
    ],
)
def test_shares_in_company(
    session: Session, monkeypatch: pytest.MonkeyPatch, together: tuple[int, int], verdict: str
) -> None:
    rate = {name: Told({}, *({"per_s": one},) * 2) for name, one in zip("ab", together)}
    programs = iter([Told({}, *({"per_s": 1000},) * 2), *rate.values()])
    monkeypatch.setattr(Session, "ask", lambda *_, **__: {"rounds": 1, "blocks": 1})
    monkeypatch.setattr(Session, "tenant", lambda *_, **__: next(programs))
    monkeypatch.setattr(Session, "place", lambda *_: Told())
    assert checks_compute.shared(session).verdict == verdict


def test_slices_and_switches_come_from_the_gaps_of_both(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of 2 ms, 0.1 ms between them; the last of them is shorter."""
    turn = 2 * MS + MS // 10
    one = [[2 * MS + 2 * turn * i, 2 * turn * (i + 1)] for i in range(20)]
    other = [[begin + turn, end + turn] for begin, end in one]
    both = iter((Told({}, {"gaps": one}), Told({}, {"gaps": other})))
    monkeypatch.setattr(Session, "tenant", lambda *_, **__: next(both))
    values = checks_driver.slices(session).values
    assert values["slice_ns"]["median"] == 2 * MS
    assert values["switch_ns"] == MS // 10


@pytest.mark.parametrize(("share", "verdict"), [(0.31, "held"), (0.35, "missed"), (0.2, "missed")])
def test_programs_of_many_kinds(session: Session, monkeypatch: pytest.MonkeyPatch, share: float, verdict: str) -> None:
    def busy(_: Session, place: Optional[Any], **__: Any) -> dict[str, float]:
        return {"share": share if place else 0.99}

    monkeypatch.setattr(checks_busy, "busy", busy)
    monkeypatch.setattr(Session, "place", lambda *_, **__: Told())
    assert checks_busy.shapes(session).verdict == verdict


def test_kernels_that_wait_for_ever_are_missed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"stuck": 2, "done": 1, "longest_call_ns": 5e9}
    monkeypatch.setattr(checks_busy, "busy", lambda *_, **__: said)
    monkeypatch.setattr(Session, "place", lambda *_, **__: Told())
    assert checks_busy.pairs(session).verdict == "missed"
    said["done"] = 2
    assert checks_busy.pairs(session).verdict == "held"


@pytest.mark.parametrize(("seconds", "verdict"), [(0.01, "missed"), (0.7, "held"), (9.0, "held")])
def test_streams_that_wait_are_limited_too(
    session: Session, monkeypatch: pytest.MonkeyPatch, seconds: float, verdict: str
) -> None:
    answers = iter(({"rounds": 1, "blocks": 1}, {"kernels": 30, "seconds": seconds}))
    monkeypatch.setattr(Session, "ask", lambda *_, **__: next(answers))
    monkeypatch.setattr(Session, "place", lambda *_, **__: Told())
    assert checks_compute.waiting(session).verdict == verdict


def test_the_interval_is_students() -> None:
    mean, low, high = interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert high - mean == pytest.approx(4.30 / math.sqrt(3))
    assert mean - low == pytest.approx(high - mean)
