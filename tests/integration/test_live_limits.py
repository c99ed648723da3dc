"""Limit changes and pauses while four processes in real containers allocate and launch, judged by the simulated
device's own ledger."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpushare.state import shm_abi

from simulator.ledger import Ledger
from tests.integration.grown import GIB, POINTS, PROCESSES, Grown
from tests.support import programs, rootfs
from tests.support.busy import build, words
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
    for turn in range(12):
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


def test_freed_memory_is_granted_to_the_next_container(
    grown: Callable[..., Grown], container: MakeContainer, node: Node, way: str
) -> None:
    """Not before: a container whose limit fell below its use still occupies that memory."""
    one = grown(way, "hold", "10Gi")
    one.until(lambda: one.group().current_bytes > 9.9 * GIB)
    one.set("--memory", "4Gi")
    with pytest.raises(RuntimeFailed) as refused:
        container(["true"], env={"GPUSHARE_MEMORY": "12Gi"}, **node.way(way)).create()
    assert "free of 16 GiB" in refused.value.last_line
    assert node.cli("limit", "set", one.container.id, "--memory", "+6Gi").returncode == 0  # its memory is not freed yet
    one.set("--memory", "4Gi")
    for client in one.clients():
        os.kill(client.host_pid, signal.SIGUSR1)
    one.until(lambda: one.group().current_bytes <= 4 * GIB)
    container(["true"], env={"GPUSHARE_MEMORY": "12Gi"}, **node.way(way)).create()
    done = node.cli("limit", "set", one.container.id, "--memory", "5Gi")
    assert done.returncode == 75 and "0 B free" not in done.stdout and "5Gi requested" in done.stderr


def test_changed_compute_limit_applies_within_a_second(grown: Callable[..., Grown], way: str) -> None:
    one = grown(way, "churn", compute="60%")
    for percent in (20, 70, 40):
        one.set("--compute", f"{percent}%")
        one.wait(1.0)
        begin = time.monotonic_ns()
        one.holds(percent)
        with Ledger(str(one.device)) as ledger:
            history = ledger.history(one.pidns)
        windows = history.shares(begin, min(history.until_ns, begin + 5 * 10**9), 250_000_000)
        assert len(windows) > 2 and max(windows) < (percent + 2 * POINTS) / 100, (percent, windows)


def test_container_without_compute_limit_can_get_one(grown: Callable[..., Grown]) -> None:
    one = grown("hook", "churn")
    assert one.percent(0.5) > 50
    before = one.set("--compute", "30")["before"]
    assert before["compute_percent"] is None
    one.wait(1.0)
    one.holds(30)
    one.set("--compute", "100")
    one.until(lambda: one.percent(0.5) > 60)


def test_pause_blocks_only_launches(
    grown: Callable[..., Grown], container: MakeContainer, node: Node, simhost: Path, way: str
) -> None:
    one = grown(way, "churn", compute="50%")
    one.until(lambda: one.percent(0.2) > 20)
    assert node.cli("pause", one.container.id).returncode == 0
    busy, allocations = one.quiet(), sum(client.allocations for client in one.clients())
    env = {"GPUSHARE_MEMORY": "1Gi", "GPUSHARE_COMPUTE": "30%", "GPUSHARE_COMPUTE_MODE": "soft"}
    command = ["/opt/busy", *words(seconds=1000, kernel=200)]
    soft = container(command, env=env, mounts=[Mount(build(), "/opt/busy")], **node.way(way)).start()
    other = Grown(soft, node, simhost / "dev" / "nvidia0")
    other.until(lambda: any(c.pidns == other.pidns for c in other.clients()))
    other.until(lambda: other.percent(0.5) > 75)  # the other container's time is free to borrow
    assert one.group().busy_ns == busy
    assert sum(client.allocations for client in one.clients()) > allocations
    for command in (["prune"], ["refresh"]):
        assert node.cli(*command).returncode == 0
    states = {row["id"]: row["state"] for row in json.loads(node.cli("list", "--format", "json").stdout)}
    assert states == {one.container.id: "paused", soft.id: "running"}
    assert "state         paused" in node.cli("inspect", one.container.id).stdout
    assert "already" in node.cli("pause", one.container.id).stdout
    assert one.group().busy_ns == busy
    assert "running" in node.cli("resume", one.container.id).stdout
    one.until(lambda: one.group().busy_ns > busy, 1.0)
    soft.kill()
    soft.wait()
    one.holds(50)


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


@pytest.fixture
def sleeper(container: MakeContainer, node: Node) -> Iterator[Container]:
    yield container(["sleep", "inf"], env={"GPUSHARE_MEMORY": "4Gi"}, **node.way("runtime")).start()


REFUSED: dict[str, tuple[tuple[str, ...], int, str]] = {
    "more memory than there is": (("--memory", "17Gi"), 75, "17Gi requested"),
    "nothing": ((), 64, "nothing to change"),
    "nonsense": (("--memory", "6Gj"), 64, "--memory"),
    "no such slot": (("--memory", "1Gi", "--device", "3"), 64, "slot"),
    "less than nothing": (("--memory", "-5Gi"), 64, "4 GiB"),
    "no percent": (("--compute", "0"), 64, "--compute"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_impossible_change_is_refused_and_changes_nothing(sleeper: Container, node: Node, what: str) -> None:
    options, code, text = REFUSED[what]
    folder = node.state / "containers" / sleeper.id
    before = [(folder / name).read_bytes() for name in ("lease.json", "share/limits")]
    done = node.cli("limit", "set", sleeper.id, *options)
    assert done.returncode == code and text in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr and "GPUSHARE_" not in done.stderr
    assert [(folder / name).read_bytes() for name in ("lease.json", "share/limits")] == before


def contents(state: Path) -> dict[Path, bytes]:
    """Contents of all files, each once."""
    return {path: path.read_bytes() for path in state.rglob("*") if path.is_file() and "idmap" not in path.parts}


def test_dry_run_reports_and_changes_nothing(sleeper: Container, node: Node) -> None:
    before = contents(node.state)
    done = node.cli("limit", "set", sleeper.id[:-1], "--memory", "50%", "--dry-run")
    assert done.returncode == 0 and "4 GiB -> 8 GiB" in done.stdout
    assert contents(node.state) == before


def killed_cli(node: Node, number: int, *words_: str) -> int:
    """Run `gpushare`, killed before its `number`th line of code that changes limits; return its exit code."""
    site = str(TREE / "build" / "venv" / "bin" / "python")
    program = f"""
import os, signal, sys
sys.path[:0] = [{str(TREE / "hook")!r}]
from gpushare.state import leases, storage; from gpushare.allocation import limit_update
from gpushare.cli import main
left = {number}
def trace(frame, event, arg):
    global left
    if not frame.f_code.co_filename.endswith(("limit_update.py", "leases.py", "storage.py")):
        return None
    left -= event == "line"
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return trace
change = limit_update.change
def watched(*arguments):
    sys.settrace(trace)
    try:
        return change(*arguments)
    finally:
        sys.settrace(None)
limit_update.change = watched
sys.exit(main(sys.argv[1:]))
"""
    command = [site, "-c", program, "--config", str(node.config), "--state", str(node.state), *words_]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60).returncode


@pytest.mark.parametrize("then", ["start", "prune"])
def test_killed_command_changes_all_or_nothing(
    grown: Callable[..., Grown], container: MakeContainer, node: Node, then: str
) -> None:
    """kill -9 at any point, while the container works: it sees a consistent state, and the next command completes
    it."""
    one = grown("runtime", "churn", "5Gi", "40%")
    both = (5 * GIB, 40), (3 * GIB, 20)
    had, number, code, points = both[0], 0, -9, {}
    while code == -9:
        number += 40
        size, percent = both[had == both[0]]
        options = ("--memory", str(size), "--compute", str(percent))
        code = killed_cli(node, number, "limit", "set", one.container.id, *options)
        assert code in (-9, 0)
        if then == "start":
            other = container(["true"], env={"GPUSHARE_MEMORY": "1Gi"}, **node.way("runtime"))
            other.create()
            other.delete()
        else:
            assert node.cli("prune").returncode == 0
        share, limits = one.said(), node.state / "containers" / one.container.id / "share" / "limits"
        (limit,) = shm_abi.read_limits(limits.read_bytes()).devices
        has = share["memory_limit_bytes"], share["compute_percent"]
        assert has == (limit.memory_limit_bytes, limit.compute_percent) and has in both
        points[number], had = has != had, has
        one.wait(0.01)
    assert number > 200 and set(points.values()) == {True, False}, points
    assert one.group().peak_bytes <= 5 * GIB and len(one.clients()) == PROCESSES


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
