"""A lease exists exactly as long as its container, however it ends: kills at any point, a lost poststop, attacks."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gpushare.state import shm_abi

from tests.integration.programs.interrupted_hook import points, write_hook
from tests.support import rootfs, runc
from tests.support.host import Node
from tests.support.kills import Kills
from tests.support.runc import Container, RuntimeFailed

MakeContainer = Callable[..., Container]
ALL = {"GPUSHARE_MEMORY": "16Gi"}  # the whole device: starts only when nothing else is granted
PAGE = "/usr/lib/gpushare/rw/usage"


def left(node: Node) -> list[str]:
    return node.left()


def use_hook(one: Container, hooks: dict[str, Any]) -> None:
    """Use other hooks for the next create."""
    one.spec["hooks"] = hooks
    (one.bundle / "config.json").write_text(json.dumps(one.spec))


def points_of_a_start(container: MakeContainer, node: Node, tmp_path: Path) -> int:
    """Count the kill points of an ordinary start. The first start on a host does more work and does not count."""
    for _ in range(2):
        probe = container(["true"], env=ALL, hook=node.hook()._replace(program=write_hook(tmp_path)))
        assert probe.run() == 0
        probe.delete()
    return points(tmp_path)


def test_lease_and_files_exist_as_long_as_the_container(container: MakeContainer, node: Node) -> None:
    one = container(["sleep", "inf"], env=ALL, hook=node.hook())
    one.create()
    lease = json.loads((node.state / "containers" / one.id / "lease.json").read_text())
    assert (lease["state"], lease["init_pid"], lease["bundle"]) == ("held", one.pid, str(one.bundle))
    assert lease["cgroup"] == f"/{one.id}"
    one.start()
    seen = one.exec("sh", "-c", f"stat -c '%a %s' {PAGE}; stat -c %a /usr/lib/gpushare/limits; ls /usr/lib/gpushare")
    assert seen.stdout.split()[:3] == ["666", str(shm_abi.USAGE_SIZE), "444"]
    assert seen.stdout.split()[3:] == ["driver", "limits", "mps", "pages", "peers", "rw"]
    one.kill()
    one.wait()
    one.delete()
    assert left(node) == []


def test_container_cannot_change_foreign_files(container: MakeContainer, node: Node) -> None:
    one = container(["sleep", "inf"], env=ALL, hook=node.hook()).start()
    for attempt in (
        "echo x > /usr/lib/gpushare/limits",
        "chmod 666 /usr/lib/gpushare/limits",
        "mv /usr/lib/gpushare/limits /usr/lib/gpushare/rw/",
        "ln /usr/lib/gpushare/limits /usr/lib/gpushare/rw/limits",
        "touch /usr/lib/gpushare/more",
        "rm /usr/lib/gpushare/driver/libcuda-real.so.1",
        f"head -c 300000 /dev/zero > {PAGE}",
        "touch /usr/lib/gpushare/rw/more",
    ):
        assert one.exec("sh", "-c", attempt).returncode != 0, attempt


def test_container_that_dies_without_poststop_frees_its_share(container: MakeContainer, node: Node) -> None:
    """As with `runc run --keep`, or when the engine is killed."""
    first = container(["sleep", "inf"], env=ALL, hook=node.hook()).start()
    second = container(["true"], env=ALL, hook=node.hook())
    with pytest.raises(RuntimeFailed, match=first.id):
        second.start()
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    third = container(["true"], env=ALL, hook=node.hook())
    assert third.run() == 0
    assert node.leases() == [third.id]
    assert not [point for point in rootfs.mount_points() if first.id in point and "/state/" in point]
    third.delete()
    assert left(node) == []


def test_leftover_processes_keep_the_share(container: MakeContainer, node: Node) -> None:
    """In the host's pid namespace, processes survive a container's init."""

    def host_pids(spec: dict[str, Any]) -> None:
        spec["linux"]["namespaces"] = [item for item in spec["linux"]["namespaces"] if item["type"] != "pid"]

    first = container(["sh", "-c", "setsid sleep inf & exit 0"], env=ALL, hook=node.hook(), edit=host_pids)
    assert first.run() == 0
    second = container(["true"], env=ALL, hook=node.hook())
    with pytest.raises(RuntimeFailed, match=first.id):
        second.start()
    first.delete()  # the runtime kills the leftover processes
    assert left(node) == []
    third = container(["true"], env=ALL, hook=node.hook())
    assert third.run() == 0


def test_refused_create_of_a_taken_id_keeps_the_lease(container: MakeContainer, node: Node) -> None:
    """Another runc root does not know the first container, uses its id, and runs poststop when refused."""
    first = container(["sleep", "inf"], env={"GPUSHARE_MEMORY": "1Gi"}, hook=node.hook()).start()
    second = container(["true"], env={"GPUSHARE_MEMORY": "1Gi"}, hook=node.hook())
    second.id = first.id
    with pytest.raises(RuntimeFailed, match=rf"{first.id}\W+ already has a lease, held by pid {first.pid}"):
        second.start()
    assert node.leases() == [first.id]
    assert first.exec("test", "-s", PAGE).returncode == 0


def test_hook_in_both_stages_makes_one_lease(container: MakeContainer, node: Node) -> None:
    hooks = {**node.hook("createRuntime").entries(), **node.hook("prestart").entries()}
    one = container(["true"], env=ALL)
    use_hook(one, hooks)
    assert one.run() == 0
    assert node.leases() == [one.id]
    one.delete()
    assert left(node) == []


def test_concurrent_starts_do_not_exceed_the_device(container: MakeContainer, node: Node) -> None:
    """8 concurrent starts of 4 GiB on a device of 16 GiB, also as the first starts on this host."""
    several = [container(["sleep", "inf"], env={"GPUSHARE_MEMORY": "4Gi"}, hook=node.hook()) for _ in range(8)]

    def start(one: Container) -> str:
        try:
            one.start()
        except RuntimeFailed as error:
            return error.last_line
        return ""

    with ThreadPoolExecutor(8) as pool:
        refusals = [line for line in pool.map(start, several) if line]
    assert len(refusals) == 4, refusals
    assert all("0 B free of 16 GiB" in line for line in refusals), refusals
    listed = json.loads(node.cli("list", "--format", "json").stdout)
    assert len(listed) == 4 and {one["state"] for one in listed} == {"running"}
    (device,) = json.loads(node.cli("devices", "--format", "json").stdout)
    assert (device["granted_bytes"], device["free_bytes"], device["containers"]) == (16 << 30, 0, 4)


def test_start_killed_at_any_point_leaves_nothing(
    container: MakeContainer, make_node: Callable[..., Node], simhost: Path, tmp_path: Path, kills: Kills
) -> None:
    """kill -9 between any two system calls. With poststop (runc) it cleans up. Without one (crun runs none after a
    failed create) the next start of the same id in the same bundle does, and gets the whole device."""
    node = make_node(simhost)
    total = points_of_a_start(container, node, tmp_path)
    assert total > 100
    for number, at in enumerate(kills.some(1, total, 25)):
        hooks = node.hook()._replace(program=write_hook(tmp_path, at)).entries()
        with_poststop = number % 2 == 0 and runc.LOW_LEVEL == "runc"
        one = container(["true"], env=ALL, name=f"at{at}")
        use_hook(one, hooks if with_poststop else {"prestart": hooks["prestart"]})
        with pytest.raises(RuntimeFailed, match=r"killed|\(exit code: 137\)"):
            one.create()
        if with_poststop:
            assert left(node) == [], f"point {at} of {total}"
        kills.left += len(left(node))
        assert node.cli("list").returncode == 0
        use_hook(one, node.hook().entries())
        assert one.run() == 0, f"point {at} of {total}: {one.stderr}"
        assert node.leases() == [one.id]
        one.delete()
        assert left(node) == [], f"point {at} of {total}"
        one.close()
    kills.some_left_something()


def test_first_start_killed_at_any_point_leaves_a_working_host(
    container: MakeContainer, make_node: Callable[..., Node], simhost: Path, tmp_path: Path, kills: Kills
) -> None:
    """The first start on a host also mounts the state directory and compiles node.json."""
    first = make_node(simhost, "count")
    probe = container(["true"], env=ALL, hook=first.hook()._replace(program=write_hook(tmp_path)))
    assert probe.run() == 0
    more = points(tmp_path) - points_of_a_start(container, first, tmp_path)
    assert more > 10
    probe.delete()
    for at in kills.some(1, more + 10, 5):
        node = make_node(simhost, f"first{at}")
        one = container(["true"], env=ALL, name=f"first{at}")
        use_hook(one, node.hook()._replace(program=write_hook(tmp_path, at)).entries())
        with pytest.raises(RuntimeFailed, match="killed"):
            one.create()
        use_hook(one, node.hook().entries())
        assert one.run() == 0, f"point {at}: {one.stderr}"
        assert rootfs.mount_points().count(str(node.state)) == 1, f"point {at}"
        one.delete()
        assert left(node) == [], f"point {at}"
        one.close()
        node.close()


def test_terminated_start_undoes_its_changes(
    container: MakeContainer, make_node: Callable[..., Node], simhost: Path, tmp_path: Path
) -> None:
    """SIGTERM at points throughout the start; without poststop or a later start, the hook itself leaves nothing."""
    node = make_node(simhost)
    total = points_of_a_start(container, node, tmp_path)
    refused = 0
    for at in range(5, total, 23):
        hook = node.hook()._replace(program=write_hook(tmp_path, at, signal.SIGTERM))
        one = container(["true"], env=ALL, name=f"term{at}")
        use_hook(one, {"prestart": hook.entries()["prestart"]})
        try:
            one.create()
        except RuntimeFailed as error:
            refused += 1
            assert "interrupted by signal 15" in error.last_line, f"point {at}: {error.message}"
            assert left(node) == [], f"point {at} of {total}"
        else:  # it came after the end of the work: then everything must be there
            assert node.leases() == [one.id], f"point {at} of {total}"
            use_hook(one, node.hook().entries())
            one.delete()
            assert node.cli("prune").returncode == 0
        one.close()
    assert refused > total // 23 // 2
