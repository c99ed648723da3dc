"""Limit changes and pauses while four processes in real containers allocate and launch, judged by the simulated
device's own ledger."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from simulator.ledger import Ledger
from tests.integration.grown import GIB, PROCESSES, Grown
from tests.support import programs, rootfs
from tests.support.host import BUILD, TREE, Node
from tests.support.runc import Container, RuntimeFailed
from tests.support.spec import Mount

MakeContainer = Callable[..., Container]
SOURCE = TREE / "tests" / "integration" / "programs" / "grower.c"


@pytest.fixture(scope="session")
def grower() -> Path:
    """The program, built once."""
    made = BUILD / "grower"
    if not made.exists() or made.stat().st_mtime < SOURCE.stat().st_mtime:
        flags = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror")
        new = made.with_name(f"grower.{os.getpid()}")
        subprocess.run(["gcc", *flags, "-o", new, SOURCE, "-ldl", "-lpthread"], check=True)
        new.replace(made)
    return made


@pytest.fixture
def grown(container: MakeContainer, node: Node, simhost: Path, grower: Path) -> Callable[..., Grown]:
    """grown(way, mode, memory, compute) -> the program running in a container."""

    def start(way: str, mode: str, memory: str = "4Gi", compute: str = "", processes: int = PROCESSES) -> Grown:
        env = {"GPUSHARE_MEMORY": memory, **({"GPUSHARE_COMPUTE": compute} if compute else {})}
        command = ["/opt/grower", str(processes), mode]
        one = container(command, env=env, mounts=[Mount(grower, "/opt/grower")], **node.way(way)).start()
        made = Grown(one, node, simhost / "dev" / "nvidia0")
        end = time.monotonic() + 60
        while "ready" not in one.stdout:
            assert time.monotonic() < end, one.stderr
            made.wait(0.01)
        return made

    return start


def test_allocations_stay_within_the_current_limit(grown: Callable[..., Grown], way: str) -> None:
    """The limit alternates while all four allocate and free: memory above the smaller limit only shrinks."""
    one = grown(way, "churn", "5Gi", "40%")
    for turn in range(6):
        low = turn % 2 == 0
        after = one.set("--memory", "3Gi" if low else "5Gi", "--compute", "20" if low else "40")
        limit = after["after"]["memory_limit_bytes"]
        assert (limit, after["after"]["compute_percent"]) == ((3 * GIB, 20) if low else (5 * GIB, 40))
        most = max(limit, after["memory_used_bytes"])
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            had = one.group().current_bytes
            assert had <= most, (turn, had, most)
            most = max(limit, min(most, had + GIB))  # reserved but not yet allocated: less than a piece per process
            one.wait(0.005)
    assert 3 * GIB < one.group().peak_bytes <= 5 * GIB
    assert len(one.clients()) == PROCESSES


def test_limit_below_use_refuses_new_allocations(grown: Callable[..., Grown], node: Node, way: str) -> None:
    one = grown(way, "hold", "6Gi")
    one.until(lambda: one.group().current_bytes > 5.9 * GIB)
    done = node.cli("limit", "set", one.container.id, "--memory", "4Gi")
    assert done.returncode == 0, done.stderr
    assert "6 GiB -> 4 GiB" in done.stdout and "new allocations fail until it is below" in done.stdout
    had, refused = one.group().current_bytes, one.said()["refused"]
    one.until(lambda: one.said()["refused"] > refused + 20)
    assert one.group().current_bytes == had
    assert "over its limit by" in node.cli("inspect", one.container.id).stdout

    def free_bytes() -> int:
        (row,) = json.loads(node.cli("devices", "--format", "json").stdout)
        return int(row["free_bytes"])

    assert free_bytes() <= 16 * GIB - had  # memory not freed is granted to no container
    for client in one.clients():
        os.kill(client.host_pid, signal.SIGUSR1)
    one.until(lambda: one.group().current_bytes <= 4 * GIB)
    one.until(lambda: one.group().current_bytes > 3.9 * GIB)
    assert free_bytes() == 12 * GIB
    for _ in range(50):
        assert one.group().current_bytes <= 4 * GIB
        one.wait(0.005)


def test_paused_container_can_be_killed(grown: Callable[..., Grown], node: Node) -> None:
    one = grown("runtime", "churn")
    assert node.cli("pause", one.container.id).returncode == 0
    one.container.kill(signal.SIGKILL)
    assert one.container.wait() == 128 + signal.SIGKILL
    one.container.delete()
    assert node.left() == []


def test_changes_and_pause_survive_a_lost_state_directory(
    grown: Callable[..., Grown], container: MakeContainer, node: Node, way: str
) -> None:
    """Also unfinished changes, and they can be reverted: limits are set in the container's own files."""
    one = grown(way, "churn", "4Gi", "50%")
    one.set("--memory", "8Gi", "--compute", "20", "--priority", "high")
    assert node.cli("pause", one.container.id).returncode == 0
    rootfs.run("umount", "--lazy", node.state)
    with pytest.raises(RuntimeFailed):
        container(["true"], env={"GPUSHARE_MEMORY": "9Gi"}, **node.way(way)).create()
    said = one.said()
    assert (said["memory_limit_bytes"], said["compute_percent"], said["priority"]) == (8 * GIB, 20, 1)
    assert said["paused"]
    busy = one.quiet()
    one.wait(0.3)
    assert one.group().busy_ns == busy
    one.set("--memory", "6Gi", "--compute", "40")
    assert node.cli("resume", one.container.id).returncode == 0
    one.until(lambda: one.group().busy_ns > busy, 1.0)
    one.holds(40)
    assert one.group().current_bytes <= 6 * GIB
    one.container.delete()


def test_gpushare_run_can_be_changed_and_paused(node: Node, simhost: Path, grower: Path) -> None:
    words_ = programs.words(node, "--memory", "4Gi", "--name", "prog", "--", str(grower), "2", "churn")
    process = subprocess.Popen(words_, stdout=subprocess.PIPE, text=True, env=programs.ENVIRONMENT)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        done = node.cli("limit", "set", "prog", "--memory", "2Gi", "--compute", "30")
        assert done.returncode == 0, done.stderr

        def client_bytes() -> int:
            with Ledger(str(simhost / "dev" / "nvidia0")) as ledger:
                return ledger.used_bytes

        def device_ns() -> int:
            with Ledger(str(simhost / "dev" / "nvidia0")) as ledger:
                return ledger.snapshot().busy_ns

        end = time.monotonic() + 30
        while client_bytes() > 2 * GIB:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert node.cli("pause", "prog").returncode == 0
        busy = -1
        while device_ns() != busy:
            assert time.monotonic() < end
            busy = device_ns()
            time.sleep(0.3)
        assert "paused" in node.cli("list").stdout and device_ns() == busy
        assert node.cli("resume", "prog").returncode == 0
        while device_ns() == busy:
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        process.kill()
        process.communicate()
    for client in Ledger(str(simhost / "dev" / "nvidia0")).clients():
        if client.alive and client.host_pid:
            os.kill(client.host_pid, signal.SIGKILL)
