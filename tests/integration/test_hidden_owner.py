"""Mounts that hide the owner of their files: on a file system without that feature, and after an upgrade."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

from tests.security import owners
from tests.support.host import PYTHON, Node, python_mounts
from tests.support.rootfs import unmount_below
from tests.support.runc import Container
from tests.unit.test_doctor_kernel import overlay

MakeContainer = Callable[..., Container]
ENV = {"GPUSHARE_MEMORY": "1Gi"}


def leased(one: Container) -> list[str]:
    """Return the mounted files on which the container's root can take a lease."""
    done = one.exec(PYTHON, "-c", textwrap.dedent(owners.LEASES))
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def test_driver_without_id_mapped_mounts_starts_and_doctor_warns(
    container: MakeContainer, make_node: Callable[..., Node], simhost: Path, way: str, tmp_path: Path
) -> None:
    """Containers still start, all supported files are protected, and doctor names the others."""
    (tmp_path / "disk").mkdir()
    root = overlay(tmp_path / "disk")
    try:
        driver = Path(shutil.copytree(simhost, root / "driver", symlinks=True))
        node = make_node(driver)
        for _ in range(2):
            one = container(["sleep", "inf"], env=ENV, mounts=python_mounts(), **node.way(way)).start()
            assert {os.path.dirname(path) for path in leased(one)} == {f"{owners.OURS}/driver"}
            assert node.cli("pause", one.id).returncode == 0
            one.kill()
            one.wait()
            one.delete()
        marks = [name for name in os.listdir(node.state / "idmap") if name.startswith("refused-")]
        assert marks == [f"refused-{os.major(root.stat().st_dev)}:{os.minor(root.stat().st_dev)}"]
        (check,) = (
            one
            for one in json.loads(node.cli("doctor", "--format", "json").stdout)["checks"]
            if one["name"] == "file leases"
        )
        assert check["result"] == "warn" and "(overlay)" in check["detail"] and "leases-enable=0" in check["hint"]
    finally:
        subprocess.run(["umount", "-l", root], check=True)


def test_state_directory_of_an_earlier_version_is_completed(container: MakeContainer, node: Node, way: str) -> None:
    """After an upgrade, containers run and their directories belong to root."""
    old = container(["sleep", "inf"], env=ENV, mounts=python_mounts(), **node.way(way)).start()
    unmount_below(node.state / "idmap")
    shutil.rmtree(node.state / "idmap")
    for path in (node.state / "containers", node.state / "containers" / old.id):
        os.chown(path, 0, 0)
    new = container(["sleep", "inf"], env=ENV, mounts=python_mounts(), **node.way(way)).start()
    assert leased(new) == []
    for one in (old, new):
        assert node.cli("limit", "set", one.id, "--memory", "512Mi").returncode == 0
        one.kill()
        one.wait()
        one.delete()
    assert node.left() == []
