"""Run build/throttle/vt and compute shares, errors and fairness from the device's ledger."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

TREE = Path(__file__).resolve().parents[2]
VT = TREE / "build/throttle/vt"
BIN_MS = 10
WARM_MS = 500
LIMITS = (5, 10, 25, 30, 50, 70, 90)
KERNELS = ("5us", "50us", "1ms", "20ms", "lognormal", "bimodal")
PROGRAMS = ("stream", "streams", "graph", "sync", "pause")
# The duration of the longest launch in milliseconds: a graph is one launch.
LAUNCH_MS = {"5us": 0.01, "50us": 0.1, "1ms": 1.3, "20ms": 26.0, "lognormal": 1.0, "bimodal": 1.3}


class Tenant(NamedTuple):
    """One container. Other options of vt go into `more`."""

    limit: float
    kernel: str = "50us"
    program: str = "stream"
    processes: int = 1
    more: str = ""

    def word(self) -> str:
        words = f"limit={self.limit},kernel={self.kernel},program={self.program},processes={self.processes}"
        return f"{words},{self.more}" if self.more else words

    def launch_ms(self) -> float:
        """Return the longest single launch, which no rate limiter can divide."""
        nodes = {"1ms": 3, "20ms": 2}.get(self.kernel, 1) if self.program == "graph" else 1
        return LAUNCH_MS[self.kernel] * nodes


class Ledger(NamedTuple):
    """The device time that one container received, in nanoseconds."""

    held_ns: int
    work_ns: int
    switch_ns: int
    done: int
    launches: int
    fewest: int  # launches of one of its processes
    marks: int
    slow: int
    forbidden: int
    waited_ns: int
    charged_ns: int
    recent_ns: int
    bins: tuple[int, ...]
    request_us: tuple[int, ...]  # of an interactive program

    def shares(self, window_ms: int, start_ms: int = WARM_MS) -> list[float]:
        """Return the percentage of each whole window."""
        n = window_ms // BIN_MS
        bins = self.bins[start_ms // BIN_MS :]
        return [sum(bins[i : i + n]) / (window_ms * 10_000) for i in range(0, len(bins) - n + 1, n)]

    def share(self, start_ms: int = WARM_MS) -> float:
        bins = self.bins[start_ms // BIN_MS :]
        return sum(bins) / (len(bins) * BIN_MS * 10_000)

    def mae(self, target: float, window_ms: int, start_ms: int = WARM_MS) -> float:
        """Return the mean distance from the target, in percentage points."""
        shares = self.shares(window_ms, start_ms)
        return sum(abs(share - target) for share in shares) / len(shares)


def simulate(tenants: Sequence[Tenant], *, program: Path | None = None, **world: object) -> list[Ledger]:
    """Run a simulation; the same arguments return the same ledger."""
    words = [f"{key}={value}" for key, value in world.items()]
    argv = [str(program or VT), *words, *(tenant.word() for tenant in tenants)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    if done.returncode or done.stderr:
        raise RuntimeError(f"{' '.join(argv)}: {done.returncode}\n{done.stderr}")
    rows: list[dict[str, Any]] = json.loads(done.stdout)["tenants"]
    return [Ledger(**{**row, "bins": tuple(row["bins"]), "request_us": tuple(row["request_us"])}) for row in rows]


def jain(values: Iterable[float]) -> float:
    """Return Jain's index of fairness: 1 when all values are equal."""
    xs = list(values)
    return sum(xs) ** 2 / (len(xs) * sum(x * x for x in xs))


def parallel(jobs: Sequence[Any], run: Any) -> list[Any]:
    """Call run(job) for each job, with one thread per processor."""
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        return list(pool.map(run, jobs))
