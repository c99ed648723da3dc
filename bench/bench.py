"""Measure what gpushare costs: prints a table and writes build/bench.json (`make bench`).

The keys of the file are flat. Each value is {median, p99, n, unit, low, high}; [low, high] is the 95 % confidence
interval of the median. Benchmarks do not pass or fail: tests check the bounds.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from rich import box
from rich.console import Console
from rich.table import Table

from bench import compute, elastic, nri, oversub, scrape, start
from simulator.simhost import make_simhost
from tests.limiter import matrix, reaction
from tests.support import host, judge
from tests.support.runc import Container

GIB = 1 << 30
STRESS_PROCESSES = 8
STRESS_ATTEMPTS = 20_000


class Figure(NamedTuple):
    """One measured number."""

    median: float
    p99: float
    n: int
    unit: str
    low: Optional[float] = None  # the confidence interval of the median; None without the samples
    high: Optional[float] = None


def figure(values: Sequence[float], unit: str) -> Figure:
    """Return the median with its confidence interval from order statistics (binomial, normal approximation)."""
    ordered = sorted(values)
    n = len(ordered)
    away = 0.98 * math.sqrt(n)
    low, high = max(0, math.floor(n / 2 - away)), min(n - 1, math.ceil(n / 2 + away))
    p99 = ordered[min(n - 1, int(n * 0.99))]
    return Figure(statistics.median(ordered), p99, n, unit, ordered[low], ordered[high])


def start_cost(directory: Path) -> dict[str, Figure]:
    """Measure the time of `runc create`, and what the hook and the runtime add to it."""
    return {key: figure(values, "ms") for key, values in start.added_ms(directory).items()}


def nri_cost(directory: Path) -> dict[str, Figure]:
    """Measure what the NRI plugin adds to a CreateContainer of containerd."""
    return {"nri.added_ms": figure(nri.added_ms(directory), "ms")}


def overshoot(directory: Path) -> dict[str, Figure]:
    """Run eight processes at the memory limit and compare the limit with the peak on the simulated GPU."""
    simulated = make_simhost(directory / "host", gpus=1, memory_bytes=16 * GIB)
    node = host.Node(directory / "node", simulated)
    limit_bytes = 4 * GIB
    program = Path(__file__).with_name("stress.py")
    args = [host.PYTHON, f"/opt/{program.name}", str(STRESS_PROCESSES), str(STRESS_ATTEMPTS)]
    try:
        with Container(
            directory,
            args,
            env={"GPUSHARE_MEMORY": str(limit_bytes)},
            hook=node.hook(),
            mounts=host.python_mounts(program),
        ) as container:
            container.create()
            namespace = (Path(f"/proc/{container.pid}/ns/pid")).stat().st_ino
            if container.run(timeout_s=300):
                raise RuntimeError(f"the stress program failed: {container.stderr}")
            counts = json.loads(container.stdout)
            if not counts["refused"]:
                raise RuntimeError("the stress program never reached its limit, so it shows nothing")
            over = max(0, judge.peak_bytes(simulated, namespace) - limit_bytes)
            return {"memory.overshoot_bytes": Figure(over, over, STRESS_PROCESSES * STRESS_ATTEMPTS, "bytes")}
    finally:
        node.close()


def shim_cost(directory: Path) -> dict[str, Figure]:
    """Measure the nanoseconds that the shim adds, with bench/shim_bench.c."""
    done = subprocess.run([host.BUILD / "bench" / "shim_bench"], capture_output=True, text=True, cwd=directory)
    if done.returncode:
        raise RuntimeError(f"shim_bench: {done.stderr.strip()}")
    return {key: Figure(**value) for key, value in json.loads(done.stdout).items()}


def scrape_cost(directory: Path) -> dict[str, Figure]:
    """Measure a scrape of `gpushare export` on a host with a hundred shares."""
    took = scrape.scrapes_ms(directory)
    return {
        f"export.scrape_{scrape.SHARES}_ms": figure(took.scrapes, "ms"),
        f"export.scrape_{scrape.SHARES}_cpu_ms": Figure(took.processor, took.processor, scrape.SCRAPES, "ms"),
    }


COMPUTE_UNITS = {
    "compute.mae_pp_1s": "points",
    "compute.mae_pp_100ms": "points",
    "compute.jain": "index",
    "compute.settling_ms": "ms",
    "compute.throughput_ratio": "ratio",
    "compute.unlimited_loss": "percent",
}


def compute_shares(_directory: Path) -> dict[str, Figure]:
    """Measure, in virtual time, how closely the rate limiter holds each share of tests/limiter/matrix.py. Cells of
    misses.json count too."""
    found = {**matrix.figures(matrix.measure(matrix.cells())), **reaction.figures()}
    figures = {key: figure(values, COMPUTE_UNITS[key]) for key, values in found.items()}
    # for these keys low values are bad, so p99 is at the low end
    for key in ("compute.jain", "compute.throughput_ratio"):
        low = figure([-value for value in found[key]], COMPUTE_UNITS[key])
        figures[key] = figure(found[key], COMPUTE_UNITS[key])._replace(p99=-low.p99)
    return figures


def compute_in_containers(_directory: Path) -> dict[str, Figure]:
    """Measure the worst tenant's distance from its limit in real containers, five runs of five seconds per scenario."""
    figures: dict[str, Figure] = {}
    steals = []
    for scenario in compute.SCENARIOS:
        runs = list(compute.runs(scenario))
        figures[f"compute.real_error_pp.{scenario.name}"] = figure(
            [compute.wrong_by(scenario, run) for run in runs], "points"
        )
        steals += [run.steal for run in runs]
    return {**figures, "compute.real_steal": figure(steals, "percent")}


def oversubscribed(_directory: Path) -> dict[str, Figure]:
    """Measure the slowdown from using more memory than the device has, with tenants that run at will and with tenants
    that alternate (migration slices)."""
    return {key: figure(values, "ratio") for key, values in oversub.slowdowns().items()}


def reclaimed(_directory: Path) -> dict[str, Figure]:
    """Measure how long an allocation waits for memory that another container has borrowed."""
    return {key: figure(values, "ms") for key, values in elastic.reclaims_ms().items()}


def show(figures: dict[str, Figure]) -> None:
    table = Table(box=box.SIMPLE, show_edge=False)
    table.add_column("what")
    for heading in ("median", "95% interval", "p99", "n"):
        table.add_column(heading, justify="right")
    table.add_column("unit")
    for key, value in sorted(figures.items()):
        digits = 3 if value.unit in ("points", "index", "ratio", "percent") else 1
        ends = [f"{end:,.{digits}f}" for end in (value.low, value.high) if end is not None]
        numbers = (f"{value.median:,.{digits}f}", " to ".join(ends), f"{value.p99:,.{digits}f}", f"{value.n:,}")
        table.add_row(key, *numbers, value.unit)
    Console(highlight=False).print(table)


def main() -> int:
    host.enter_private_mounts()
    figures: dict[str, Figure] = {}
    for measure in (
        shim_cost,
        compute_shares,
        compute_in_containers,
        oversubscribed,
        reclaimed,
        overshoot,
        scrape_cost,
        start_cost,
        nri_cost,
    ):
        with tempfile.TemporaryDirectory(prefix="bench-", dir=host.BUILD) as work:
            figures.update(measure(Path(work)))
    content: dict[str, Any] = {key: value._asdict() for key, value in sorted(figures.items())}
    (host.BUILD / "bench.json").write_text(json.dumps(content, indent=2) + "\n")
    show(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
