"""How gpu-check judges measurements: figures in, verdict out."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

import pytest

from tests.hardware import checks_busy, checks_compute, checks_looks, checks_switches, processes
from tests.hardware.checks_compute import Rate
from tests.hardware.machine import Machine
from tests.hardware.session import Session, interval
from tests.hardware.tenants import pytorch
from tests.hardware.tenants.pytorch import Unit

MS = 1_000_000


class PreparedTenant:
    """A tenant with prepared answers."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers: Iterator[dict[str, Any]] = iter(answers)
        self.lines: list[dict[str, Any]] = []

    def __enter__(self) -> PreparedTenant:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def go(self, **what: Any) -> None:
        self.lines.append(what)

    def receive(self) -> dict[str, Any]:
        return next(self.answers)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    where: tuple[Any, ...] = ("libcuda.so.1", "libnvidia-ml.so.1", tmp_path, {}, (), None)
    what = ("some GPU", "GPU-0", "0000:01:00.0", 1 << 34, (9, 0), 132, "580.0", 13000)
    machine = Machine._make([*where, *what, "", None, (0, 0)])
    return Session(machine, time.monotonic() + 60, False, tmp_path, None, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "ratio", "verdict"),
    [
        (0.30, 0.30, "held"),
        (0.309, 0.30, "held"),
        (0.311, 0.30, "missed"),
        (0.288, 0.30, "missed"),
        (0.30, 0.349, "held"),  # the clock is higher than natively
        (0.36, 0.30, "missed"),
        (None, 0.30, "held"),
        (None, 1.0, "missed"),
    ],
)
def test_single_share_is_within_a_point_of_device_time(
    session: Session, monkeypatch: pytest.MonkeyPatch, device: Optional[float], ratio: float, verdict: str
) -> None:
    monkeypatch.setattr(checks_compute, "ratios", lambda *_, **__: ({"ratio": ratio, "device": device}, []))
    result = checks_compute.alone(session, 30)
    assert result.verdict == verdict and f"{100 * ratio:.2f} % of native throughput" in result.note


def test_uncounted_work_is_missed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_compute, "ratios", lambda *_, **__: ({"ratio": 0.3, "device": 0.3}, ["no"]))
    assert checks_compute.alone(session, 30).verdict == "missed"


@pytest.mark.parametrize(("low", "high", "verdict"), [(0.98, 1.01, "held"), (0.97, 0.98, "missed"), (0.5, 1.5, "held")])
def test_unlimited_speed_is_native_within_the_interval(
    session: Session, monkeypatch: pytest.MonkeyPatch, low: float, high: float, verdict: str
) -> None:
    values = {"ratio": (low + high) / 2, "ci95": [low, high]}
    monkeypatch.setattr(checks_compute, "ratios", lambda *_, **__: (values, []))
    assert checks_compute.uncapped(session).verdict == verdict


# Device time of two shares, in percent
@pytest.mark.parametrize(
    ("together", "verdict"),
    [
        ((30.0, 70.0), "held"),
        ((28.5, 66.5), "held"),  # 5 % is lost to switches
        ((33.0, 67.0), "missed"),  # one has too much
        ((25.0, 70.0), "missed"),  # one lacks time that the other does not
        ((25.5, 59.5), "missed"),  # both lack too much
        ((47.5, 47.5), "missed"),  # no limits
        ((0.0, 0.0), "missed"),
    ],
)
@pytest.mark.parametrize("by_device", [True, False])
def test_verdict_on_shares_in_company(together: tuple[float, float], verdict: str, by_device: bool) -> None:
    """Throughput decides only where the device time is not known."""
    other = 123.0
    shares = [Rate(other if by_device else 10 * one, one / 100 if by_device else None) for one in together]
    result = checks_compute.judge((30, 70), shares, 1000, [])
    assert result.verdict == verdict and f"{together[0]:.2f} % and {together[1]:.2f} %" in result.note
    assert ("12.30 % and 12.30 % of native throughput" in result.note) is by_device


def at(begin: float, end: float) -> dict[str, Any]:
    return {"from_s": begin, "to_s": end, "per_s": 100.0, "device": 0.3, "counted": 1.0}


def test_programs_that_did_not_overlap_are_an_error() -> None:
    checks_compute.need_overlap([at(10, 11), at(10.1, 11.1)])
    for other in (at(10.5, 11.5), at(11, 12), at(20, 21), at(10, 10.5)):
        with pytest.raises(processes.Failed, match="did not run at the same time: [0-9.]+ s of 1.00 s in common"):
            checks_compute.need_overlap([at(10, 11), other])


def bench(session: Session, monkeypatch: pytest.MonkeyPatch, torch: str = "") -> checks_compute.Bench:
    monkeypatch.setattr(Session, "ask", lambda *_, **__: {"rounds": 1, "blocks": 1})
    return checks_compute.Bench(session, contextlib.ExitStack(), torch)


def test_programs_that_did_not_overlap_run_again(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    first, late = PreparedTenant(*[at(10, 11)] * 3), PreparedTenant(at(20, 21), at(20, 21), at(10, 11))
    tenants: Any = [first, late]
    assert bench(session, monkeypatch).rates(*tenants) == [Rate(100.0, 0.3)] * 2
    tenants = [PreparedTenant(*[at(10, 11)] * 3), PreparedTenant(*[at(20, 21)] * 3)]
    with pytest.raises(processes.Failed, match="did not run at the same time"):
        bench(session, monkeypatch).rates(*tenants)
    assert len(late.lines) == len(tenants[1].lines) == 3


def test_programs_begin_behind_a_barrier(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    tenants: Any = [PreparedTenant(at(10, 11)), PreparedTenant(at(10, 11))]
    rates = bench(session, monkeypatch).rates(*tenants)
    assert rates == [Rate(100.0, 0.3)] * 2
    assert tenants[0].lines == tenants[1].lines and tenants[0].lines[0]["at"] > time.monotonic() - 1


def test_device_time_of_pytorch_is_known_only_alone(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench(session, monkeypatch, "torch_work")
    alone: Any = PreparedTenant(at(10, 11))
    assert made.rates(alone) == [Rate(100.0, 0.3)]
    both: Any = [PreparedTenant(at(10, 11)), PreparedTenant(at(10, 11))]
    assert made.rates(*both) == [Rate(100.0, None)] * 2


def test_device_time_of_launches_leaves_out_idle_time() -> None:
    """Launches back to back, then a pause, then one that had to wait for the limiter; the device's clock is 5 s off."""
    units = [Unit(100.0, 95.2), Unit(100.0, 95.4), Unit(100.0, 95.6), Unit(100.9, 96.0)]
    assert pytorch.device_time(units, 5.0, 100.0, 101.0) == pytest.approx(0.6 + 0.1)
    assert pytorch.device_time(units, 5.0, 100.3, 100.95) == pytest.approx(0.3 + 0.05), "only what is in the window"
    assert pytorch.device_time([], 5.0, 100.0, 101.0) == 0


def spinners(count: int = 20) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what two programs report that run for 2 ms each, with switches of 0.1 ms."""
    turn = 2 * MS + MS // 10
    one = [[2 * MS + 2 * turn * i, 2 * turn * (i + 1), 2 * turn] for i in range(count)]
    other = [[begin + turn, end + turn, 2 * turn] for begin, end, _ in one]
    return {"begin": 0, "end": one[-1][1] + MS, "gaps": one}, {"begin": turn, "end": other[-1][1] + MS, "gaps": other}


def test_slices_and_switches_are_computed_from_the_pauses(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(PreparedTenant({}, program) for program in spinners() * 2)
    monkeypatch.setattr(Session, "tenant", lambda *_, **__: next(answers))
    values = checks_switches.slices(session).values
    assert values["slice_ns"]["median"] == 2 * MS
    assert values["timeline_ns"][0][:2] == [[2 * MS, 42 * MS // 10], [62 * MS // 10, 84 * MS // 10]]
    assert values["switch_ns"] == values["full_switches_ns"]["median"] == MS // 10
    assert values["switches_ns"]["n"] == 39, "each but the first, at which the second program began"
    assert (values["clock_step_ns"], values["ticks_per_gap_ns"]) == (MS // 10, pytest.approx(42 / 22))


def test_programs_that_did_not_alternate_have_no_slices(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(PreparedTenant({}, {"begin": 0, "end": MS, "gaps": []}) for _ in range(4))
    monkeypatch.setattr(Session, "tenant", lambda *_, **__: next(answers))
    result = checks_switches.slices(session)
    assert "slice_ns" not in result.values and result.values["interruptions"] == 0


def test_hand_overs_to_short_kernels_and_back_differ(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempting takes 150 us, giving back 20; another kernel ran after the long one's end."""
    gaps = [[5 * MS * i, 5 * MS * i + 370_000, 0] for i in range(1, 10)]
    bursts = [[begin + 150_000, end - 20_000] for begin, end, _ in gaps] + [[60 * MS, 61 * MS]]
    spinner = PreparedTenant({}, {"begin": 0, "end": 55 * MS, "gaps": gaps})
    answers = iter((spinner, PreparedTenant({}, {"bursts": bursts})))
    monkeypatch.setattr(Session, "tenant", lambda *_, **__: next(answers))
    values = checks_switches.handed_over(session).values
    assert (values["preempt_ns"]["median"], values["idle_ns"]["median"]) == (150_000, 20_000)
    assert (values["preempt_ns"]["n"], values["bursts"]) == (9, 10)


CLOCK = 7_000_000_123  # host time at which the device's clock was 0
KERNEL = MS // 10
PAIR_TURNS = range(20)


def own_kernels() -> list[tuple[int, int, int]]:
    """Return kernels of a process that has the device in the first 2 ms of each 4, and always has work in the queue.

    One event that did not wait reveals the clock's offset.
    """
    ends = [4 * MS * turn + KERNEL * part for turn in PAIR_TURNS for part in range(1, 21)]
    return [(CLOCK + max(0, end - 3 * MS), end, 0) for end in ends]


def probes_at(done: Callable[[int], int]) -> list[tuple[int, int, int]]:
    """Return a probe every 0.2 ms, except while the preceding probe is not done.

    `done` returns the device time at which a probe is done, given the time at which it was recorded.
    """
    found, now = [], MS // 100
    while now < 4 * MS * PAIR_TURNS[-1]:
        found.append((CLOCK + now, done(now), 0))
        now = max(now + MS // 5, found[-1][1])
    return found


def own_residency(now: int) -> int:
    return now if now % (4 * MS) < 2 * MS else now - now % (4 * MS) + 4 * MS


@pytest.mark.parametrize(
    ("done", "holds", "words"),
    [
        (own_residency, True, "19 of 19 probes"),
        (lambda now: now, False, "were done while the neighbour had the device"),
        (
            lambda now: own_residency(now) + (own_residency(now) > now) * MS,
            False,
            "were done later than own work of that residency",
        ),
        (
            lambda now: own_residency(now) - (own_residency(now) > now) * MS // 2,
            False,
            "while the neighbour had the device",
        ),
    ],
)
def test_probes_show_when_the_own_residency_began(done: Callable[[int], int], holds: bool, words: str) -> None:
    seen = checks_looks.told(own_kernels(), probes_at(done), 2 * MS, KERNEL)
    assert checks_looks.judge([1000] * 10, seen)[0] is holds
    assert words in checks_looks.judge([1000] * 10, seen)[1], seen


def test_probes_without_queued_work_do_not_count() -> None:
    """Such a residency does not count, so no probe is judged by it."""
    kernels = [(CLOCK + end - KERNEL, end, 0) for _, end, _ in own_kernels()]
    assert sum(checks_looks.told(kernels, probes_at(lambda now: now), 2 * MS, KERNEL)) == 0


def test_delayed_or_too_few_probes_do_not_hold() -> None:
    right = checks_looks.Told(early=0, told=50, late=0)
    for alone, seen, holds, words in (
        ([1000] * 9 + [90_000], right, True, "holds: 50 of 50"),
        ([1000] * 8 + [90_000] * 2, right, False, "alone only 80 % are done within 45 us"),
        ([1000], checks_looks.Told(0, 2, 0), False, "only 2 probes"),
    ):
        said = checks_looks.judge(alone, seen)
        assert said[0] is holds and words in said[1]


def test_waits_are_relative_to_the_shortest() -> None:
    looks = [(CLOCK + at, at + late, 0) for at, late in ((0, 3000), (MS, 2000), (2 * MS, 2 * MS))]
    assert checks_looks.waited(looks) == [0, 1000, 2 * MS - 2000]
    spread = checks_looks.spread(checks_looks.waited(looks), 2 * MS)
    assert (spread["p50_ns"], spread["max_ns"], spread["beyond_half_a_slice"]) == (1000, 2 * MS - 2000, 1 / 3)
    assert checks_looks.lost([100, 100], [98, 96])["percent"] == pytest.approx(3)


@pytest.mark.parametrize(("share", "verdict"), [(0.31, "held"), (0.35, "missed"), (0.2, "missed")])
def test_verdict_on_programs_of_many_kinds(
    session: Session, monkeypatch: pytest.MonkeyPatch, share: float, verdict: str
) -> None:
    def busy(_: Session, place: Optional[Any], **__: Any) -> dict[str, float]:
        return {"share": share if place else 0.99}

    monkeypatch.setattr(checks_busy, "busy", busy)
    monkeypatch.setattr(Session, "place", lambda *_, **__: PreparedTenant())
    assert checks_busy.shapes(session).verdict == verdict


def test_kinds_before_the_end_of_the_time_are_reported(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([0.99, 0.30, 0.99, 0.31])

    def busy(*_: Any, **__: Any) -> dict[str, float]:
        share = next(answers, None)
        if share is None:
            raise processes.Failed("busy: timed out")
        return {"share": share}

    monkeypatch.setattr(checks_busy, "busy", busy)
    monkeypatch.setattr(Session, "place", lambda *_, **__: PreparedTenant())
    result = checks_busy.shapes(session)
    assert result.verdict == "failed" and len(result.values) == len(checks_busy.SHAPES)
    assert result.note.startswith(
        "limit 30 %: kernels of 50 us: 30.00 %, of 20 ms: 31.00 %; without a result: log-normal"
    )


def test_deadlocked_kernels_are_missed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"stuck": 2, "done": 1, "longest_call_ns": 5e9}
    monkeypatch.setattr(checks_busy, "busy", lambda *_, **__: said)
    monkeypatch.setattr(Session, "place", lambda *_, **__: PreparedTenant())
    assert checks_busy.pairs(session).verdict == "missed"
    said["done"] = 2
    assert checks_busy.pairs(session).verdict == "held"


@pytest.mark.parametrize(("seconds", "verdict"), [(0.01, "missed"), (0.7, "held"), (9.0, "held"), (30.0, "missed")])
def test_verdict_on_waiting_streams(
    session: Session, monkeypatch: pytest.MonkeyPatch, seconds: float, verdict: str
) -> None:
    answers = iter(({"rounds": 1, "blocks": 1}, {"kernels": 30, "seconds": seconds}))
    monkeypatch.setattr(Session, "ask", lambda *_, **__: next(answers))
    monkeypatch.setattr(Session, "place", lambda *_, **__: PreparedTenant())
    assert checks_compute.waiting(session).verdict == verdict


def test_interval_uses_students_t() -> None:
    mean, low, high = interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert high - mean == pytest.approx(4.30 / math.sqrt(3))
    assert mean - low == pytest.approx(high - mean)
