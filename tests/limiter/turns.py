"""Turns against time slices, in virtual time on an H100's device: `python -m tests.limiter.turns` prints the figures of
docs/compute.md as a table.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from tests.limiter.cells import Ledger, Tenant, parallel, simulate

H100: dict[str, Any] = {"slice_us": 2090, "told_slice_us": 2090, "switch_us": 143, "preempt_us": 239}
TURNS = {**H100, "round_us": 20_000}
WARM_MS = 1000
SEEDS = (1, 2, 3)
COMPANIES = {2: (30, 70), 4: (10, 20, 30, 40), 8: (5, 5, 5, 5, 10, 10, 20, 40)}
BESIDE = {1: 70.0, 3: 25.0, 7: 12.5}  # number of saturating containers beside an interactive one -> limit of each


def saturating(limit: float, kernel: str = "50us", program: str = "stream", more: str = "") -> Tenant:
    return Tenant(limit, kernel, program, more=more)


def work(tenants: Sequence[Tenant], seed: int, ms: int = 4000, **world: Any) -> list[float]:
    """Return the work of each after the first second, in percent of one container alone."""
    world = {**TURNS, **world}
    first, whole = simulate(tenants, ms=WARM_MS, seed=seed, **world), simulate(tenants, ms=ms, seed=seed, **world)
    return [(b.work_ns - a.work_ns) / (1e4 * (ms - WARM_MS)) for a, b in zip(first, whole)]


def requests_us(others: int, **world: Any) -> tuple[list[int], list[int]]:
    """Return how long requests of an interactive container took beside so many others, and alone."""
    mine = Tenant(100 - others * BESIDE[others], "50us", "interactive")
    tenants = [saturating(BESIDE[others])] * others + [mine]

    def run(places: Sequence[Tenant]) -> list[int]:
        def one(seed: int) -> Ledger:
            return simulate(places, ms=5500, seed=seed, **{**TURNS, **world})[-1]

        return [us for ledger in parallel(SEEDS, one) for us in ledger.request_us[2:]]

    return run(tenants), run([mine])


# Kernels and programs of other companies: each of COMPANIES with each pair. A graph has several kernels, up to 3.4 ms.
OTHERS = list(itertools.product(("5us", "50us", "5to65us", "1ms"), ("stream", "streams", "graph")))


def distance(limits: Sequence[float], kernel: str, program: str, **world: Any) -> float:
    """Return the largest mean distance from a limit in windows of 1 s, in points; the mean of all seeds."""
    tenants = [saturating(limit, kernel, program) for limit in limits]

    def one(seed: int) -> float:
        ledgers = simulate(tenants, ms=5500, seed=seed, **{**TURNS, **world})
        return max(ledger.mae(limit, 1000, WARM_MS) for limit, ledger in zip(limits, ledgers))

    return statistics.fmean(parallel(SEEDS, one))


def work_distance(limits: Sequence[float], kernel: str, program: str, **world: Any) -> tuple[float, float]:
    """Return the largest distance of a container's work from its limit, in points, and the sum of all work; the means
    of all seeds."""
    tenants = [saturating(limit, kernel, program) for limit in limits]

    def one(seed: int) -> tuple[float, float]:
        got = work(tenants, seed, **world)
        return max(abs(share - limit) for share, limit in zip(got, limits)), sum(got)

    far, total = zip(*parallel(SEEDS, one))
    return statistics.fmean(far), statistics.fmean(total)


def percentile(values: Sequence[int], part: float) -> int:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def column(**world: Any) -> list[str]:
    """Return the figures of one column of the table: of the worst seed, but for the sum of work."""
    sums, errors, middle, late = [], [], [], []
    for limits in COMPANIES.values():
        runs = [work([saturating(limit) for limit in limits], seed, **world) for seed in SEEDS]
        sums.append(f"{statistics.fmean(map(sum, runs)):.1f} %")
        errors.append(f"{max(abs(got - limit) for run in runs for got, limit in zip(run, limits)):.1f}")
    others = list(itertools.product(COMPANIES.values(), OTHERS))
    other = [distance(limits, *one, **world) for limits, one in others]
    worked = [work_distance(limits, *one, **world)[0] for limits, one in others]
    for n in BESIDE:
        times, free = requests_us(n, **world)
        middle.append(f"{(percentile(times, 0.5) - percentile(free, 0.5)) / 1000:.1f}")
        late.append(f"{(percentile(times, 0.99) - percentile(free, 0.5)) / 1000:.1f}")
    outside = [saturating(30), saturating(40), Tenant(100, "50us", more="law=none")]
    shares = [
        [ledger.share(WARM_MS) for ledger in simulate(outside, ms=6500, seed=s, **{**TURNS, **world})] for s in SEEDS
    ]
    beside = " and ".join(f"{min(run[i] for run in shares):.0f}" for i in (0, 1))
    return [
        ", ".join(sums),
        ", ".join(errors) + " points",
        f"{statistics.fmean(other):.1f} and {max(other):.1f} points",
        f"{statistics.fmean(worked):.1f} and {max(worked):.1f} points",
        ", ".join(middle) + " ms",
        ", ".join(late) + " ms",
        f"{beside} %",
    ]


def main() -> None:
    rows = (
        "work of 2, 4 and 8 containers together",
        "largest distance from the limit",
        "with kernels of 5 us to 1 ms, in one stream, eight or graphs: in the mean and at most",
        "the same, in work",
        "20 launches of 50 us beside 1, 3 and 7 containers: median delay",
        "the same: 99th percentile",
        "30 % and 40 % beside a program without gpushare",
    )
    print("| | time slices | turns |\n|---|---|---|")
    for row in zip(rows, column(round_us=0), column()):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
