"""A short `make soak`, its end by Ctrl-C, and its detection of leaks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.soak import __main__
from tests.soak.traces import CGROUPS, cgroups, count, left
from tests.support import rootfs
from tests.support.host import TREE, Node
from tests.support.runc import Container

MINUTES = "0.4"  # half a minute with setup and cleanup


def soak(minutes: str, report: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.soak", "--minutes", minutes, "--json", str(report), *more]
    return subprocess.Popen(
        command, cwd=TREE, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_short_soak_passes(tmp_path: Path) -> None:
    running = soak(MINUTES, tmp_path / "soak.json")
    said, _ = running.communicate(timeout=220)
    assert running.returncode == 0, said
    report = json.loads((tmp_path / "soak.json").read_text())
    assert (report["left"], report["wrong"]) == ([], [])
    for way in ("hook", "runtime"):
        assert 0 < report["starts"][way]["p50_ms"] <= report["starts"][way]["p99_ms"]
    assert report["churn"]["killed runtime"] > 0 and report["tenants"]["killed"] > 0
    assert f"p50_ms': {report['starts']['hook']['p50_ms']}" in said


def test_full_soak_runs_all_starts_on_a_slow_machine() -> None:
    whole = __main__.FULL_MINUTES
    assert (whole, __main__.scaled(__main__.STARTS, whole), __main__.scaled(__main__.AT_ONCE, whole)) == (10, 1000, 100)
    assert __main__.time_limit_s(whole) == float("inf")


def test_interrupted_soak_leaves_nothing(tmp_path: Path) -> None:
    running = soak("10", tmp_path / "soak.json", "--only", "churn")
    assert running.stdout is not None
    assert any("to go" in line for line in running.stdout)  # it is running
    running.send_signal(signal.SIGINT)
    running.send_signal(signal.SIGINT)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 130 and "Traceback" not in said, said
    assert not (tmp_path / "soak.json").exists()
    assert cgroups(f"gpushare-soak-{running.pid}-*") == []
    assert list((TREE / "build").glob(f"soak-{running.pid}-*")) == []


def test_each_kind_of_leak_is_detected(container: Callable[..., Container], node: Node, tmp_path: Path) -> None:
    one = container(["true"], env={"GPUSHARE_MEMORY": "1Gi"}, hook=node.hook())
    assert one.run() == 0
    one.delete()
    prefix = f"gpushare-c-{os.getpid()}-"
    before = count(node, prefix)
    assert left(before, count(node, prefix)) == []
    group = next(path for path in CGROUPS.iterdir() if (path / "tasks").exists()) / f"{prefix}left"
    point = tmp_path / "point"
    (node.state / "containers" / "left").mkdir()
    (node.state / "trash" / "left").write_text("x" * 5000)
    point.mkdir()
    rootfs.run("mount", "-t", "tmpfs", "left", point)
    group.mkdir()
    fd = os.open(point, os.O_RDONLY)
    sleeper = subprocess.Popen(["sleep", "1000"])
    try:
        seen = left(before, count(node, prefix))
    finally:
        sleeper.kill()
        sleeper.wait()
        os.close(fd)
        group.rmdir()
        rootfs.run("umount", point)
        (node.state / "trash" / "left").unlink()
        (node.state / "containers" / "left").rmdir()
    expected = [
        f"mounts: {point}",
        f"files: {point}",
        "state: containers/left",
        "state: trash/left",
        f"tmpfs: {node.state} blocks (+2)",
        f"tmpfs: {node.state} inodes (+2)",
        f"cgroups: {group}",
        "processes: sleep 1000",
    ]
    assert all(any(line.startswith(one) for line in seen) for one in expected), seen
    assert left(before, count(node, prefix)) == []
