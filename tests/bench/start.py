"""What a start costs: `create` of the same bundle with and without us. Neighbours in time form a pair, and who goes
first alternates, so that what else the machine does falls on both alike.

`make bench-start` measures this alone; `RUNTIME=/path/to/wrapper make bench-start` another wrapper beside it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.lib import host
from tests.lib.runc import Container
from tests.sim.simhost import make_simhost

PAIRS = 40
WARM_UP_PAIRS = 3
SHARE = {"GPUSHARE_MEMORY": "1Gi"}
SMALL_SHARE = {"GPUSHARE_MEMORY": "128Mi"}  # all of `PARALLEL` fit
PARALLEL = 50
BUNDLE = host.BUILD / "dist" / "gpushare"  # make dist


def create_ms(directory: Path, **arguments: Any) -> float:
    """Milliseconds of one create."""
    with Container(directory, ["true"], **arguments) as container:
        begin = time.perf_counter()
        container.create()
        return (time.perf_counter() - begin) * 1000


def paired_ms(plain: Callable[[], float], measured: Callable[[], float]) -> tuple[list[float], list[float]]:
    """(times of `plain`, what `measured` took more than its neighbour)."""
    alone, added = [], []
    for number in range(WARM_UP_PAIRS + PAIRS):
        if number % 2:
            more, base = measured(), plain()
        else:
            base, more = plain(), measured()
        if number >= WARM_UP_PAIRS:
            alone.append(base)
            added.append(more - base)
    return alone, added


def parallel_ms(directory: Path, **arguments: Any) -> list[float]:
    """Milliseconds of each of PARALLEL creates that begin together."""
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
    """node.runtime(), with the programs of another installation."""
    return (str(programs / "bin" / "gpushare-runtime"), *node.runtime()[1:])


def added_ms(directory: Path, other_runtime: str = "") -> dict[str, list[float]]:
    """Every value measured, by key of build/bench.json. `other_runtime`: an OCI runtime wrapper to measure as well."""
    simulated = make_simhost(directory / "host", gpus=1, memory_bytes=16 << 30)
    node = host.Node(directory / "node", simulated)

    def added_by(runtime: tuple[str, ...]) -> list[float]:
        return paired_ms(
            lambda: create_ms(directory, env=SHARE), lambda: create_ms(directory, env=SHARE, runtime=runtime)
        )[1]

    found: dict[str, list[float]] = {}
    try:
        found["start.runc_ms"], found["start.hook_added_ms"] = paired_ms(
            lambda: create_ms(directory, env=SHARE), lambda: create_ms(directory, env=SHARE, hook=node.hook())
        )
        found["start.runtime_added_ms"] = added_by(node.runtime())
        _, found["start.nongpu_added_ms"] = paired_ms(
            lambda: create_ms(directory), lambda: create_ms(directory, runtime=node.runtime())
        )
        if (BUNDLE / "bin" / "gpushare-runtime").exists():
            found["start.bundle_added_ms"] = added_by(runtime_in(BUNDLE, node))
        else:
            print(f"start.bundle_added_ms is left out: no {BUNDLE}/bin/gpushare-runtime", file=sys.stderr)
        if other_runtime:
            found["start.other_added_ms"] = added_by((other_runtime,))
        create_ms(directory, env=SHARE, runtime=node.runtime())  # node.json was the bundle's: it is an upgrade to us
        found["start.parallel50_runc_p99_ms"] = parallel_ms(directory)
        found["start.parallel50_p99_ms"] = parallel_ms(directory, runtime=node.runtime())
    finally:
        node.close()
    return {**found, "hook.added_ms": found["start.hook_added_ms"]}


def main() -> int:
    from tests.bench import bench

    host.enter_private_mounts()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=host.BUILD) as work:
        measured = added_ms(Path(work), os.environ.get("RUNTIME", ""))
    bench.show({key: bench.figure(values, "ms") for key, values in measured.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
