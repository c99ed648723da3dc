"""Eight processes in one real container with a million allocations of every kind, at one limit."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.shim.stress_run import FAMILIES, books, build, judge
from tests.support.host import Node
from tests.support.runc import Container
from tests.support.spec import Mount

GIB = 1 << 30
LIMIT_BYTES = 6 * GIB  # eight contexts use 2.4 GiB of it


class Run:
    """`stress` as a container's program; FIFOs are its input and output, so that both ends can wait."""

    def __init__(self, directory: Path, node: Node, arguments: str, make: Callable[..., Container]) -> None:
        channel = directory / "channel"
        channel.mkdir()
        for name in ("in", "out"):
            os.mkfifo(channel / name)
        self._hold = os.open(channel / "in", os.O_RDWR)
        self._out = os.open(channel / "out", os.O_RDWR)
        self.container = make(
            ["sh", "-c", f"exec /opt/stress {arguments} </opt/channel/in >/opt/channel/out"],
            env={"GPUSHARE_MEMORY": "6Gi"},
            hook=node.hook(),
            mounts=[Mount(build(directory), "/opt/stress"), Mount(channel, "/opt/channel", ("rw",))],
        )
        self.container.start()

    def report(self, timeout_s: float) -> dict[str, Any]:
        """Return the line that it prints at the end; its processes keep their memory."""
        text = b""
        while not text.endswith(b"\n"):
            ready, _, _ = select.select([self._out], [], [], timeout_s)
            assert ready, f"no report after {timeout_s} s\n{self.container.stderr}"
            text += os.read(self._out, 1 << 16)
        report: dict[str, Any] = json.loads(text)
        return report

    def close(self) -> None:
        self.container.close()
        os.close(self._hold)
        os.close(self._out)


@pytest.fixture
def stress(tmp_path: Path, node: Node, container: Callable[..., Container]) -> Iterator[Callable[[str], Run]]:
    runs: list[Run] = []

    def start(arguments: str) -> Run:
        runs.append(Run(tmp_path, node, arguments, container))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.mark.timeout(900)
def test_million_allocations_stay_within_the_limit(stress: Callable[[str], Run], node: Node, simhost: Path) -> None:
    run = stress(f"8 125000 1 {FAMILIES}")
    report = run.report(timeout_s=800)
    seen = books(simhost / "dev" / "nvidia0")
    judge(report, seen, LIMIT_BYTES, survivors=8)
    assert report["granted"] + report["refused"] >= 1_000_000
    assert report["refused"] > 10_000  # it was at the limit most of the time
    listed = json.loads(node.cli("list", "--format", "json").stdout)
    assert [row["shares"][0]["memory_used_bytes"] for row in listed] == [seen.used]


@pytest.mark.parametrize("seed", range(4))
def test_killed_processes_release_their_memory(stress: Callable[[str], Run], simhost: Path, seed: int) -> None:
    run = stress(f"8 1 {seed} {FAMILIES} kill")
    report = run.report(timeout_s=60)
    judge(report, books(simhost / "dev" / "nvidia0"), LIMIT_BYTES, survivors=4)
