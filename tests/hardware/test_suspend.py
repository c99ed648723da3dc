"""Judge what a driver's checkpoints did."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from simulator.simhost import LIBDIR
from tests.hardware import processes
from tests.hardware.checks_suspend import judged

GIB = 1 << 30


def seen(**other: Any) -> dict[str, Any]:
    """Return the values of a driver that frees 20 GiB and gives them back, except for the `other` ones."""
    counts = {"used_bytes": 21 * GIB, "process_bytes": 21 * GIB}
    suspended = {"used_bytes": other.pop("suspended_bytes", 0), "process_bytes": other.pop("listed_bytes", None)}
    values = {
        "bytes": 20 * GIB,
        "calls": {"Checkpoint": {"seconds": 5.0}, "Restore": {"seconds": 2.5}},
        "device": {"before": counts, "suspended": suspended, "resumed": counts},
        "neighbour_bytes": 78 * GIB,
        "wrong_pieces": 0,
    }
    return {**values, **other}


def test_good_driver_is_measured() -> None:
    result = judged(seen(), [], 80 * GIB)
    assert result.verdict == "held"
    assert (result.values["checkpoint_gib_s"], result.values["restore_gib_s"]) == (4.0, 8.0)
    assert "checkpoint 5.00 s (4.0 GiB/s)" in result.note and "0 bytes while suspended" in result.note


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"suspended_bytes": 2 * GIB}, "only 19 GiB of 20 GiB became free"),
        ({"listed_bytes": GIB}, "NVML lists the suspended process"),
        ({"neighbour_bytes": 59 * GIB}, "another program got only 59 GiB, and 59 GiB were free before"),
        ({"wrong_pieces": 3}, "3 of 320 pieces have another content"),
    ],
)
def test_driver_that_breaks_the_promise_misses(other: dict[str, Any], words: str) -> None:
    result = judged(seen(**other), [], 80 * GIB)
    assert (result.verdict, result.note) == ("missed", words)


def test_failed_call_is_named() -> None:
    assert judged({}, ["Restore gave 304 and the state is unknown"], 80 * GIB).note.startswith("Restore gave 304")


def test_older_driver_has_no_result(simhost: Path) -> None:
    library = str(simhost / LIBDIR / "libcuda.so.1")
    with pytest.raises(processes.Absent, match="no checkpoint API, which is in drivers from 570 on"):
        processes.ask("checkpointer", time.monotonic() + 30, library=library)
