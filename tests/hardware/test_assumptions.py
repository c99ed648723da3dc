"""Verdicts on assumptions: a check's figures in, "confirmed", "refuted" or "unclear" out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.hardware import assumptions, report
from tests.hardware.assumptions import ASSUMPTIONS
from tests.hardware.checks import CHECKS
from tests.hardware.place import TREE

MIB = 1 << 20
GIB = 1 << 30


def steps(*used: int, loaded: int = 0) -> dict[str, Any]:
    counts = zip((1, 10, 100), used)
    return {"steps": [{"modules": n, "loaded_bytes": loaded, "used_bytes": one * MIB} for n, one in counts]}


def modules(native: dict[str, Any], shim: dict[str, Any]) -> dict[str, Any]:
    return {"lazy": {"native": native, "shim": shim}}


def spread(us: float) -> dict[str, Any]:
    return {"median": us * 1000, "p90": us * 1100, "n": 9}


def memory(reserved: int = 0, got: Any = 79 * GIB, cuda: int = 80 * GIB) -> dict[str, Any]:
    totals = {"v1_total": 80 * GIB, "v2_total": 80 * GIB, "v2_reserved": reserved, "cuda_total": cuda}
    return {**totals, "free_with_context": 79 * GIB, "got_bytes": got}


def descriptors(distinct: bool, lost: int = 0) -> dict[str, Any]:
    rows = [{"link": "/dev/nvidiactl"}]
    return {
        "descriptors": rows,
        "distinct": distinct,
        "stable": True,
        "cycles": 300,
        "after_cycles": {"lost_bytes": lost},
    }


def runtime(version: int, taken: int, code: int = 0) -> dict[str, Any]:
    seen = {"steps": {"cudaFree": code}, "taken_bytes": taken, "table_bytes": 16 * MIB}
    return {"runtimes": {str(version): {"native": seen, "shim": seen}}}


def forks(killed: int = GIB, exited: int = 0) -> dict[str, Any]:
    left = {"killed": killed, "exited": exited}
    return {name: {"held_bytes": GIB, "left_bytes": bytes_, "after_child_bytes": 0} for name, bytes_ in left.items()}


def green(code: int = 0, refused: int = 0, launched: int = 3000) -> dict[str, Any]:
    shim = {"launched": 900, "refused": {"700": refused} if refused else {}}
    native = {"codes": {"event of primary in stream of green": code}, "launched": launched}
    return {"native": native, "shim": shim, "percent": 30.0}


def framework(charged: int) -> dict[str, Any]:
    return {"total_bytes": 4 * GIB, "free_bytes": 4 * GIB - charged, "used_bytes": GIB}


def nccl(together: bool, alone: bool) -> dict[str, Any]:
    def rank(right: bool) -> list[dict[str, Any]]:
        return [{"sum": 8 if right else None, "right": 8, "error": "Duplicate GPU detected"}]

    return {"two_ranks": rank(together), "alone": rank(alone)}


FIGURES: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("context.estimate", {"first_bytes": 500 * MIB, "estimate_bytes": 512 * MIB}, "confirmed"),
    ("context.estimate", {"first_bytes": 616 * MIB, "estimate_bytes": 512 * MIB}, "refuted"),
    ("context.listed", {"first_bytes": 500 * MIB, "process_bytes": 491 * MIB}, "confirmed"),
    ("context.listed", {"first_bytes": 500 * MIB, "process_bytes": 400 * MIB}, "refuted"),
    ("context.listed", {"first_bytes": 500 * MIB, "process_bytes": None}, "unclear"),
    ("forks.killed", forks(), "confirmed"),
    ("forks.killed", forks(killed=0), "refuted"),
    ("forks.exited", forks(), "confirmed"),
    ("forks.exited", forks(exited=GIB), "refuted"),
    ("modules.covered", modules(steps(2, 2, 4), steps(2, 2, 4)), "confirmed"),
    ("modules.covered", modules(steps(2, 20, 200), steps(2, 2, 4)), "refuted"),
    ("modules.covered", modules(steps(2, 20, 200), {"missing": "no shim"}), "unclear"),
    ("modules.exact", modules(steps(2, 2, 4), steps(2, 4, 8)), "confirmed"),
    ("modules.exact", modules(steps(2, 2, 4), steps(2, 20, 200)), "refuted"),
    ("modules.lazy", modules(steps(2, 2, 40), steps(2)), "confirmed"),
    ("modules.lazy", modules(steps(2, 2, 40, loaded=40 * MIB), steps(2)), "refuted"),
    ("modules.lazy", modules(steps(2, 2, 2), steps(2)), "unclear"),
    ("local.covered", {"native": {"used_bytes": 2 * GIB}, "shim": {"used_bytes": 2 * GIB}}, "confirmed"),
    ("local.covered", {"native": {"used_bytes": 2 * GIB}, "shim": {"used_bytes": 0}}, "refuted"),
    ("reserved.v1", memory(), "confirmed"),
    ("reserved.v1", memory(reserved=GIB, cuda=79 * GIB), "confirmed"),
    ("reserved.v1", memory(cuda=79 * GIB), "refuted"),
    ("reserved.v1", memory(got=None), "unclear"),
    ("reserved.v2", memory(reserved=GIB, cuda=79 * GIB), "confirmed"),
    ("reserved.v2", memory(reserved=GIB, cuda=78 * GIB), "refuted"),
    ("reserved.v2", memory(got=77 * GIB), "refuted"),
    ("reserved.v2", memory(got=None), "unclear"),
    ("preemption", {"interruptions": 400}, "confirmed"),
    ("preemption", {"interruptions": 0}, "refuted"),
    ("slice", {"slice_ns": {"median": 1_024_000}}, "confirmed"),
    ("slice", {"interruptions": 0}, "unclear"),
    ("slice", {"slice_ns": {"median": 60_000_000}}, "refuted"),
    ("switch", {"switches_ns": spread(125)}, "confirmed"),
    ("switch", {"switches_ns": spread(15)}, "refuted"),
    ("switch", {"interruptions": 0}, "unclear"),
    ("switch.full", {"full_switches_ns": None}, "unclear"),
    ("switch.full", {"full_switches_ns": spread(300)}, "confirmed"),
    ("switch.full", {"full_switches_ns": spread(900)}, "refuted"),
    ("switch.alike", {"preempt_ns": spread(150), "idle_ns": spread(100)}, "confirmed"),
    ("switch.alike", {"preempt_ns": spread(250), "idle_ns": spread(15)}, "refuted"),
    ("probe", {"holds": True, "in_a_turn_of_the_neighbour": {"early": 0, "told": 9, "late": 0}}, "confirmed"),
    ("probe", {"holds": False, "in_a_turn_of_the_neighbour": {"early": 9, "told": 0, "late": 0}}, "refuted"),
    ("descriptors", descriptors(False), "confirmed"),
    ("descriptors", descriptors(True), "refuted"),
    ("exports.end", descriptors(True), "confirmed"),
    ("exports.end", descriptors(True, lost=2240 * MIB), "refuted"),
    ("loader.old", runtime(11, 16 * MIB), "confirmed"),
    ("loader.old", runtime(11, 0), "refuted"),
    ("loader.old", runtime(13, 16 * MIB), "unclear"),
    ("loader.new", runtime(13, 16 * MIB), "confirmed"),
    ("loader.new", runtime(13, 0), "refuted"),
    ("loader.new", runtime(13, 0, code=35), "unclear"),
    ("green.events", green(), "confirmed"),
    ("green.events", green(code=400), "refuted"),
    ("framework.covered", framework(GIB), "confirmed"),
    ("framework.covered", framework(GIB - MIB), "refuted"),
    ("framework.exact", framework(GIB), "confirmed"),
    ("framework.exact", framework(2 * GIB), "refuted"),
    ("nccl", nccl(together=True, alone=True), "confirmed"),
    ("nccl", nccl(together=False, alone=True), "confirmed"),
    ("nccl", {"alone": nccl(True, alone=True)["alone"]}, "confirmed"),
    ("nccl", {"alone": nccl(True, alone=False)["alone"]}, "refuted"),
    ("nccl", nccl(together=False, alone=False), "refuted"),
    ("green.launches", green(), "confirmed"),
    ("green.launches", green(refused=300), "refuted"),
    ("green.launches", green(refused=300, launched=0), "unclear"),
)


@pytest.mark.parametrize(("name", "values", "verdict"), FIGURES)
def test_figures_decide(name: str, values: dict[str, Any], verdict: str) -> None:
    row = next(row for row in ASSUMPTIONS if row.id == name)
    (finding,) = (
        one
        for one in assumptions.findings({row.check: {"verdict": "measured", "note": "", "values": values}})
        if one.assumption is row
    )
    assert finding.verdict == verdict and finding.figure, finding.figure


def test_every_judge_has_figures_that_it_confirms_and_refutes() -> None:
    for row in ASSUMPTIONS:
        if row.judge:
            assert {verdict for name, _, verdict in FIGURES if name == row.id} >= {"confirmed", "refuted"}, row.id


@pytest.mark.parametrize(
    ("verdict", "found"),
    [
        ("held", "confirmed"),
        ("missed", "refuted"),
        ("absent", "unclear"),
        ("failed", "unclear"),
        ("not run", "unclear"),
    ],
)
def test_verdict_of_the_check_decides_without_a_judge(verdict: str, found: str) -> None:
    (finding,) = assumptions.findings({"compute.30_70": {"verdict": verdict, "note": "why", "values": {}}})
    assert (finding.verdict, finding.figure) == (found, "why")


def test_missing_figures_are_unclear() -> None:
    (finding,) = assumptions.findings({"hand-over": {"verdict": "measured", "note": "", "values": {"bursts": 0}}})
    assert finding.verdict == "unclear" and "preempt_ns" in finding.figure


def test_assumptions_name_checks_and_files_of_the_project() -> None:
    assert {row.check for row in ASSUMPTIONS} <= {check.name for check in CHECKS}
    assert len({row.id for row in ASSUMPTIONS}) == len(ASSUMPTIONS)
    for row in ASSUMPTIONS:
        assert (TREE / row.relies_on).exists(), row.relies_on
        assert row.sentence.endswith("."), row.id


def test_refuted_assumption_is_printed_with_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    check = {"verdict": "measured", "note": "", "values": {"first_bytes": 616 * MIB, "estimate_bytes": 512 * MIB}}
    report.tell(assumptions.findings({"context": check})[:1])
    assert capsys.readouterr().out == (
        "  REFUTES context.estimate: A context costs what the estimate says, or less. 616 MiB of an estimated 512 MiB; "
        "hook/gpushare/gpu/inventory.py relies on it\n"
    )
