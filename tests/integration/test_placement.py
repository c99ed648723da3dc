"""Containers that request any device, with real runc: a hundred concurrent starts, some killed, on four simulated
devices. Nothing is granted twice, nothing stays granted to a dead container, and no memory stays unused."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import pytest
from gpushare.state import leases, storage

from tests.support import processes
from tests.support.host import Node
from tests.support.runc import Container, RuntimeFailed, close_all

MakeContainer = Callable[..., Container]
GIB = 1 << 30
SHARE = 700 << 20
DEVICES, STARTS = 4, 100
FIT = 16 * GIB // SHARE  # on each device
# For killed starts, which take twice as long
BIG_SHARE, KILLED_OF = 1400 << 20, 45
BIG_FIT = 16 * GIB // BIG_SHARE


def granted(node: Node) -> Counter[str]:
    """Bytes on each device at one moment, from the leases of living starts and containers."""
    with leases.locked(str(node.state)):
        live = leases.view(str(node.state)).live
    sums: Counter[str] = Counter()
    for lease in live:
        for share in lease.shares:
            sums[share.device.uuid] += share.memory_limit_bytes or 0
    return sums


def limited(node: Node) -> Counter[str]:
    """The same from the limits files, which apply inside the containers."""
    sums: Counter[str] = Counter()
    for path in (node.state / "containers").glob("*/share/limits"):
        for device in storage.read_limits(str(path)).devices:
            sums[device.uuid] += device.memory_limit_bytes or 0
    return sums


def create(one: Container, node: Node, started: Callable[[subprocess.Popen[bytes]], None] = lambda _: None) -> str:
    """Create and start; return "" or the line of the refusal. A start that fails because the host is busy, which
    another line says, is retried."""
    while True:
        process = one.begin_create()
        started(process)
        code = process.wait()
        assert max(granted(node).values(), default=0) <= 16 * GIB
        if code == 0:
            one.pid = int((one.bundle / "pid").read_text())
            one.start()
            return ""
        line = (one.stderr.strip().splitlines() or ["no message"])[-1]
        if "the start took longer than" not in line:
            return line.replace("\\", "")  # runc quotes hook output


def make_many(node: Node, way: str, container: MakeContainer, count: int, share: int = SHARE) -> list[Container]:
    env = {"GPUSHARE_DEVICES": "any", "GPUSHARE_MEMORY": str(share)}
    return [container(["sleep", "inf"], env=env, name=f"n{at}", **node.way(way)) for at in range(count)]


@pytest.mark.parametrize(("way", "strategy"), [("hook", "binpack"), ("runtime", "spread")])
def test_hundred_concurrent_starts_fill_four_devices_exactly(
    make_host: Callable[..., Path], make_node: Callable[..., Node], container: MakeContainer, way: str, strategy: str
) -> None:
    node = make_node(make_host(gpus=DEVICES, memory_bytes=16 * GIB), placement={"strategy": strategy})
    assert node.cli("refresh").returncode == 0
    with ThreadPoolExecutor(STARTS) as pool:
        lines = list(pool.map(lambda one: create(one, node), make_many(node, way, container, STARTS)))
    refused = [line for line in lines if line]
    assert len(refused) == STARTS - DEVICES * FIT, refused
    full = "; ".join(f"GPU {at}: 284 MiB of 16 GiB free" for at in range(DEVICES))
    for line in refused:
        assert 'no device fits GPUSHARE_DEVICES="any" and ' in line and f" of memory: {full}; ask for less" in line
    for sums in (granted(node), limited(node)):
        assert list(sums.values()) == [FIT * SHARE] * DEVICES
    assert len(node.leases()) == DEVICES * FIT
    shown = json.loads(node.cli("devices", "--format", "json").stdout)
    assert [(one["containers"], one["free_bytes"]) for one in shown] == [(FIT, 16 * GIB - FIT * SHARE)] * DEVICES


class Killer:
    """Kill one start whenever another has reached its process: the process alone, or with its descendants."""

    def __init__(self) -> None:
        self._lock, self._running, self.killed = Lock(), dict[int, subprocess.Popen[bytes]](), 0
        self._seen = 0

    def process_started(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._seen += 1
            running = [one for one in self._running.values() if one.poll() is None]
            self._running = {one.pid: one for one in (*running, process)}
            if running and self._seen % 3 == 0:
                self.killed += 1
                victim = running[self._seen % len(running)]
                below = descendants(victim.pid) if self._seen % 2 else []
                for pid in (victim.pid, *below):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):  # it may end at any moment
        for task in os.listdir(f"/proc/{pid}/task"):
            found += [int(word) for word in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return found + [below for child in found for below in descendants(child)]


def wait_for_orphans(known: set[int]) -> None:
    """Wait until processes left by killed starts (hooks and half-made containers) have ended."""
    for pid, command in processes.children().items():
        if pid not in known:
            assert processes.wait_exit(pid, 60) is not None, f"{command} goes on without its start"


@pytest.mark.parametrize("way", ["hook", "runtime"])
def test_killed_starts_leave_no_memory_reserved(
    make_host: Callable[..., Path], make_node: Callable[..., Node], container: MakeContainer, way: str
) -> None:
    """A third of 45 concurrent starts is killed; then the devices are filled, and everything is released."""
    node = make_node(make_host(gpus=DEVICES, memory_bytes=16 * GIB))
    assert node.cli("refresh").returncode == 0
    before, killer = set(processes.children()), Killer()
    first = make_many(node, way, container, KILLED_OF, BIG_SHARE)
    with ThreadPoolExecutor(KILLED_OF) as pool:
        lines = list(pool.map(lambda one: create(one, node, killer.process_started), first))
    living = [one for one, line in zip(first, lines) if not line]
    assert killer.killed >= KILLED_OF // 4 and len(living) >= KILLED_OF // 3, lines
    dead = set(first) - set(living)
    for one in dead:  # as engines do, if runc knows the container
        with contextlib.suppress(RuntimeFailed):
            one.delete()
    wait_for_orphans(before | {one.pid for one in living})
    for one in dead:
        one.after_kill()
    assert node.cli("prune").returncode == 0
    assert node.leases() == sorted(one.id for one in living)
    assert sum(granted(node).values()) == len(living) * BIG_SHARE == sum(limited(node).values())

    with ThreadPoolExecutor(KILLED_OF) as pool:
        more = make_many(node, way, container, DEVICES * BIG_FIT - len(living) + 2, BIG_SHARE)
        lines = list(pool.map(lambda one: create(one, node), more))
    assert len([line for line in lines if line]) == 2, lines
    assert sorted(granted(node).values()) == [BIG_FIT * BIG_SHARE] * DEVICES == sorted(limited(node).values())
    close_all([*first, *more])
    assert node.cli("prune").returncode == 0
    assert node.left() == []


@pytest.mark.parametrize("way", ["hook", "runtime"])
def test_equal_shares_are_spread_and_reported(
    make_host: Callable[..., Path], make_node: Callable[..., Node], container: MakeContainer, way: str
) -> None:
    """A container that names a device by its replica, as NVIDIA's device plugin does, and three that request any."""
    slicing = {"timeSlicing": {"resources": [{"name": "nvidia.com/gpu", "replicas": 2}]}}
    node = make_node(
        make_host(gpus=2, memory_bytes=16 * GIB), placement={"strategy": "spread"}, sharing=slicing, name=f"equal-{way}"
    )
    uuids = [one["uuid"] for one in json.loads(node.cli("devices", "--format", "json").stdout)]
    any_of_them = {"GPUSHARE_DEVICES": "any,model=simulated,free>=8Gi"}
    asked = [{"NVIDIA_VISIBLE_DEVICES": f"{uuids[1]}::1"}, *[any_of_them] * 3]
    for env, index in zip(asked, (1, 0, 0, 1)):
        one = container(["sleep", "inf"], env=env, **node.way(way))
        told = node.cli("explain", str(one.bundle)).stdout
        assert "an equal share (1 of 2)" in told and f"placed       GPU {index}: " in told
        one.start()
        (device,) = storage.read_limits(str(node.state / "containers" / one.id / "share" / "limits")).devices
        assert (device.uuid, device.memory_limit_bytes, device.compute_percent) == (uuids[index], 8 * GIB, 50)
    last = container(["true"], env={"GPUSHARE_DEVICES": "any,mig=no"}, **node.way(way))
    with pytest.raises(RuntimeFailed, match=r"no device fits .*: GPU 0: 0 B of 16 GiB free; GPU 1: 0 B of 16 GiB free"):
        last.create()
    small = container(["true"], env={"GPUSHARE_MEMORY": "1Gi"}, **node.way(way))
    with pytest.raises(RuntimeFailed, match="GPU 0: 0 B of 16 GiB free"):
        small.create()
