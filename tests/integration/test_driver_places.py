"""Starts on hosts whose driver is not where distributions have it, and messages that lead to a setting that works."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from simulator.simhost import LIBDIR, VERSION
from tests.integration.bad_starts import DEVICE, ONE_GIB, MakeContainer, MakeNode, refused
from tests.support.host import Node, write_config

SMI = ["nvidia-smi", "-L"]


def move(root: Path, libraries: str, programs: str) -> None:
    """Move the driver's libraries and programs."""
    for old, new in ((LIBDIR, libraries), ("usr/bin", programs)):
        (root / new).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(root / old, root / new)


def starts(node: Node, container: MakeContainer, way: str) -> None:
    """Assert that a container sees a device of its size."""
    one = container(SMI, env=ONE_GIB, **node.way(way))
    assert one.run() == 0, one.stderr
    assert one.stdout.startswith("GPU 0: ")
    one.delete()


@pytest.mark.parametrize(
    ("libraries", "programs"),
    [
        ("home/kubernetes/bin/nvidia/lib64", "home/kubernetes/bin/nvidia/bin"),  # Container-Optimized OS on GKE
        (f"opt/nvidia/{VERSION}/usr/lib64", f"opt/nvidia/{VERSION}/usr/bin"),  # Flatcar
        ("usr/local/glibc/usr/lib", "usr/local/bin"),  # Talos
    ],
)
def test_libraries_in_a_place_of_their_own_are_used(
    container: MakeContainer, make_node: MakeNode, simhost: Path, way: str, libraries: str, programs: str
) -> None:
    """shared/cases/engines/06: /dev and /proc stay."""
    move(simhost, libraries, programs)
    node = make_node(simhost)
    done = node.cli("refresh")
    assert done.returncode == 0, done.stderr
    assert node.cli("doctor").stdout.count(f"libraries in {simhost}/{libraries}") == 1
    starts(node, container, way)


def test_container_of_the_driver_is_used(
    container: MakeContainer, make_node: MakeNode, simhost: Path, way: str
) -> None:
    """As NVIDIA's GPU Operator leaves its root file system on the host, with device nodes that the host lacks."""
    move(simhost, f"run/nvidia/driver/{LIBDIR}", "run/nvidia/driver/usr/bin")
    shutil.move(simhost / "dev", simhost / "run/nvidia/driver/dev")
    (simhost / "run/nvidia/driver/.gpushare-sim").write_bytes((simhost / ".gpushare-sim").read_bytes())
    node = make_node(simhost)
    done = node.cli("refresh")
    assert done.returncode == 0, done.stderr
    driver = f"{simhost}/run/nvidia/driver"
    assert f"in {simhost} (libraries in {driver}) (dev in {driver}), 1 device" in done.stdout
    value = json.loads(node.cli("refresh", "--format", "json").stdout)
    assert (value["root"], value["libraries"], value["dev"]) == (str(simhost), driver, driver)
    starts(node, container, way)


def test_messages_lead_to_settings_that_work(
    container: MakeContainer, make_node: MakeNode, simhost: Path, tmp_path: Path
) -> None:
    """shared/cases/engines/06: libraries where gpushare does not search them: by driver.root, then with that directory
    as driver.root, then as driver.libraries; then device nodes elsewhere."""
    move(simhost, "srv/driver/lib64", "srv/driver/bin")
    node, there = make_node(simhost), f"{simhost}/srv/driver"

    def is_refused(message: str) -> None:
        refused(node, container(["true"], env=ONE_GIB), DEVICE, message)
        done = node.cli("refresh")
        assert done.returncode == DEVICE and message in done.stderr and done.stderr.count("\n") == 1

    is_refused(f"no libcuda.so.{VERSION} below {simhost}; install the driver's libraries, or set driver.libraries")
    write_config(node.config, simhost, driver={"root": there})
    is_refused("load it, or set driver.libraries in place of driver.root")
    for libraries, programs in ((f"{there}/lib64", 0), (there, 2)):
        write_config(node.config, simhost, driver={"root": str(simhost), "libraries": libraries})
        assert node.cli("refresh").returncode == 0
        assert f"libraries in {there}/lib64, {programs} programs" in node.cli("doctor").stdout
    starts(node, container, "runtime")

    (tmp_path / "nodes").mkdir()
    shutil.move(simhost / "dev", tmp_path / "nodes/dev")
    done = node.cli("refresh")
    assert done.returncode == DEVICE, done.stdout
    assert f"no device node {simhost}/dev/nvidia0" in done.stderr and "set driver.dev" in done.stderr
    (tmp_path / "nodes/.gpushare-sim").write_bytes((simhost / ".gpushare-sim").read_bytes())
    write_config(
        node.config, simhost, driver={"root": str(simhost), "libraries": there, "dev": str(tmp_path / "nodes")}
    )
    assert node.cli("refresh").returncode == 0
    starts(node, container, "runtime")


def test_refresh_fails_without_a_device(make_node: MakeNode, simhost: Path) -> None:
    shutil.rmtree(simhost / "proc/driver/nvidia/gpus")
    done = make_node(simhost).cli("refresh")
    assert done.returncode == DEVICE and f"no NVIDIA device on this host (driver root {simhost})" in done.stderr
    assert "0 devices" in done.stdout
