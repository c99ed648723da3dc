"""The matrix of cells: workloads, and each tenant's distance from its target share.

`python -m tests.limiter.matrix` measures it and writes two files. misses.json lists the cells that do not hold with one
of the seeds, with their worst errors. figures.json has the figures of `make bench`, for docs/internals/limiter.md.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.limiter import reaction
from tests.limiter.cells import KERNELS, LIMITS, PROGRAMS, Tenant, jain, parallel, simulate

MISSES = Path(__file__).with_name("misses.json")
FIGURES = Path(__file__).with_name("figures.json")
MORE_IS_BETTER = ("compute.jain", "compute.throughput_ratio")
RUN_MS = 4500
SEEDS = (1, 2, 3)
# Programs that always have work: beside other containers their target is their limit.
SATURATING = ("stream", "streams", "graph")
COMPANIES: tuple[tuple[float, ...], ...] = (
    (30, 70),
    (50, 50),
    (25, 25),
    (5, 90),
    (10, 50),
    (10, 20, 30, 40),
    (25, 25, 25, 25),
    (10, 10, 10, 10),
    (12.5,) * 8,
    (5, 5, 5, 5, 10, 10, 30, 30),
)


SWITCH_US = (15, 50, 125, 250, 500)
SLICE_US = (500, 1024, 2000, 5000, 10_000, 30_000)
EVERY_NTH = 7  # of the cells with other switch costs is in the tests


class Cell(NamedTuple):
    """One run. `referenced`: a tenant's target is measured in a run without a limit for that tenant."""

    name: str
    tenants: tuple[Tenant, ...]
    referenced: bool = False
    world: Mapping[str, Any] = {}


class Error(NamedTuple):
    """The error of a cell's worst tenant in percentage points; `bound_*` is the largest error that holds."""

    mae_1s: float
    mae_100ms: float
    bound_1s: float
    bound_100ms: float
    jain: float
    tenants: int

    def holds(self) -> bool:
        return self.mae_1s <= self.bound_1s and self.mae_100ms <= self.bound_100ms


def switch_cells() -> list[Cell]:
    """Return 30 % beside 70 %, for all pairs of switch costs of at most a quarter of the slice.

    Each pair has two workloads.
    """
    found: list[Cell] = []
    workloads = list(itertools.product(KERNELS, ("stream", "sync")))
    for slice_us in SLICE_US:
        pairs = itertools.product([us for us in SWITCH_US if us <= slice_us / 4], repeat=2)
        for switch_us, preempt_us in pairs:
            for kernel, program in (workloads[len(found) * 7 % 12], workloads[(len(found) + 1) * 7 % 12]):
                tenants = (Tenant(30, kernel, program), Tenant(70, kernel, program))
                world = {
                    "slice_us": slice_us,
                    "told_slice_us": slice_us,  # as in the limits file
                    "switch_us": switch_us,
                    "preempt_us": preempt_us,
                }
                name = f"30/70 {kernel} {program} slice {slice_us} switch {switch_us}/{preempt_us}"
                found.append(Cell(name, tenants, program == "sync", world))
    return found


def cells(every_nth: int = 1) -> list[Cell]:
    """Return all cells, but of those with other switch costs only every nth."""
    return steady_cells() + switch_cells()[::every_nth]


def steady_cells() -> list[Cell]:
    """Return the cells on a device with the default slice and switch cost."""
    found = [
        Cell(f"alone {limit} {kernel} {program}", (Tenant(limit, kernel, program),), True)
        for limit in LIMITS
        for kernel in KERNELS
        for program in PROGRAMS
    ]
    for company in COMPANIES:
        limits = "/".join(f"{limit:g}" for limit in company)
        for kernel in KERNELS:
            found += [
                Cell(f"{limits} {kernel} {program}", tuple(Tenant(limit, kernel, program) for limit in company))
                for program in SATURATING
            ]
    for kernel in KERNELS:
        for mine, theirs in ((30, 50), (25, 70)):
            found += beside(mine, theirs, kernel)
        if kernel != "50us":
            found.append(Cell(f"40/50 {kernel} beside 50us", (Tenant(40, kernel), Tenant(50, "50us"))))
    return found


def beside(mine: float, theirs: float, kernel: str) -> list[Cell]:
    """Return cells with other programs and several processes, beside a container that always has work."""
    neighbour = Tenant(theirs, kernel)
    four = Tenant(mine, kernel, processes=4)
    name = f"{mine}/{theirs} {kernel}"
    found = [
        Cell(f"{name} 4 processes beside 1", (four, neighbour)),
        Cell(f"{name} unequal processes", (four._replace(more="unequal=1"), neighbour)),
    ]
    for program in ("sync", "pause"):
        found.append(Cell(f"{name} {program} beside stream", (Tenant(mine, kernel, program), neighbour), True))
    return found


def targets(cell: Cell, seed: int) -> list[float]:
    """Return the target of each tenant: its limit, or what it can use when only the other tenants are limited.

    Beside other tenants the reference run has limit=100 rather than law=none: a container that publishes no activity
    would make the others exceed their limits.
    """
    if not cell.referenced:
        return [tenant.limit for tenant in cell.tenants]
    found = []
    more = "law=none" if len(cell.tenants) == 1 else ""
    for i, tenant in enumerate(cell.tenants):
        free = [other._replace(limit=100, more=more) if k == i else other for k, other in enumerate(cell.tenants)]
        found.append(min(tenant.limit, simulate(free, ms=RUN_MS, seed=seed, **cell.world)[i].share()))
    return found


def error(cell: Cell, seed: int = 1) -> Error:
    """Run the cell and compare the device's ledger with the targets."""
    ledgers = simulate(cell.tenants, ms=RUN_MS, seed=seed, **cell.world)
    wanted = targets(cell, seed)
    launch_ms = max(tenant.launch_ms() for tenant in cell.tenants)
    lasting = launch_ms > 1.5  # kernels called 1ms take up to 1.3 ms
    bounds = (max(2.0, launch_ms / 10), max(2.0, launch_ms)) if lasting else (1.0, 2.0)
    if cell.world:  # a window of 100 ms has three slices of 30 ms
        bounds = (2.0, 100.0)
    return Error(
        max(ledger.mae(target, 1000) for ledger, target in zip(ledgers, wanted)),
        max(ledger.mae(target, 100) for ledger, target in zip(ledgers, wanted)),
        *bounds,
        jain(ledger.share() / target for ledger, target in zip(ledgers, wanted)),
        len(wanted),
    )


def measure(found: Sequence[Cell], seed: int = 1) -> dict[str, Error]:
    """Measure the cells; return the errors by name."""
    errors = parallel(found, lambda cell: error(cell, seed))
    return dict(zip((cell.name for cell in found), errors))


def misses() -> dict[str, list[float]]:
    found: dict[str, list[float]] = json.loads(MISSES.read_text())
    return found


def figures(measured: dict[str, Error]) -> dict[str, list[float]]:
    """Return the figures of `make bench`: all cells with short kernels, including the cells that miss."""
    short = [one for one in measured.values() if one.bound_1s == 1.0]
    return {
        "compute.mae_pp_1s": [one.mae_1s for one in short],
        "compute.mae_pp_100ms": [one.mae_100ms for one in short],
        "compute.jain": [one.jain for one in short if one.tenants > 1],
    }


def summary(found: dict[str, list[float]]) -> str:
    """Format the median and the worst value of each key as JSON."""
    rows = []
    for key, values in found.items():
        worst = min(values) if key in MORE_IS_BETTER else max(values)
        rows.append(f"  {json.dumps(key)}: {json.dumps([round(statistics.median(values), 4), round(worst, 4)])}")
    return "{\n" + ",\n".join(rows) + "\n}\n"


def main() -> None:
    measured = measure(cells())
    runs = [measured, *(measure(cells(), seed) for seed in SEEDS[1:])]
    found: dict[str, list[float]] = {}
    for name in measured:
        ones = [run[name] for run in runs]
        if not all(one.holds() for one in ones):
            found[name] = [round(max(one.mae_1s for one in ones), 2), round(max(one.mae_100ms for one in ones), 2)]
    for run in runs:
        print(f"{sum(not one.holds() for one in run.values())} of {len(run)} cells do not hold")
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(found.items()))
    MISSES.write_text("{\n" + lines + "\n}\n")
    FIGURES.write_text(summary({**figures(measured), **reaction.figures()}))
    alone = sum(name.startswith("alone") for name in found)
    print(f"{len(measured)} cells; listed in {MISSES.name}: {alone} alone, {len(found) - alone} in company")


if __name__ == "__main__":
    main()
