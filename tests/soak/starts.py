"""Container starts: one after another, and all at once."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from tests.support.rootfs import OverlayRoot
from tests.support.runc import Container, RuntimeFailed

from .stage import Stage

WAYS = ("hook", "runtime")
SHARE = "256Mi"  # 128 of them fit


def figures(values_ms: list[float]) -> dict[str, float]:
    ordered = sorted(values_ms)
    if not ordered:
        return {"n": 0}
    rank = {
        name: ordered[min(len(ordered) - 1, int(len(ordered) * part))] for name, part in (("p50", 0.5), ("p99", 0.99))
    }
    return {"n": len(ordered), **{f"{name}_ms": round(value, 1) for name, value in rank.items()}}


def in_a_row(stage: Stage, count: int, seconds: float) -> dict[str, Any]:
    """Run `count` containers, alternating hook and runtime, each deleted before the next; stop after `seconds`, which
    may be infinite. They share one root file system, where leftovers of starts would accumulate."""
    stage.show.phase("starts in a row", count)
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        disk = OverlayRoot(stage.directory / "disk")
        stack.callback(disk.close)
        deadline = time.monotonic() + seconds
        for number in range(count):
            stage.check_stopped()
            if time.monotonic() > deadline:
                break
            way = WAYS[number % len(WAYS)]
            with stage.container(["true"], memory=SHARE, way=way, rootfs=disk.path) as one:
                begin = time.perf_counter()
                one.create()
                took[way].append((time.perf_counter() - begin) * 1000)
                if one.run():
                    stage.record_error(f"{one.id} ({way}) ended with {one.exit_code}: {one.stderr}")
                one.delete()
                if left := stage.node.left():
                    stage.record_error(f"{one.id} ({way}) left {left}")
            stage.show.advance(f"{number + 1} of {count}")
    result: dict[str, Any] = {"wanted": count, **{way: figures(values) for way, values in took.items()}}
    done = sum(len(values) for values in took.values())
    stage.show.end(f"{done} of {count}, " + ", ".join(f"{way} {result[way]}" for way in WAYS))
    return result


def at_once(stage: Stage, count: int) -> dict[str, Any]:
    """Run `count` containers that start together, run together, and are deleted together."""
    stage.show.phase("starts at once", 2 * count)
    lock = threading.Lock()
    together = threading.Barrier(count)
    took: list[float] = []

    def create(one: Container) -> None:
        together.wait()
        begin = time.perf_counter()
        try:
            one.start()
        except RuntimeFailed as error:
            stage.record_error(f"{one.id}: {error}")
        with lock:
            took.append((time.perf_counter() - begin) * 1000)
            stage.show.advance(f"{len(took)} of {count} run")

    def delete(one: Container) -> None:
        one.delete()
        with lock:
            stage.show.advance("being deleted")

    with ExitStack() as stack:
        several = []
        for number in range(count):
            stage.check_stopped()
            way = WAYS[number % len(WAYS)]
            several.append(stack.enter_context(stage.container(["sleep", "inf"], memory=SHARE, way=way)))
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(create, several))
            listed = {one["id"]: one["state"] for one in json.loads(stage.cli("list", "--format", "json"))}
            if listed != {one.id: "running" for one in several}:
                stage.record_error(f"{count} containers run, and `gpushare list` reports {listed}")
            numbers = list(stage.node.state.glob("devices/*/[0-9]*"))
            if len(numbers) != count:
                stage.record_error(f"{count} containers have {len(numbers)} activity files")
            list(pool.map(delete, several))
    result = {"wanted": count, **figures(took)}
    stage.show.end(str(result))
    return result
