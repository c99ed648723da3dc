"""Compute limits of real containers beyond test_compute.py: soft limits, several processes, programs without a
container, and the CLI's output. Judged by the simulated device's own ledger of its time."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support import judge, programs
from tests.support.busy import build, words
from tests.support.host import Node
from tests.support.runc import Container
from tests.support.spec import Mount

MakeContainer = Callable[..., Container]
POINTS = 5  # tolerance for a loaded machine with two cores; make bench has the exact figures
TRIES = 8


@pytest.fixture
def busy(container: MakeContainer, node: Node) -> Callable[..., Container]:
    """busy(way, compute="30%", **options of the program) -> a container that keeps the GPU busy."""

    def start(way: str, compute: str = "", mode: str = "hard", **options: Any) -> Container:
        env = {"GPUSHARE_MEMORY": "2Gi", "GPUSHARE_COMPUTE_MODE": mode}
        env.update({"GPUSHARE_COMPUTE": compute} if compute else {})
        command = ["/opt/busy", *words(seconds=1000, **{"kernel": 200, **options})]
        return container(command, env=env, mounts=[Mount(build(), "/opt/busy")], **node.way(way)).start()

    return start


def shares(simhost: Path, watched: Iterable[Container]) -> dict[int, float]:
    """Percent of the device's time in one second, by pid namespace. Fails at once when a container ends."""
    poll = select.poll()
    pidfds = [os.pidfd_open(one.pid) for one in watched]
    for fd in pidfds:
        poll.register(fd, select.POLLIN)
    try:
        return judge.time_shares(str(simhost / "dev" / "nvidia0"), poll).of
    finally:
        for fd in pidfds:
            os.close(fd)


def share(simhost: Path, one: Container, *others: Container) -> float:
    """Return the percentage of `one`."""
    return shares(simhost, (one, *others)).get(os.stat(f"/proc/{one.pid}/ns/pid").st_ino, 0.0)


def hold(simhost: Path, *wanted: tuple[Container, float]) -> None:
    """Assert that no container ever exceeds its percentage, and that all reach theirs at once as soon as the machine
    allows."""
    seen = []
    for _ in range(TRIES):
        got = shares(simhost, [one for one, _ in wanted])
        seen.append([got.get(os.stat(f"/proc/{one.pid}/ns/pid").st_ino, 0.0) for one, _ in wanted])
        both = list(zip(seen[-1], (percent for _, percent in wanted)))
        assert all(had < percent + POINTS for had, percent in both), seen
        if all(had > percent - POINTS for had, percent in both):
            return
    raise AssertionError(f"{seen} instead of {[percent for _, percent in wanted]}")


def test_list_agrees_with_the_device_s_ledger(busy: Callable[..., Container], node: Node, simhost: Path) -> None:
    one = busy("hook", "40%")
    hold(simhost, (one, 40))
    seen = []
    for _ in range(TRIES):
        (listed,) = json.loads(node.cli("list", "--format", "json").stdout)
        (said,) = listed["shares"]
        seen.append((said["compute_used_percent"], share(simhost, one)))
        if abs(seen[-1][0] - seen[-1][1]) < POINTS:
            break
    else:
        raise AssertionError(f"list, ledger: {seen}")
    assert said["compute_throttled_ns"] > 0 and said["compute_busy_ns"] > 0
    assert "% of 40%" in node.cli("list").stdout


def test_soft_limit_borrows_unused_time(busy: Callable[..., Container], simhost: Path) -> None:
    """A container with a hard limit still gets its time beside a soft one."""
    soft = busy("hook", "30%", mode="soft")
    had = [share(simhost, soft)]
    while had[-1] < 80 and len(had) < TRIES:
        had.append(share(simhost, soft))
    assert had[-1] >= 80, had
    hard = busy("hook", "50%")
    had = [share(simhost, hard, soft)]
    while had[-1] < 50 - 2 * POINTS and len(had) < TRIES:
        had.append(share(simhost, hard, soft))
    assert 50 - 2 * POINTS <= had[-1] < 50 + POINTS, had


def test_processes_of_a_container_share_its_limit(busy: Callable[..., Container], simhost: Path) -> None:
    one = busy("hook", "30%", processes=3)
    hold(simhost, (one, 30))


def test_gpushare_run_keeps_its_compute_limit(node: Node, simhost: Path) -> None:
    command = [str(build()), *words(seconds=4, kernel=200)]
    done = programs.run(node, "--memory", "2Gi", "--compute", "30%", "--", *command)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    percent = 100 * report["done_ns"] / (report["ended_ns"] - report["started_ns"])
    assert 30 - 2 * POINTS < percent < 30 + POINTS, report
