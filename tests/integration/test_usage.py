"""The usage journal and quotas with real containers, over kills, a lost state directory and concurrent starts."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import rootfs
from tests.support.host import PYTHON, TREE, Node, python_mounts
from tests.support.runc import Container

MakeContainer = Callable[..., Container]
GIB = 1 << 30
TENANT = TREE / "demo" / "tenant.py"
GRAB = TREE / "tests" / "integration" / "programs" / "grab.py"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
SHARE = {"GPUSHARE_MEMORY": "4Gi", "GPUSHARE_COMPUTE": "50%"}
POD = {
    "io.kubernetes.cri.container-type": "container",
    "io.kubernetes.cri.container-name": "main",
    "io.kubernetes.cri.sandbox-namespace": "team-a",
    "io.kubernetes.cri.sandbox-name": "pod",
    "io.kubernetes.cri.image-name": "registry.example/image:1",
}


@pytest.fixture
def booked(make_node: Callable[..., Node], simhost: Path, tmp_path: Path) -> Node:
    return make_node(simhost, usage={"journal": str(tmp_path / "lib" / "usage.log")})


@pytest.fixture(params=["hook", "runtime"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def usage(node: Node, by: str = "user", prefix: tuple[str, ...] = (), *more: str) -> list[dict[str, Any]]:
    """`prefix`: words before the command."""
    done = node.cli("usage", "--format", "json", "--by", by, *more, prefix=prefix)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["groups"]
    return found


def test_container_is_accounted_from_start_to_end(container: MakeContainer, booked: Node, way: str) -> None:
    """It takes 4 GiB and is refused more. Its account is in `inspect`, the log, the metrics and the journal."""
    mounts = python_mounts(TENANT, GRAB)
    one = container(["sleep", "inf"], env=SHARE, mounts=mounts, annotations=POD, **booked.way(way, cri=True)).start()
    assert one.exec(PYTHON, f"/opt/{GRAB.name}").returncode == 0
    value = json.loads(booked.cli("inspect", one.id, "--format", "json").stdout)
    account = value["shares"][0]["account"]
    assert (value["namespace"], value["pod"], value["container"]) == ("team-a", "pod", "main")
    assert (value["image"], value["uid"]) == ("registry.example/image:1", 0)
    assert 3.5 * GIB < account["memory_peak_bytes"] <= 4 * GIB and account["refused"] >= 1
    assert 0 < account["memory_byte_seconds_used"] <= account["memory_byte_seconds_granted"]
    text = booked.cli("export", "--once").stdout
    labels = f'container="main",id="{one.id}",name="team-a/pod/main",namespace="team-a",pod="pod"'
    assert f"gpushare_account_peak_bytes{{{labels}" in text
    assert usage(booked, "namespace")[0]["running"] == 1
    one.delete()
    (group,) = usage(booked, "image")
    assert (group["name"], group["containers"], group["running"], group["end_unknown"]) == (
        *("registry.example/image:1", 1, 0, 0),
    )
    assert group["memory_peak_bytes"] == account["memory_peak_bytes"] and group["refused"] == account["refused"]
    (line,) = (one for one in booked.decisions() if one["decision"] == "released")
    assert (line["end"], line["peak"]) == ("recorded", str(account["memory_peak_bytes"]))


def test_reboot_ends_containers_without_a_line(container: MakeContainer, booked: Node, tmp_path: Path) -> None:
    """The container and its state directory are gone, and no hook ran; the journal stays."""
    one = container(["sleep", "inf"], env=SHARE, **booked.way("hook")).start()
    other = container(["sleep", "inf"], env={"GPUSHARE_MEMORY": "1Gi"}, **booked.way("hook")).start()
    text = (tmp_path / "lib" / "usage.log").read_text()
    for container_ in (one, other):
        os.kill(container_.pid, signal.SIGKILL)
    rootfs.run("umount", "--lazy", booked.state)
    (group,) = usage(booked)
    assert (group["containers"], group["running"], group["end_unknown"]) == (2, 0, 2)
    assert 0 < group["gpu_seconds_granted"] < 60  # up to the start of the second, which would have found it dead
    assert (tmp_path / "lib" / "usage.log").read_text() == text  # reading writes nothing


@pytest.fixture
def reboot(tmp_path: Path) -> Iterator[Callable[[Node], tuple[str, ...]]]:
    """reboot(node) -> words before each command of the next boot: /run is empty, the boot has another id, and its
    clocks begin again. All processes of the node have been killed."""
    boot_id = tmp_path / "boot_id"
    mounted: list[str] = []

    def begin(node: Node) -> tuple[str, ...]:
        rootfs.run("umount", "--lazy", node.state)
        boot_id.write_text(f"{uuid.uuid4()}\n")
        rootfs.run("mount", "--bind", boot_id, BOOT_ID)
        mounted.append(BOOT_ID)
        passed = {"monotonic": time.CLOCK_MONOTONIC, "boottime": time.CLOCK_BOOTTIME}
        clocks = [f"--{name}=-{int(time.clock_gettime(clock)) - 1}" for name, clock in passed.items()]
        return ("unshare", "--fork", "--time", *clocks, "--")

    yield begin
    for point in mounted:
        rootfs.run("umount", point)


def lost(one: Container) -> None:
    """Kill a container, and remove what its runtime keeps in /run: no hook runs for it."""
    os.kill(one.pid, signal.SIGKILL)
    one.wait()
    shutil.rmtree(one.bundle / "runtime")
    one.after_kill()


def test_usage_spans_kills_and_a_reboot(
    container: MakeContainer, booked: Node, tmp_path: Path, reboot: Callable[[Node], tuple[str, ...]], way: str
) -> None:
    """Containers that are killed, with and without their hook, and two that run at the reboot. Each counts once, by
    the time that it ran, and the next boot's container of the same id is another one."""
    mounts = python_mounts(TENANT, GRAB)
    began = time.monotonic()
    killed = container(["sleep", "inf"], env=SHARE, mounts=mounts, annotations=POD, **booked.way(way, cri=True)).start()
    assert killed.exec(PYTHON, f"/opt/{GRAB.name}").returncode == 0
    killed.kill()
    killed.wait()
    killed.delete()
    unreported = container(["sleep", "inf"], env=SHARE, annotations=POD, **booked.way(way, cri=True)).start()
    lost(unreported)
    running, last = (
        container(["sleep", "inf"], env=SHARE, annotations=POD, **booked.way(way, cri=True)).start() for _ in range(2)
    )
    (before,) = usage(booked, "namespace")
    assert (before["containers"], before["running"], before["end_unknown"]) == (4, 2, 1)
    journal = (tmp_path / "lib" / "usage.log").read_text()
    for one in (running, last):
        lost(one)
    prefix = reboot(booked)
    rebooted = datetime.datetime.now().isoformat()
    (after,) = usage(booked, "namespace", prefix)
    assert (after["containers"], after["running"], after["end_unknown"]) == (4, 0, 3)
    assert (tmp_path / "lib" / "usage.log").read_text() == journal, "reading writes nothing"
    arguments = {"env": SHARE, "annotations": POD, **booked.way(way, cri=True)}
    with Container(tmp_path / "later", ["sleep", "inf"], prefix=prefix, id=last.id, **arguments) as again:
        again.start()
        (after,) = usage(booked, "namespace", prefix)
        assert (after["containers"], after["running"], after["end_unknown"]) == (5, 1, 3)
        assert after["memory_peak_bytes"] > 3.5 * GIB and after["refused"] >= 1
        passed = time.monotonic() - began
        assert 0 < after["gpu_seconds_granted"] < 5 * passed / 2
        assert after["memory_byte_seconds_granted"] < 5 * 4 * GIB * passed
        (new,) = usage(booked, "namespace", prefix, "--since", rebooted)
        assert (new["containers"], new["running"], new["end_unknown"]) == (1, 1, 0)
        again.delete()
        (after,) = usage(booked, "namespace", prefix)
        assert (after["containers"], after["running"], after["end_unknown"]) == (5, 0, 3)
        assert (tmp_path / "lib" / "usage.log").read_text().startswith(journal)


def test_lost_state_directory_loses_no_account(container: MakeContainer, booked: Node) -> None:
    one = container(["sleep", "inf"], env=SHARE, annotations=POD, **booked.way("runtime", cri=True)).start()
    before = json.loads(booked.cli("inspect", one.id, "--format", "json").stdout)
    rootfs.run("umount", "--lazy", booked.state)
    assert booked.cli("refresh").returncode == 0
    after = json.loads(booked.cli("inspect", one.id, "--format", "json").stdout)
    assert (after["namespace"], after["pod"], after["uid"]) == ("team-a", "pod", 0)
    granted = [value["shares"][0]["account"]["gpu_seconds_granted"] for value in (before, after)]
    assert granted[0] <= granted[1]
    assert [(one["name"], one["containers"]) for one in usage(booked, "namespace")] == [("team-a", 1)]


def test_program_of_run_is_found_by_the_next_start(booked: Node) -> None:
    for name in ("first", "second"):
        assert booked.cli("run", "--name", name, "--memory", "1Gi", "true").returncode == 0
    assert booked.cli("prune").returncode == 0
    (group,) = usage(booked)
    assert (group["containers"], group["running"], group["end_unknown"]) == (2, 0, 2)
