"""The command line beside real containers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from tests.support import rootfs
from tests.support.host import Node
from tests.support.runc import Container
from tests.support.tenant import Tenant

MakeContainer = Callable[..., Container]
GIB = 1 << 30


def snapshot(directory: Path) -> list[tuple[str, int, int]]:
    """Every file below a directory with its size and time of change."""
    found = []
    for folder, folders, files in os.walk(directory):
        for name in (*folders, *files):
            status = os.lstat(os.path.join(folder, name))
            found.append((os.path.join(folder, name), status.st_size, status.st_mtime_ns))
    return sorted(found)


def test_list_shows_a_container_s_use_from_start_to_end(tenant: Callable[..., Tenant], node: Node) -> None:
    """The tenant's own report and the host's view agree."""
    one = tenant("a", {"GPUSHARE_MEMORY": "4Gi"})
    one.container.start()
    one.expect("seen")
    (before,) = json.loads(node.cli("list", "--format", "json").stdout)
    one.go()
    got = one.expect("full")["got_bytes"]
    (full,) = json.loads(node.cli("list", "--format", "json").stdout)
    assert full["process_count"] == 1
    used_before, used_full = (value["shares"][0]["memory_used_bytes"] for value in (before, full))
    assert got <= used_full <= 4 * GIB and used_full - used_before >= got
    assert full["shares"][0]["refused"] >= 1

    details = json.loads(node.cli("inspect", one.container.id[:-1], "--format", "json").stdout)
    (process,) = details["processes"]
    assert process["memory_used_bytes"] == [used_full]
    assert process["pid"] == one.container.pid and process["container_pid"] == 1

    path = node.state / "containers" / one.container.id / "rw" / "usage"
    page = path.read_bytes()
    one.container.kill()
    one.container.wait()
    assert path.read_bytes() != page  # the kernel itself marked the slot
    (device,) = json.loads(node.cli("devices", "--format", "json").stdout)
    assert (device["free_bytes"], device["containers"]) == (16 * GIB, 0)
    (ended,) = json.loads(node.cli("list", "--format", "json").stdout)
    assert ended["state"] == "dead" and "is gone" in ended["note"]
    one.container.delete()
    assert json.loads(node.cli("list", "--format", "json").stdout) == []


def test_devices_work_before_the_first_container(node: Node) -> None:
    """The command works without a state directory and creates none."""
    (device,) = json.loads(node.cli("devices", "--format", "json").stdout)
    assert (device["memory_bytes"], device["free_bytes"], device["state"]) == (16 * GIB, 16 * GIB, "open")
    assert os.listdir(node.state) == [] and str(node.state) not in rootfs.mount_points()


def test_explain_predicts_the_start_and_changes_nothing(container: MakeContainer, node: Node, tmp_path: Path) -> None:
    one = container(["cat", "/proc/self/mounts"], env={"GPUSHARE_MEMORY": "25%"}, hook=node.hook())
    assert node.cli("refresh").returncode == 0
    before = snapshot(node.state), snapshot(one.bundle / "disk" / "upper"), rootfs.mount_points()
    explained = node.cli("explain", str(one.bundle))
    value = json.loads(node.cli("explain", str(one.bundle), "--format", "json").stdout)
    assert explained.returncode == 0, explained.stderr
    assert (snapshot(node.state), snapshot(one.bundle / "disk" / "upper"), rootfs.mount_points()) == before
    assert "4 GiB (4294967296 bytes)" in explained.stdout
    assert one.run() == 0
    kinds = {"Mount", "DeviceNode"}
    targets = {op["target"] for op in value["plan"]["ops"] if op["op"] in kinds}
    assert len(targets) > 6
    mounted = {line.split()[1] for line in one.stdout.splitlines()}
    assert targets <= mounted
    lease = json.loads((node.state / "containers" / one.id / "lease.json").read_text())
    assert lease["shares"][0]["memory_limit_bytes"] == 4 * GIB
