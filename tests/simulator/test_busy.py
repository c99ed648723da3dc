"""The tenant of the compute tests (tests/integration/programs/busy.c) on the simulated driver."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.busy import Busy, build

MODES: dict[str, dict[str, Any]] = {
    "stream": {"kernel": 1000},
    "short": {"kernel": "5,50"},
    "streams": {"kernel": "lognormal", "streams": 8},
    "sync": {"mode": "sync", "kernel": "bimodal"},
    "graph": {"mode": "graph", "kernel": 100, "nodes": 20},
    "pause": {"mode": "pause", "jitter": 5, "threads": 2, "processes": 2},
}


@pytest.mark.parametrize("name", MODES)
def test_each_mode_gets_work_done(name: str, simhost: Path) -> None:
    with Busy(simhost, seconds=0.2, **MODES[name]) as busy:
        busy.go()
        said = busy.result()
    assert said["failed"] == "" and said["stuck"] == 0 and 0 < said["done"] <= said["launches"]
    took_ns = said["ended_ns"] - said["started_ns"]
    assert 0.05 * took_ns < said["done_ns"] < took_ns + 10_000_000


def test_signal_ends_it_with_the_same_line(simhost: Path) -> None:
    with Busy(simhost, seconds=1000, processes=2) as busy:
        busy.go()
        busy.process.send_signal(signal.SIGTERM)
        said = busy.result(timeout_s=10)
    assert busy.process.returncode == 0 and said["ended_ns"] - said["started_ns"] < 5_000_000_000


def test_drained_work_is_done(simhost: Path) -> None:
    with Busy(simhost, seconds=0.2, kernel=20000, ahead=40000, drain=1) as busy:
        busy.go()
        said = busy.result()
    assert said["done"] == said["launches"] and said["done_ns"] == said["asked_ns"] == said["done"] * 20_000_000


def test_missing_driver_is_reported(tmp_path: Path) -> None:
    done = subprocess.run([build(), "--seconds", "1"], capture_output=True, text=True, timeout=20, cwd=tmp_path)
    said = json.loads(done.stdout)
    assert done.returncode == 1 and said["failed"] == "cuInit" and said["launches"] == 0


def test_wrong_option_is_one_line() -> None:
    done = subprocess.run([build(), "--mode", "idle"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "idle" in done.stderr
