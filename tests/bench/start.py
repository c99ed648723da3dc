"""What a start costs: `create` of the same bundle with and without us. Neighbours in time form a pair, and who goes
first alternates, so that what else the machine does falls on both alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.lib import host
from tests.lib.runc import Container
from tests.sim.simhost import make_simhost

PAIRS = 40
WARM_UP_PAIRS = 3
SHARE = {"GPUSHARE_MEMORY": "1Gi"}


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


def added_ms(directory: Path) -> dict[str, list[float]]:
    """Every value measured, by key of build/bench.json."""
    simulated = make_simhost(directory / "host", gpus=1, memory_bytes=16 << 30)
    node = host.Node(directory / "node", simulated)

    def plain() -> float:
        return create_ms(directory, env=SHARE)

    found: dict[str, list[float]] = {}
    try:
        found["start.runc_ms"], found["start.hook_added_ms"] = paired_ms(
            plain, lambda: create_ms(directory, env=SHARE, hook=node.hook())
        )
        _, found["start.runtime_added_ms"] = paired_ms(
            plain, lambda: create_ms(directory, env=SHARE, runtime=node.runtime())
        )
        _, found["start.nongpu_added_ms"] = paired_ms(
            lambda: create_ms(directory), lambda: create_ms(directory, runtime=node.runtime())
        )
        host.use_programs(host.BUILD / "dist" / "gpushare")
        _, found["start.bundle_added_ms"] = paired_ms(
            plain, lambda: create_ms(directory, env=SHARE, runtime=node.runtime())
        )
    finally:
        host.use_programs(host.BUILD)
        node.close()
    return {**found, "hook.added_ms": found["start.hook_added_ms"]}
