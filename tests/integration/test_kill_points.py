"""Kills at any point: no device appears before its limits, and no lease is lost or granted twice. A full state
directory recovers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from gpushare.state import leases
from gpushare.system import cgroup

from tests.integration.programs import interrupted_hook, watched_start
from tests.support import programs
from tests.support.host import Node
from tests.support.kills import Kills
from tests.support.rootfs import mount_points
from tests.support.runc import Container, RuntimeFailed

MakeContainer = Callable[..., Container]
ALL = {"GPUSHARE_MEMORY": "16Gi"}  # the whole device: starts only when nothing else is granted
HALF = {"GPUSHARE_MEMORY": "8Gi"}
OURS = f"points{os.getpid()}-"


def test_device_appears_after_its_limits(container: MakeContainer, node: Node, way: str, tmp_path: Path) -> None:
    """At each kill point: a container with the device already has all of its limits."""
    assert node.cli("refresh").returncode == 0  # creates the state directory
    if way == "hook":
        program = watched_start.write_hook(tmp_path, node.state)
        one = container(["true"], env=ALL, hook=node.hook()._replace(program=program))
    else:
        one = container(["true"], env=ALL, runtime=node.runtime(watched_start.write_runtime(tmp_path, node.state)))
    one.create()
    seen = [dict(zip(watched_start.PARTS, row)) for row in json.loads((tmp_path / "seen").read_text())]
    assert len(seen) > 100
    assert not any(seen[0].values()) and all(seen[-1].values()), (seen[0], seen[-1])
    assert [row for row in seen if row["device"] and not all(row.values())] == []
    one.start()
    assert one.wait() == 0, one.stderr


def test_bundle_of_a_killed_create_keeps_its_limits_under_plain_runc(
    container: MakeContainer, node: Node, tmp_path: Path
) -> None:
    """config.json is edited, gpushare-runtime is dead, and an engine continues with plain runc: the container has its
    limits and its lease, or no share if another start took it."""
    for _ in range(2):  # the first start on a host does more work
        probe = container(["true"], env=ALL, runtime=node.runtime(interrupted_hook.write_runtime(tmp_path)))
        assert probe.run() == 0, probe.stderr
        probe.delete()
    program = interrupted_hook.write_runtime(tmp_path, interrupted_hook.points(tmp_path))
    for taken in (False, True):
        one = container(["sleep", "inf"], env=ALL, runtime=node.runtime(program))
        with pytest.raises(RuntimeFailed):
            one.create()
        assert "gpushare.io/applied" in (one.bundle / "config.json").read_text()
        one._runtime = ("runc", *one._runtime[-2:])
        if taken:
            other = container(["sleep", "inf"], env=ALL, runtime=node.runtime()).start()
            with pytest.raises(RuntimeFailed):
                one.create()
            assert node.leases() == [other.id]
            other.delete()
        else:
            one.start()
            lease = leases.find(str(node.state), one.id)
            assert lease is not None and (lease.state, lease.init_pid) == ("held", one.pid)
            assert one.exec("test", "-s", "/usr/lib/gpushare/limits").returncode == 0
        one.delete()
        assert node.left() == []


def own_cgroups() -> list[str]:
    """Cgroups below this process's own, where `gpushare run` makes those of its programs."""
    v1, v2 = cgroup.find_cgroups(os.getpid())
    return sorted(name for path in (v1, v2) if path for name in os.listdir(path) if name.startswith(f"gpushare-{OURS}"))


def test_gpushare_run_killed_at_any_point_leaves_nothing(
    make_node: Callable[..., Node], simhost: Path, tmp_path: Path, kills: Kills
) -> None:
    """`gpushare run`, without an engine: the next program gets the whole device, and prune removes the leftovers."""
    node = make_node(simhost)

    def run(program: Path, name: str) -> int:
        command = [program, *programs.words(node, "--name", OURS + name, "--memory", "16Gi", "--", "true")[1:]]
        return subprocess.run(command, stdin=subprocess.DEVNULL, env=programs.ENVIRONMENT, timeout=60).returncode

    whole = interrupted_hook.write_cli(tmp_path)
    for name in ("first", "second"):  # a first start, and one that finds a dead lease, do more work
        assert run(whole, name) == 0
        assert node.cli("prune").returncode == 0
    total = interrupted_hook.points(tmp_path)
    assert total > 40
    before = mount_points(), own_cgroups()
    for at in kills.some(1, total + 1, 67):
        assert run(interrupted_hook.write_cli(tmp_path, at), "killed") == -signal.SIGKILL
        kills.left += len(node.left())
        assert run(whole, "next") == 0, f"point {at} of {total}"
        assert node.leases() == [f"{OURS}next"], f"point {at} of {total}"
        assert node.cli("prune").returncode == 0
        assert node.left() == [] and (mount_points(), own_cgroups()) == before, f"point {at} of {total}"
    kills.some_left_something()


def killed(one: Container) -> None:
    """Kill it without a delete, as when the engine died with it."""
    os.kill(one.pid, signal.SIGKILL)
    one.wait()


def test_full_state_directory_allows_releases_and_refuses_starts(
    container: MakeContainer, node: Node, way: str
) -> None:
    """The tmpfs is full: ended containers are released, starts are refused in one line, and later starts work."""
    gone, lives = (container(["sleep", "inf"], env=HALF, **node.way(way)).start() for _ in range(2))
    filler = node.state / "filler"
    with open(filler, "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(1 << 20))
    with open(filler, "ab", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(1))
    killed(gone)
    new = container(["true"], env=HALF, **node.way(way))
    with pytest.raises(RuntimeFailed) as refused:
        new.create()
    assert "No space left on device" in refused.value.last_line and "Traceback" not in refused.value.message
    listed = {row["id"]: row["state"] for row in json.loads(node.cli("list", "--format", "json").stdout)}
    assert listed == {lives.id: "running"}
    for one in (gone, lives):
        one.delete()
    pruned = node.cli("prune")
    assert pruned.returncode == 0, pruned.stderr
    assert node.left() == []
    filler.unlink()
    again = container(["true"], env=ALL, **node.way(way))
    assert again.run() == 0, again.stderr
