"""Tests of device access for both cgroup versions; test_cgroup_v1.py and test_cgroup_v2.py run them in their own
views."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import device_matrix, ns_util
from tests.integration.device_matrix import View, allow, matrix

Container = tuple[ns_util.Runc, Path, int]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ns_util.make_image(tmp_path_factory.mktemp("base") / "rootfs")


@pytest.fixture
def container(view: View, image: Path, tmp_path: Path) -> Iterator[Container]:
    with device_matrix.running(tmp_path, image, view.prefix) as made:
        yield made


def exactly_the_granted_devices_become_accessible(view: View, container: Container) -> None:
    """They stay so when the runtime changes the cgroup, and another GPU's node that is made inside cannot be opened."""
    runc, rootfs, pid = container
    before = matrix(runc, rootfs)
    device_matrix.check_premises(before)
    allow(view, pid)
    device_matrix.check_granted(before, matrix(runc, rootfs))
    for act in (device_matrix.update, device_matrix.pause_and_resume):
        act(runc)
        device_matrix.check_granted(before, matrix(runc, rootfs))
    done = runc.run("exec", runc.id, "sh", "-c", "mknod /tmp/n c 195 1; exec 3<>/tmp/n", check=False)
    assert done.returncode != 0
    assert "not permitted" in done.stderr
