"""The command line beside real containers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

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

    one.go()
    one.expect("freed")
    assert one.container.wait() == 0
    (ended,) = json.loads(node.cli("list", "--format", "json").stdout)
    assert ended["state"] == "dead" and "is gone" in ended["note"]
    one.container.delete()
    assert json.loads(node.cli("list", "--format", "json").stdout) == []


def test_killed_process_is_not_counted(tenant: Callable[..., Tenant], node: Node) -> None:
    one = tenant("a", {"GPUSHARE_MEMORY": "4Gi"})
    one.container.start()
    one.expect("seen")
    one.go()
    one.expect("full")
    path = node.state / "containers" / one.container.id / "rw" / "usage"
    page = path.read_bytes()
    one.container.kill()
    one.container.wait()
    assert path.read_bytes() != page  # the kernel itself marked the slot
    (device,) = json.loads(node.cli("devices", "--format", "json").stdout)
    assert (device["free_bytes"], device["containers"]) == (16 * GIB, 0)


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


def test_start_after_refresh_reads_one_file(container: MakeContainer, node: Node) -> None:
    value = json.loads(node.cli("refresh", "--format", "json").stdout)
    assert value["devices"][0]["memory_bytes"] == 16 * GIB
    written = (node.state / "node.json").stat().st_mtime_ns
    assert container(["true"], env={"GPUSHARE_MEMORY": "1Gi"}, hook=node.hook()).run() == 0
    assert (node.state / "node.json").stat().st_mtime_ns == written


def test_refresh_after_a_driver_update_names_the_running_container(
    container: MakeContainer, node: Node, simhost: Path
) -> None:
    """The container keeps the old driver, the next one gets the new driver, and refresh names the old container."""
    newer = "535.300.01"
    one = container(["sleep", "inf"], env={"GPUSHARE_MEMORY": "1Gi"}, hook=node.hook()).start()
    for path in list(simhost.rglob("*.so.535.261.03")):
        shutil.copy(path, str(path).replace("535.261.03", newer))
    for name in ("sys/module/nvidia/version", "proc/driver/nvidia/version"):
        path = simhost / name
        path.write_text(path.read_text().replace("535.261.03", newer))
    value = json.loads(node.cli("refresh", "--format", "json").stdout)
    assert {"what": "driver", "before": "535.261.03", "after": newer} in value["changes"]
    assert value["outdated"] == [{"id": one.id, "why": "was started with driver 535.261.03"}]
    assert [found["state"] for found in json.loads(node.cli("list", "--format", "json").stdout)] == ["running"]
    doctor = json.loads(node.cli("doctor", "--format", "json").stdout)
    assert next(row for row in doctor["checks"] if row["name"] == "containers")["result"] == "warn"
    other = container(["sh", "-c", "ls -l /usr/lib/*/libcuda.so.1"], env={"GPUSHARE_MEMORY": "1Gi"}, hook=node.hook())
    assert other.run() == 0 and newer in other.stdout
    assert node.cli("refresh").stdout.count("nothing has changed") == 1


def test_each_command_s_json_is_one_document(container: MakeContainer, node: Node) -> None:
    one = container(["sleep", "inf"], env={"GPUSHARE_MEMORY": "1Gi"}, hook=node.hook()).start()
    for command in (
        *(["list"], ["inspect", one.id], ["devices"], ["explain", str(one.bundle)], ["prune", "--dry-run"]),
        *(["config", "check"], ["config", "show"], ["refresh"], ["version"], ["top", "--once"]),
        *(["pause", one.id], ["resume", one.id]),
        *(["limit", "show", one.id], ["limit", "set", one.id, "--memory", "2Gi", "--dry-run"]),
    ):
        done = node.cli(*command, "--format", "json")
        assert (done.returncode, done.stderr) == (0, ""), command
        json.loads(done.stdout)
        text = node.cli(*command).stdout
        assert "\x1b" not in text and "█" not in text and "─" not in text, command


@pytest.mark.parametrize("command", [["list"], ["devices"]])
def test_closed_output_pipe_is_no_error(container: MakeContainer, node: Node, command: list[str]) -> None:
    """`gpushare list | head -0`"""
    import subprocess

    from tests.support.host import BIN

    program = [str(BIN / "gpushare"), "--config", str(node.config), "--state", str(node.state), *command]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(program, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
