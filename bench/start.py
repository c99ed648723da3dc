"""Measure what gpushare adds to a container start: `create` of the same bundle with and without it.

Each round runs every way once, and each way is first equally often, so that other load affects all ways alike. The
cost of a way is the difference from plain runc in the same round.

`make bench-start` runs only this; published figures use ROUNDS=400. `RUNTIME=/path/to/wrapper` also measures another
wrapper. `BEFORE=/other/tree/build` instead compares this build with another one, in pairs. `LOW_LEVEL=crun` measures
with the crun that is first in PATH, on cgroup v1.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from simulator.simhost import make_simhost
from tests.support import host
from tests.support.runc import Container

ROUNDS = int(os.environ.get("ROUNDS") or 40)
WARM_UP_ROUNDS = 3
SHARE = {"GPUSHARE_MEMORY": "1Gi"}
SMALL_SHARE = {"GPUSHARE_MEMORY": "128Mi"}  # small enough for PARALLEL containers
PARALLEL = 50
BUNDLE = host.BUILD / "dist" / "gpushare"  # built by make dist
BENCH = host.BUILD / "bench"  # built by make start_bench


class Cost(NamedTuple):
    """The cost of one create: wall-clock and processor time in milliseconds, without background processes."""

    ms: float
    cpu_ms: float


def create(directory: Path, **arguments: Any) -> Cost:
    """Measure one create."""
    with Container(directory, ["true"], **arguments) as container:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        begin = time.perf_counter()
        container.create()
        took = time.perf_counter() - begin
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(took * 1000, cpu * 1000)


def rounds(directory: Path, ways: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Cost]]:
    """Measure the cost of each way in each round. `ways`: arguments of Container."""
    found: dict[str, list[Cost]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(WARM_UP_ROUNDS + ROUNDS):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            cost = create(directory, **ways[name])
            if number >= WARM_UP_ROUNDS:
                found[name].append(cost)
    return found


def parallel_ms(directory: Path, **arguments: Any) -> list[float]:
    """Return the milliseconds of each of PARALLEL creates that start together."""
    with ExitStack() as stack:
        several = [
            stack.enter_context(Container(directory, ["true"], env=SMALL_SHARE, **arguments)) for _ in range(PARALLEL)
        ]
        together = threading.Barrier(PARALLEL)

        def create(one: Container) -> float:
            together.wait()
            begin = time.perf_counter()
            one.create()
            return (time.perf_counter() - begin) * 1000

        with ThreadPoolExecutor(PARALLEL) as pool:
            return list(pool.map(create, several))


def runtime_in(programs: Path, node: host.Node) -> tuple[str, ...]:
    """Return node.runtime() with the programs of another installation."""
    return (str(programs / "bin" / "gpushare-runtime"), *node.runtime()[1:])


def added_ms(directory: Path, other_runtime: str = "") -> dict[str, list[float]]:
    """Return every measured value by its key in build/bench.json.

    `other_runtime`: an OCI runtime wrapper to measure as well.
    """
    simulated = make_simhost(directory / "host", gpus=1, memory_bytes=16 << 30)
    node = host.Node(directory / "node", simulated)
    ways: dict[str, dict[str, Any]] = {
        "runc": {"env": SHARE},
        "runtime": {"env": SHARE, "runtime": node.runtime()},
        "hook": {"env": SHARE, "hook": node.hook()},
        "runc_nongpu": {},
        "nongpu": {"runtime": node.runtime()},
        "hook_nongpu": {"hook": node.hook()},
    }
    extra: dict[str, tuple[Path, dict[str, Any]]] = {
        "warm_runc": (BENCH / "warm", {"runtime": (str(BENCH / "warm"), str(node.state), "runc")}),
        "cold_runtime": (BENCH / "cold", {"runtime": runtime_in(BENCH / "cold", node)}),
        "other": (Path(other_runtime or "/nowhere"), {"runtime": (other_runtime,)}),
    }
    for name, (program, arguments) in extra.items():
        if program.exists():
            ways[name] = {"env": SHARE, **arguments}
    found: dict[str, list[float]] = {}

    def add(name: str, costs: list[Cost], base: list[Cost]) -> None:
        found[f"start.{name}_added_ms"] = [one.ms - plain.ms for one, plain in zip(costs, base)]
        found[f"start.{name}_added_cpu_ms"] = [one.cpu_ms - plain.cpu_ms for one, plain in zip(costs, base)]

    try:
        create(directory, env=SHARE, runtime=node.runtime())  # this start compiles the configuration
        costs = rounds(directory, ways)
        plain, without = costs.pop("runc"), costs.pop("runc_nongpu")
        found["start.runc_ms"] = [one.ms for one in plain]
        found["start.runc_cpu_ms"] = [one.cpu_ms for one in plain]
        for name, values in costs.items():
            add(name, values, without if name.endswith("nongpu") else plain)
        # separate rounds, because the bundle treats node.json as that of another version
        if (BUNDLE / "bin" / "gpushare-runtime").exists():
            ours: dict[str, dict[str, Any]] = {
                "runc": {"env": SHARE},
                "bundle": {"env": SHARE, "runtime": runtime_in(BUNDLE, node)},
            }
            costs = rounds(directory, ours)
            add("bundle", costs["bundle"], costs["runc"])
        else:
            print(f"start.bundle_added_ms is left out: no {BUNDLE}/bin/gpushare-runtime", file=sys.stderr)
        # compile again, because the bundle replaced the compiled configuration
        create(directory, env=SHARE, runtime=node.runtime())
        found["start.parallel50_runc_p99_ms"] = parallel_ms(directory)
        found["start.parallel50_p99_ms"] = parallel_ms(directory, runtime=node.runtime())
    finally:
        node.close()
    return {**found, "hook.added_ms": found["start.hook_added_ms"]}


def change_ms(directory: Path, before: Path) -> dict[str, list[float]]:
    """Return what each way takes more (or, if negative, less) than with the programs in build directory `before`."""
    simulated = make_simhost(directory / "host", gpus=1, memory_bytes=16 << 30)
    nodes = {name: host.Node(directory / f"node-{name}", simulated) for name in ("before", "after")}
    ways: dict[str, dict[str, Any]] = {}
    for name, build in (("before", before), ("after", host.BUILD)):
        runtime = runtime_in(build, nodes[name])
        hook = nodes[name].hook()._replace(program=build / "bin" / "gpushare-hook")
        ways[f"runtime_{name}"] = {"env": SHARE, "runtime": runtime}
        ways[f"hook_{name}"] = {"env": SHARE, "hook": hook}
        ways[f"nongpu_{name}"] = {"runtime": runtime}
    try:
        costs = rounds(directory, ways)
    finally:
        for node in nodes.values():
            node.close()
    found: dict[str, list[float]] = {}
    for way in ("runtime", "hook", "nongpu"):
        pairs = list(zip(costs[f"{way}_before"], costs[f"{way}_after"]))
        found[f"start.{way}_change_ms"] = [after.ms - old.ms for old, after in pairs]
        found[f"start.{way}_change_cpu_ms"] = [after.cpu_ms - old.cpu_ms for old, after in pairs]
    return found


def main() -> int:
    from bench import bench

    before = os.environ.get("BEFORE", "")
    host.enter_private_mounts(for_other_users=not before)  # private mounts for other users hide other trees
    host.use_low_level(os.environ.get("LOW_LEVEL") or "runc")
    with tempfile.TemporaryDirectory(prefix="bench-", dir=host.BUILD) as work:
        if before:
            measured = change_ms(Path(work), Path(before).resolve())
        else:
            measured = added_ms(Path(work), os.environ.get("RUNTIME", ""))
    bench.show({key: bench.figure(values, "ms") for key, values in measured.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
