"""Device access on cgroup v1 (devices.allow), in a view with v1 only and on a hybrid host, under real runc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpushare.core.errors import KernelError
from gpushare.core.ops import DeviceRule, Plan
from gpushare.inject import apply
from gpushare.system import cgroup, mountns

from tests.integration import access, ns_util
from tests.integration.access import Container
from tests.integration.device_matrix import GRANTED, View, allow, matrix

VIEWS = {
    "v1": "umount /sys/fs/cgroup/unified",
    "hybrid": "mountpoint -q /sys/fs/cgroup/unified",
}


image, container = access.image, access.container
test_exactly_the_granted_devices_become_accessible = access.exactly_the_granted_devices_become_accessible


@pytest.fixture(scope="module", params=sorted(VIEWS))
def view(request: pytest.FixtureRequest) -> Iterator[View]:
    made = View(VIEWS[request.param])
    yield made
    made.close()


def device_list(view: View, pid: int) -> list[str]:
    def body() -> list[str]:
        with open(cgroup.find_cgroups(pid)[0] + "/devices.list") as rules:
            return rules.read().splitlines()

    return list(view.run(body))


def test_rules_are_rw_and_never_mknod_and_are_undone(view: View, container: Container) -> None:
    """As rules of a plan. The undo keeps what was allowed before."""
    pid = container[2]
    v1, _ = view.run(lambda: cgroup.find_cgroups(pid))
    assert v1.startswith("/sys/fs/cgroup/devices/") and v1.endswith(container[0].id)
    before = device_list(view, pid)
    plan = Plan("test", tuple(DeviceRule(*device) for device in GRANTED))

    def body() -> list[str]:
        applied = apply.apply(plan, ns_util.bundle("/"), pid)
        with open(cgroup.find_cgroups(pid)[0] + "/devices.list") as rules:
            granted = rules.read().splitlines()
        applied.undo()
        return granted

    assert set(view.run(body)) - set(before) == {"c 195:0 rw", "c 195:255 rw"}
    assert device_list(view, pid) == before
    view.run(lambda: cgroup.allow_devices(pid, [(1, 3), *GRANTED])())  # /dev/null is every runtime's default
    assert device_list(view, pid) == before


def test_undo_and_revoke_remove_access(view: View, container: Container) -> None:
    runc, rootfs, pid = container
    before = matrix(runc, rootfs)
    view.run(lambda: cgroup.allow_devices(pid, GRANTED)())
    assert matrix(runc, rootfs) == before
    allow(view, pid)
    assert matrix(runc, rootfs) != before
    view.run(lambda: cgroup.revoke(pid, GRANTED))
    assert matrix(runc, rootfs) == before


def test_refused_rule_names_file_and_reason(view: View, container: Container) -> None:
    """The kernel refuses a child the device that its parent lacks."""
    runc, _, pid = container

    def body() -> str:
        directory = cgroup.find_cgroups(pid)[0]
        parent = os.path.dirname(directory) + f"/gs-parent-{os.getpid()}"
        os.mkdir(parent)
        child = os.fork()
        if child == 0:
            os.execvp("sleep", ["sleep", "1000"])
        try:
            with open(parent + "/devices.deny", "w") as control:
                control.write("a")
            os.mkdir(parent + "/child")
            with open(parent + "/child/cgroup.procs", "w") as control:
                control.write(str(child))
            try:
                cgroup.allow_devices(child, GRANTED)
            except KernelError as error:
                return str(error)
            return ""
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)
            os.rmdir(parent + "/child")
            os.rmdir(parent)

    message = view.run(body)
    assert "devices.allow" in message
    assert "not permitted" in message


def test_error_without_device_cgroup_names_the_mount() -> None:
    bare = View("umount -R /sys/fs/cgroup")

    def body() -> str:
        try:
            cgroup.allow_devices(os.getpid(), GRANTED)
        except KernelError as error:
            return str(error)
        return ""

    try:
        assert bare.run(body).endswith("is mounted; mount /sys/fs/cgroup")
    finally:
        bare.close()


@pytest.mark.parametrize(
    ("root", "path", "below"),
    [("/", "/a/b", "/a/b"), ("/a", "/a/b", "/b"), ("/a", "/ab", None), ("/a/b", "/a", None), ("/", "/../a", None)],
)
def test_path_below_a_partial_mount_is_found(tmp_path: Path, root: str, path: str, below: str) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    mount = mountns.MountEntry(1, "0:1", root, str(tmp_path), False, "cgroup2", "none", "rw")
    assert cgroup._below(mount, path) == (str(tmp_path) + below if below else "")
