"""Real containers on one simulated device, suspended and resumed by command and by the agent."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gpushare.state.shm_abi import MAX_SLOTS, offset

from simulator.ledger import Ledger
from simulator.models import Costs
from simulator.simhost import CHECKPOINTS, fail_next
from tests.support import driverhost, rootfs
from tests.support.host import BIN, PYTHON, TREE, Node
from tests.support.judge import peak_bytes, taken
from tests.support.kills import Kills
from tests.support.lending import agent, calls_in, inject, wait_until_lent
from tests.support.runc import RuntimeFailed
from tests.support.tenant import Tenant

GIB = 1 << 30
USE = 10 * GIB // 4
POINTS, IN_MAKE_TEST = 24, 4
ALLOCATE = """
from cuda.bindings import driver as cuda
assert cuda.cuInit(0)[0] == 0
assert cuda.cuCtxSetCurrent(cuda.cuDevicePrimaryCtxRetain(0)[1])[0] == 0
assert cuda.cuMemAlloc(1 << 20)[0] == 0
"""
NOTEBOOK = Path(__file__).parent / "programs" / "notebook.py"
SIZE = 4 * GIB  # small, since the host must have the memory


# As drivers 580 and 595 do: a process that once had no room is lost, and a first call that waits crashes
QUICK = Costs(host_rate=1 << 50, restore_once=True, sync_crashes=True)
SLOW = QUICK._replace(host_rate=GIB)


@pytest.fixture
def simhost(make_host: Callable[..., Path]) -> Path:
    return make_host(memory_bytes=SIZE, driver=CHECKPOINTS, costs=QUICK)


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Callable[..., Tenant]]:
    made: list[Tenant] = []

    def make(name: str, node: Node, memory: str = "3Gi", use: int = USE, way: str = "runtime", **more: str) -> Tenant:
        words = ("/opt/channel", str(use), more.get("call", ""))
        env = {"GPUSHARE_MEMORY": memory, "GPUSHARE_DEVICES": more.get("devices", "0")}
        made.append(Tenant(tmp_path / "tenants", name, env, node, way=way, program=NOTEBOOK, words=words))
        made[-1].container.start()
        made[-1].expect("started")
        return made[-1]

    yield make
    for one in made:
        one.close()


def begin(one: Tenant) -> Tenant:
    one.go()
    one.expect("ready")
    return one


def work(one: Tenant) -> dict[str, Any]:
    one.go()
    done = one.expect("worked")
    assert done["right"]
    return done


def listed(node: Node, one: Tenant) -> dict[str, Any]:
    (row,) = (row for row in json.loads(node.cli("list", "--format", "json").stdout) if row["id"] == one.container.id)
    return row


def test_memory_of_a_suspended_container_is_free_for_another(
    notebook: Callable[..., Tenant], node: Node, simhost: Path, way: str
) -> None:
    first = begin(notebook("first", node, way=way))
    done = json.loads(node.cli("suspend", first.container.id, "--format", "json").stdout)
    assert done["changed"] and done["processes"] == 1 and done["bytes"] > USE
    row = listed(node, first)
    share = row["shares"][0]
    assert (row["state"], share["memory_used_bytes"], share["memory_host_bytes"]) == ("suspended", 0, done["bytes"])
    for words in (["list"], ["inspect", first.container.id]):
        assert "ON HOST" in node.cli(*words).stdout
    second = begin(notebook("second", node, way=way))
    work(second)
    refused = node.cli("resume", first.container.id, "--timeout", "0")
    assert refused.returncode and "3 GiB requested, 1 GiB free of 4 GiB" in refused.stderr
    assert listed(node, first)["state"] == "suspended"
    second.container.delete()
    assert node.cli("resume", first.container.id).returncode == 0
    work(first)
    assert listed(node, first)["state"] == "running"


IDLE = {"suspend": {"idle": "1s", "least": "1s"}}


def test_idle_container_makes_room_for_a_start_and_gets_its_memory_back(
    make_node: Callable[..., Node], notebook: Callable[..., Tenant], simhost: Path
) -> None:
    """Each of two notebooks of 3 GiB works on a device of 4 GiB, in turn."""
    node, said = make_node(simhost, policy=IDLE), []
    with agent(node, said):
        notebooks = [notebook(name, node) for name in ("first", "second")]
        assert [listed(node, one)["state"] for one in notebooks] == ["running", "suspended"]
        for one in notebooks:
            begin(one)
        work(notebooks[0])
        assert all(peak_bytes(simhost, one.pid_namespace()) <= 3 * GIB for one in notebooks)
    assert "was suspended" in said[0] and "was resumed" in said[0], said


def suspended(node: Node, one: Tenant) -> None:
    done = node.cli("suspend", one.container.id)
    assert done.returncode == 0, done.stderr


def test_program_that_starts_in_a_suspended_container_waits_too(notebook: Callable[..., Tenant], node: Node) -> None:
    one = begin(notebook("one", node, use=GIB))
    suspended(node, one)
    with ThreadPoolExecutor() as pool:
        started = pool.submit(one.container.exec, PYTHON, "-c", ALLOCATE)
        assert not wait([started], 2).done
        assert node.cli("resume", one.container.id).returncode == 0
        assert started.result().returncode == 0
    work(one)


def test_paused_container_is_refused(notebook: Callable[..., Tenant], node: Node) -> None:
    """The driver waits for ever for a process that is stopped."""
    one = begin(notebook("one", node))
    one.container.command("pause", one.container.id)
    try:
        refused = node.cli("suspend", one.container.id)
        assert refused.returncode == 64 and "is stopped or paused" in refused.stderr
    finally:
        one.container.command("resume", one.container.id)
    suspended(node, one)
    one.container.command("pause", one.container.id)
    assert "is stopped or paused" in node.cli("resume", one.container.id).stderr
    one.container.command("resume", one.container.id)
    assert node.cli("resume", one.container.id).returncode == 0
    work(one)


def test_failed_suspend_is_undone(notebook: Callable[..., Tenant], node: Node, simhost: Path) -> None:
    """The driver loses the process, which it says; the share counts, and nothing waits for ever."""
    one = begin(notebook("one", node))
    fail_next(simhost / "dev" / "nvidia0", "checkpoint")
    refused = node.cli("suspend", one.container.id)
    assert refused.returncode and "did not checkpoint pid" in refused.stderr
    assert listed(node, one)["state"] == "running"
    assert node.cli("suspend", one.container.id).returncode
    one.container.delete()
    assert node.left() == []


@pytest.mark.parametrize("command", ["suspend", "resume"])
def test_command_killed_at_any_call_is_completed(
    notebook: Callable[..., Tenant], node: Node, simhost: Path, tmp_path: Path, kills: Kills, command: str
) -> None:
    """kill -9 from the first call about the state directory on. The share counts unless all of it is on the host."""
    one, log = begin(notebook("one", node)), tmp_path / "calls"
    words = [str(BIN / "gpushare"), "--config", str(node.config), "--state", str(node.state), command, one.container.id]

    def traced(*options: str) -> int:
        return subprocess.run(["strace", "-qq", *options, *words], stdout=subprocess.DEVNULL).returncode

    if command == "resume":
        suspended(node, one)
    assert traced("-o", str(log)) == 0
    names = [line.partition("(")[0] for line in calls_in(log)]
    first = next(n for n, line in enumerate(calls_in(log)) if f"{node.state}/containers" in line)
    for part in kills.some(0, POINTS, IN_MAKE_TEST):
        if command == "suspend":
            assert node.cli("resume", one.container.id).returncode == 0
        else:
            suspended(node, one)
        code = traced("-o", "/dev/null", *inject("KILL", names, first + part * (len(names) - first) // POINTS))
        state = listed(node, one)["state"]
        kills.left += state in ("suspending", "resuming")
        assert code in (0, -signal.SIGKILL), f"point {part}"
        if state != "suspended":
            with pytest.raises(RuntimeFailed, match="3 GiB requested, 1 GiB free"):
                notebook(f"two-{part}", node)
        else:
            assert taken(simhost, one.pid_namespace()).current_bytes == 0
        assert node.cli("resume", one.container.id).returncode == 0, f"point {part}"
        work(one)
    kills.some_left_something()


def test_borrower_is_suspended_and_not_killed(
    make_node: Callable[..., Node], notebook: Callable[..., Tenant], simhost: Path
) -> None:
    node, said = make_node(simhost, policy={"lending": "suspend"}), []
    with agent(node, said):
        first = notebook("first", node, memory="512Mi..3584Mi", use=3 * GIB)
        second = notebook("second", node, memory="2Gi..3Gi", use=6 * GIB // 4)
        wait_until_lent(node)
        begin(first)
        begin(second)
        assert listed(node, first)["state"] == "suspended"
        first.go()
        second.container.delete()
        assert first.expect("worked")["right"]
        assert listed(node, first)["state"] == "running"
    assert "was suspended" in said[0] and "killed" not in said[0], said


def test_lost_state_directory_leaves_a_suspended_container_resumable(
    notebook: Callable[..., Tenant], node: Node
) -> None:
    one = begin(notebook("one", node))
    suspended(node, one)
    rootfs.run("umount", "--lazy", node.state)
    with pytest.raises(RuntimeFailed, match="3 GiB requested, 1 GiB free"):
        notebook("two", node)
    assert listed(node, one)["state"] == "suspending"
    assert node.cli("resume", one.container.id).returncode == 0
    work(one)


SECOND = """
import os, sys, time
from cuda.bindings import driver as cuda
assert cuda.cuInit(0)[0] == 0
assert cuda.cuCtxSetCurrent(cuda.cuDevicePrimaryCtxRetain(int(sys.argv[1]))[1])[0] == 0
managed = sys.argv[2] == "managed"
error, at = cuda.cuMemAllocManaged(1 << 20, 1) if managed else cuda.cuMemAlloc(1 << 20)
assert error == 0 and cuda.cuMemsetD32(at, 7, 1024)[0] == 0
open("/opt/channel/ready", "w").close()
while not os.path.exists("/opt/channel/end"):
    time.sleep(0.02)
got = bytearray(4096)
assert cuda.cuMemcpyDtoH(got, at, 4096)[0] == 0
assert bytes(got) == (7).to_bytes(4, "little") * 1024
"""


@contextmanager
def second_process(one: Tenant, device: int = 0, memory: str = "plain") -> Iterator[Future[Any]]:
    """Another program of the container, which has memory on `device`. It ends well if that is what it wrote."""
    with ThreadPoolExecutor() as pool:
        program = pool.submit(one.container.exec, PYTHON, "-c", SECOND, str(device), memory)
        try:
            while not (one.channel / "ready").exists():
                assert not program.done(), program.result()
            yield program
        finally:
            (one.channel / "end").touch()


@pytest.fixture
def two_gpus(make_host: Callable[..., Path], make_node: Callable[..., Node]) -> Node:
    return make_node(make_host("two", gpus=2, memory_bytes=SIZE, driver=CHECKPOINTS, costs=QUICK))


def test_processes_on_two_devices_are_suspended_together(notebook: Callable[..., Tenant], two_gpus: Node) -> None:
    one = begin(notebook("one", two_gpus, use=GIB, devices="0,1"))
    with second_process(one, device=1) as program:
        done = json.loads(two_gpus.cli("suspend", one.container.id, "--format", "json").stdout)
        assert done["processes"] == 2
        free = json.loads(two_gpus.cli("devices", "--format", "json").stdout)
        assert [device["granted_bytes"] for device in free] == [0, 0]
        for minor in (0, 1):
            assert taken(two_gpus.driver_root, one.pid_namespace(), minor).current_bytes == 0
        assert two_gpus.cli("resume", one.container.id).returncode == 0
        work(one)
    assert program.result().returncode == 0, program.result().stderr


def test_container_of_a_mig_device_is_suspended(
    make_host: Callable[..., Path], make_node: Callable[..., Node], notebook: Callable[..., Tenant]
) -> None:
    """Its memory is free for another container of that MIG device; the other MIG device of the GPU is not touched."""
    simhost = make_host("mig", memory_bytes=2 * SIZE, driver=CHECKPOINTS, costs=QUICK)
    parts = driverhost.divide(simhost)
    node = make_node(simhost)

    def on(part: Path) -> int:
        with Ledger(str(part)) as ledger:
            return ledger.used_bytes

    one, beside = (begin(notebook(f"on-{number}", node, devices=f"0:{number}")) for number in (1, 0))
    suspended(node, one)
    assert on(parts[0]) > USE > on(parts[1])
    second = begin(notebook("second", node, devices="0:1"))
    assert "3 GiB requested, 1 GiB free of 4 GiB" in node.cli("resume", one.container.id, "--timeout", "0").stderr
    work(second)
    second.container.delete()
    assert node.cli("resume", one.container.id).returncode == 0
    work(one)
    work(beside)


# As docs/suspend.md has it
ASK = "printf 1 | dd of=/usr/lib/gpushare/rw/usage bs=1 seek=4024 conv=notrunc status=none"


def test_container_that_asks_is_suspended_until_its_next_call(
    make_node: Callable[..., Node], notebook: Callable[..., Tenant], simhost: Path
) -> None:
    assert ASK in (TREE / "docs" / "suspend.md").read_text()
    node, said = make_node(simhost, policy={"suspend": {"idle": "1h", "least": "1s"}}), []
    with agent(node, said):
        one = begin(notebook("one", node, use=GIB))
        assert one.container.exec("sh", "-c", ASK).returncode == 0
        while listed(node, one)["state"] != "suspended":
            assert one.container.exec("true").returncode == 0
        work(one)
    assert said[0].count("it asked for that") == 1 and said[0].count("was resumed") == 1, said


def test_half_done_suspend_is_undone(notebook: Callable[..., Tenant], node: Node, simhost: Path) -> None:
    """A container hides that its second process has managed memory. The driver loses that one, the first comes back."""
    one = begin(notebook("one", node, use=GIB))
    with second_process(one, memory="managed") as program:
        assert "managed memory" in node.cli("suspend", one.container.id).stderr
        does = offset("gs_usage", "does")
        with open(node.state / "containers" / one.container.id / "rw" / "usage", "r+b") as usage:
            usage.seek(does)
            usage.write(bytes(MAX_SLOTS))
        refused = node.cli("suspend", one.container.id)
        assert refused.returncode and "did not checkpoint pid" in refused.stderr, refused
        assert listed(node, one)["state"] == "running"
        work(one)
    assert program.result().returncode


@pytest.mark.parametrize("way", ["docker pause and unpause", "kill", "two at once"])
def test_nothing_hangs_beside_a_suspended_container(notebook: Callable[..., Tenant], node: Node, way: str) -> None:
    one = begin(notebook("one", node))
    if way == "two at once":
        with ThreadPoolExecutor() as pool:
            ends = [pool.submit(node.cli, "suspend", one.container.id) for _ in range(4)]
            assert sum(end.result().returncode == 0 for end in ends) >= 1
        assert listed(node, one)["state"] == "suspended"
    else:
        suspended(node, one)
    if way == "kill":
        one.go()  # it waits in a call
        one.container.kill()
        assert one.container.wait(10) == 128 + signal.SIGKILL
        assert node.cli("resume", one.container.id).returncode
        one.container.delete()
        assert node.left() == []
        begin(notebook("two", node))
        return
    if way == "docker pause and unpause":
        one.container.command("pause", one.container.id)
        one.container.command("resume", one.container.id)
    assert node.cli("resume", one.container.id).returncode == 0
    work(one)
