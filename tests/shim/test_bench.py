"""The program with which `make bench` measures the shim runs, and reports every figure."""

from __future__ import annotations

from pathlib import Path

from bench import bench
from tests.support import host


def test_shim_bench_reports_every_figure(tmp_path: Path) -> None:
    host.make("shim_bench")
    figures = bench.shim_cost(tmp_path)
    names = (
        "alloc_added_ns alloc_added_ns_8p passthrough_added_ns launch_added_ns marker_added_ns init_added_us".split()
    )
    assert sorted(figures) == sorted(f"shim.{name}" for name in names)
    assert all(one.n > 0 and one.median <= one.p99 for one in figures.values())
