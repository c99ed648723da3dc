"""Threads and processes at once over the sanitized builds of the shim: no error is reported, and a planted one is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shim import stress_run
from tests.shim.box import GIB, TREE, Box
from tests.shim.sanitized import BUILD, build_program, build_shim, mill


@pytest.mark.parametrize("kill_ms", [0, 200])
def test_no_errors_under_address_sanitizer_and_ubsan(kill_ms: int) -> None:
    """Sixteen threads in each process allocate, launch, wait and fork while the limit changes."""
    did = mill("shim-asan", enough=2000, kill_ms=kill_ms)
    assert did.reports == ""
    assert did.report["wrong"] == "" and did.report["granted"] >= 2000 and did.report["launched"] >= 100
    assert len(set(did.report["used"])) == 1 and bool(did.report["killed"]) == bool(kill_ms)


def test_no_errors_with_an_oversubscribed_share() -> None:
    """The same while the residency boundary moves and some memory is prefetched: the sums of the parts stay right."""
    did = mill("shim-asan", enough=2000, kill_ms=200, whole=3 * GIB)
    assert did.reports == ""
    assert did.report["wrong"] == "" and did.report["granted"] >= 2000 and did.report["killed"]
    assert len(set(did.report["used"])) == 1 and max(did.report["used"]) <= 3 * GIB
    assert did.peak_bytes <= 2 * GIB


def test_no_errors_with_all_families_of_memory(tmp_path: Path) -> None:
    build_shim("shim-asan")
    program = build_program("shim-asan", TREE / "tests/shim/stress.c", tmp_path / "stress")
    with Box([1 * GIB], shim=BUILD / "shim-asan") as box:
        done = box.run([str(program), "2", "1000", "1", stress_run.FAMILIES], input="")
    assert (done.returncode, done.stderr) == (0, "")


def test_planted_race_is_reported() -> None:
    """The shim has none; make test-tsan looks for longer."""
    did = mill("shim-tsan", enough=200, planted=True)
    assert "data race" in did.reports and "mill.c" in did.reports
    assert " shim/" not in "".join(line for line in did.reports.splitlines() if line.startswith("SUMMARY"))
