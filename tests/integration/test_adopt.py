"""The createRuntime hook with real containers: the owner of the lease, and what a killed hook leaves."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpushare.state import leases
from gpushare.system import procs

from tests.integration.programs.interrupted_hook import points, write_adopt, write_runtime
from tests.integration.test_lifecycle import left
from tests.support import driverhost
from tests.support.host import BUILD, Node
from tests.support.kills import Kills
from tests.support.runc import Container, RuntimeFailed
from tests.support.spec import Mount

MakeContainer = Callable[..., Container]
ALL = {"GPUSHARE_MEMORY": "16Gi"}  # the whole device: starts only when nothing else is granted
LAUNCHER = BUILD / "bin" / "gpushare-hook"
LINKS = "ls -l /usr/lib/*/libcuda.so.1 && ldconfig -p | grep -q libcuda.so.1"


def calls(directory: Path) -> list[str]:
    """The system calls of the last adoption."""
    return [line.partition(" ")[2].strip() for line in (directory / "calls").read_text().splitlines()]


def upper(one: Container) -> set[str]:
    """All files written into the container's root."""
    below = one.bundle / "disk" / "upper"
    return {str(path.relative_to(below)) for path in below.rglob("*")}


# Contents of images


def without_cache(one: Container) -> None:
    (one.rootfs / "etc/ld.so.cache").unlink()


def other_link(one: Container) -> None:
    for libdir in (one.rootfs / "usr/lib").glob("*-linux-gnu"):
        (libdir / "libcuda.so.1").symlink_to("libcuda.so.1.1")


def same_link(one: Container) -> None:
    assert one.run() == 0, one.stderr
    one.delete()
    one.pid, one.exit_code = 0, None


def shifted(spec: dict[str, Any]) -> None:
    """A user namespace whose root is an unused uid here."""
    spec["linux"]["namespaces"].append({"type": "user"})
    spec["linux"]["uidMappings"] = spec["linux"]["gidMappings"] = [{"containerID": 0, "hostID": 100000, "size": 65536}]


def read_only(spec: dict[str, Any]) -> None:
    spec["root"]["readonly"] = True


def graphics(one: Container) -> None:
    """Links go into an existing directory of the image and into a missing one; no file is in the way."""
    for libdir in (one.rootfs / "usr/lib").glob("*-linux-gnu"):
        (libdir / "vdpau").mkdir(exist_ok=True)
        (libdir / "libGLX_indirect.so.0").unlink(missing_ok=True)


CASES: dict[str, tuple[Callable[[Container], None], Callable[[dict[str, Any]], None] | None]] = {
    "fresh": (lambda one: None, None),
    "read-only": (lambda one: None, read_only),
    "second start": (same_link, None),
    "no cache": (without_cache, None),
    "all of the driver": (graphics, None),
    "dangling link": (other_link, None),
}


@pytest.mark.parametrize("name", CASES)
def test_adoption_writes_lease_links_and_cache(
    container: MakeContainer, simhost: Path, node: Node, tmp_path: Path, name: str
) -> None:
    prepare, edit = CASES[name]
    driverhost.add_graphics(simhost)
    driverhost.add_features(simhost)
    whole = name == "all of the driver"
    env = {**ALL, "NVIDIA_DRIVER_CAPABILITIES": "all", "NVIDIA_GDS": "enabled"} if whole else ALL
    look = "ls -l /usr/lib/*/libcuda.so.1" if name == "no cache" else LINKS
    one = container(["sh", "-c", look], env=env, runtime=node.runtime(), edit=edit)
    prepare(one)
    with driverhost.listening(simhost, "run/nvidia-persistenced/socket"):
        one.create()
    lease, init = leases.find(str(node.state), one.id), procs.find(one.pid)
    assert lease is not None and init is not None
    assert (lease.state, lease.init_pid, lease.init_start, lease.cgroup) == ("held", *init[:2], f"/{one.id}")
    one.start()
    assert one.wait() == 0, one.stderr
    assert "libcuda.so.535" in one.stdout
    below = [path for path in upper(one) if path.endswith(("/gbm/nvidia-drm_gbm.so", "/vdpau/libvdpau_nvidia.so.1"))]
    assert len(below) == (2 if whole else 0)
    one.delete()
    assert left(node) == []


def test_adoption_removes_only_the_own_refusal(container: MakeContainer, node: Node) -> None:
    errors = node.state / "errors"
    one = container(["true"], env=ALL, runtime=node.runtime())
    with pytest.raises(RuntimeFailed, match="not an amount"):  # creates the directory
        container(["true"], env={"GPUSHARE_MEMORY": "no"}, runtime=node.runtime()).run()
    (other,) = errors.iterdir()
    for name in (one.id, f"{one.id}~trace", f"{one.id}.trace"):  # the last one belongs to another container
        (errors / name).write_text("refused\n")
    assert one.run() == 0, one.stderr
    assert {path.name for path in errors.iterdir()} == {other.name, f"{one.id}.trace"}


def test_links_belong_to_the_owner_of_the_root(container: MakeContainer, node: Node) -> None:
    one = container(["true"], env=ALL, runtime=node.runtime(), edit=shifted)
    for folder in one.rootfs.parents:  # runc traverses them as that uid
        if folder.stat().st_mode & 0o001 == 0:
            folder.chmod(folder.stat().st_mode | 0o111)
    for pattern in ("", "*", "usr/lib", "usr/bin", "usr/lib/*-linux-gnu", "usr/lib/firmware"):
        for folder in one.rootfs.glob(pattern) if pattern else (one.rootfs,):
            if folder.is_dir() and not folder.is_symlink():
                os.chown(folder, 100000, 100000)
    one.create()
    owners = {path.lstat().st_uid for path in (one.bundle / "disk" / "upper").rglob("libcuda.so*") if path.is_symlink()}
    assert owners == {100000}


def test_replaced_mount_is_refused_by_name(container: MakeContainer, node: Node, tmp_path: Path) -> None:
    """The mounts changed after config.json was written: the container does not start."""
    swap = tmp_path / "swap"
    swap.write_text(f"""#!/bin/sh
for last; do :; done
if [ "$last" = adopt ]; then
    cat >{tmp_path}/state
    pid=$(sed 's/.*"pid":\\([0-9]*\\).*/\\1/' {tmp_path}/state)
    at=$(awk '$5 ~ /libcuda.so.535.261.03$/ {{print $5; exit}}' /proc/$pid/mountinfo)
    nsenter -t $pid -m mount --bind /etc/hostname "$at" || exit 9
    exec {LAUNCHER} "$@" <{tmp_path}/state
fi
exec {LAUNCHER} "$@"
""")
    swap.chmod(0o755)
    one = container(["true"], env=ALL, runtime=node.runtime(write_runtime(tmp_path, hook=swap)))
    with pytest.raises(RuntimeFailed, match="is not what config.json mounts there"):
        one.create()
    assert left(node) == []
    assert not [path for path in upper(one) if path.endswith("libcuda.so.1")]


def test_volume_over_etc_keeps_its_cache(container: MakeContainer, node: Node, tmp_path: Path) -> None:
    """The loader's cache there is the host's."""
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "ld.so.cache").write_bytes(Path("/etc/ld.so.cache").read_bytes())
    before = (folder / "ld.so.cache").read_bytes()
    one = container(["true"], env=ALL, runtime=node.runtime(), mounts=[Mount(folder, "/etc")])
    assert one.run() == 0, one.stderr
    assert (folder / "ld.so.cache").read_bytes() == before
    assert os.listdir(folder) == ["ld.so.cache"]


# Kills


def test_create_killed_at_any_point_leaves_nothing(
    container: MakeContainer, make_node: Callable[..., Node], simhost: Path, tmp_path: Path, kills: Kills
) -> None:
    """kill -9 between any two system calls of gpushare-runtime before it executes runc: poststop does not run, and the
    next create of the same bundle gets the whole device."""
    node = make_node(simhost)
    for _ in range(2):  # the first start on a host does more work
        probe = container(["true"], env=ALL, runtime=node.runtime(write_runtime(tmp_path)))
        assert probe.run() == 0, probe.stderr
        probe.delete()
    total = points(tmp_path)
    assert total > 100
    for at in kills.some(1, total + 1, 9):
        one = container(["true"], env=ALL, name=f"at{at}", runtime=node.runtime(write_runtime(tmp_path, at)))
        before = upper(one)
        original = json.loads((one.bundle / "config.json").read_text())
        with pytest.raises(RuntimeFailed):
            one.create()
        assert upper(one) == before, f"point {at} of {total}"
        kills.left += len(left(node))
        one._runtime = (*node.runtime(), *one._runtime[-2:])
        assert one.run() == 0, f"point {at} of {total}: {one.stderr}"
        assert node.leases() == [one.id]
        one.delete()
        assert left(node) == [], f"point {at} of {total}"
        assert node.cli("explain", "--restore", str(one.bundle)).returncode == 0
        assert json.loads((one.bundle / "config.json").read_text()) == original, f"point {at} of {total}"
        one.close()
    kills.some_left_something()


def test_adoption_killed_at_any_call_leaves_nothing(
    container: MakeContainer, node: Node, tmp_path: Path, kills: Kills
) -> None:
    """kill -9 at any system call of the hook: the container never runs, and the next start gets the device."""
    probe = container(["true"], env=ALL, runtime=node.runtime(write_runtime(tmp_path, hook=write_adopt(tmp_path))))
    assert probe.run() == 0, probe.stderr
    probe.delete()
    total = len(calls(tmp_path))
    assert total > 300
    first = next(number for number, call in enumerate(calls(tmp_path)) if call.startswith("flock("))
    for at in itertools.chain(kills.some(2, first - 2, 61), kills.some(first - 2, total, 13)):
        hook = write_adopt(tmp_path, at)
        one = container(["true"], env=ALL, name=f"at{at}", runtime=node.runtime(write_runtime(tmp_path, hook=hook)))
        with pytest.raises(RuntimeFailed):
            one.create()
        one._runtime = (*node.runtime(), *one._runtime[-2:])
        assert one.run() == 0, f"call {at} of {total}: {one.stderr}"
        assert node.leases() == [one.id]
        assert not [path for path in upper(one) if path.endswith(".gpushare")], f"call {at} of {total}"
        one.delete()
        assert left(node) == [], f"call {at} of {total}"
        one.close()


def test_delete_killed_at_any_call_is_completed_by_the_next(
    container: MakeContainer, node: Node, tmp_path: Path, kills: Kills
) -> None:
    """kill -9 of gpushare-runtime itself; its child runc may be running or done. Also two deletes at once."""

    def delete(one: Container, *prefix: str) -> subprocess.Popen[bytes]:
        command = [*prefix, *node.runtime(), *one._runtime[-2:], "delete", "--force", one.id]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def started(name: str) -> Container:
        return container(["sleep", "inf"], env=ALL, runtime=node.runtime(), name=name).start()

    log = tmp_path / "delete-calls"
    one = started("probe")
    delete(one, "strace", "-qq", "-o", str(log)).communicate(timeout=60)
    total = len(log.read_text().splitlines())
    assert left(node) == [] and total > 100
    for at in kills.some(2, total, 13):
        one = started(f"at{at}")
        killer = ("strace", "-qq", "-o", str(log), f"--inject=all:signal=KILL:when={at}")
        delete(one, *killer).communicate(timeout=60)  # a run may have some calls fewer than the first
        kills.left += node.leases() == [one.id]
        both = delete(one), delete(one)
        for each in both:
            _, said = each.communicate(timeout=60)
            assert b"Traceback" not in said and b"internal error" not in said, said
        assert left(node) == [], f"call {at} of {total}"
    kills.some_left_something()
