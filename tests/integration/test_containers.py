"""Test the test library: a container is real, separate, and removed afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import processes, rootfs
from tests.support.runc import Container, RuntimeFailed


def test_failing_hook_stops_the_container_and_its_output_is_shown(container: Callable[..., Container]) -> None:
    hook = {"path": "/bin/sh", "args": ["sh", "-c", "echo why >&2; exit 9"]}
    one = container(["true"], edit=lambda spec: spec["hooks"].update(prestart=[hook]))
    with pytest.raises(RuntimeFailed) as failed:
        one.start()
    assert "why" in failed.value.last_line


def test_close_leaves_nothing(tmp_path: Path) -> None:
    before = rootfs.mount_points()
    one = Container(tmp_path, ["sleep", "inf"]).start()
    assert rootfs.mount_points() != before
    assert one.pid in processes.children()
    one.close()
    assert rootfs.mount_points() == before
    assert one.pid not in processes.children()
    assert not list(tmp_path.iterdir())
    assert not Path(f"/sys/fs/cgroup/devices/{one.id}").exists()


def test_only_the_leftovers_of_a_killed_runc_are_removed(container: Callable[..., Container]) -> None:
    one = container(["true"])
    before = rootfs.mount_points()
    copy, other = (one.bundle / "runtime" / one.id / name for name in ("runc.aB3xYz", "state"))
    group = Path("/sys/fs/cgroup/devices") / one.id
    for path in (group, copy.parent.parent, copy.parent, copy, other):
        path.mkdir()
    for path in (copy, other):
        rootfs.mount_tmpfs(path, "size=4k")
    one.after_kill()
    assert rootfs.mount_points() == [*before, str(other)]
    assert not group.exists()
    rootfs.unmount_below(other)


def test_test_run_has_its_own_mount_namespace() -> None:
    assert os.readlink("/proc/self/ns/mnt") != os.readlink(f"/proc/{os.getppid()}/ns/mnt")
