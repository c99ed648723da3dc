"""The state directory is lost under running containers: their grants stay theirs and are granted to no other."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare.state import shm_abi, storage

from tests.support import rootfs
from tests.support.host import PYTHON, TREE, Node, python_mounts
from tests.support.runc import Container, RuntimeFailed
from tests.support.spec import Mount

MakeContainer = Callable[..., Container]
GIB = 1 << 30
GRAB = TREE / "tests" / "integration" / "programs" / "grab.py"
TENANT = TREE / "demo" / "tenant.py"


def unmounted(node: Node) -> None:
    rootfs.run("umount", "--lazy", node.state)


def emptied(node: Node) -> None:
    """As with `rm -rf`: mount points stay."""
    subprocess.run(["rm", "-rf", *map(str, node.state.iterdir())], stderr=subprocess.DEVNULL, check=False)


def only_marker(node: Node) -> None:
    (node.state / "lock").unlink()


def listed(node: Node) -> dict[str, Any]:
    return {one["id"]: one for one in json.loads(node.cli("list", "--format", "json").stdout)}


@pytest.fixture
def sleeper(container: MakeContainer, node: Node) -> Callable[..., Container]:
    """sleeper(memory, way) -> a started container."""

    def start(memory: str, way: str, **arguments: Any) -> Container:
        mounts = python_mounts(TENANT, GRAB)
        one = container(["sleep", "inf"], env={"GPUSHARE_MEMORY": memory}, mounts=mounts, **node.way(way), **arguments)
        return one.start()

    return start


@pytest.mark.parametrize("lose", [unmounted, only_marker], ids=lambda lose: lose.__name__)
def test_living_containers_keep_their_shares(
    sleeper: Callable[..., Container], node: Node, way: str, lose: Callable[[Node], None]
) -> None:
    first = sleeper("10Gi", way)
    lose(node)
    with pytest.raises(RuntimeFailed) as refused:
        sleeper("7Gi", way)
    assert "7 GiB requested" in refused.value.last_line
    assert node.leases() == [first.id]
    assert listed(node)[first.id]["shares"][0]["memory_limit_bytes"] == 10 * GIB
    second = sleeper("6Gi", way)
    grabbed = json.loads(first.exec(PYTHON, f"/opt/{GRAB.name}").stdout)
    assert grabbed["total_bytes"] == 10 * GIB
    first.delete()
    assert node.leases() == [second.id]
    sleeper("10Gi", way)


def test_living_containers_keep_their_host_memory(
    make_node: Callable[..., Node], simhost: Path, container: MakeContainer
) -> None:
    """Two shares of 6 GiB on a device of 16, with 9 GiB in total each, in a budget of 20: both sums stay as before."""
    node = make_node(simhost, oversubscription={"host_memory": "20Gi", "scaling": 1.5})

    def start(memory: str) -> Container:
        env = {"GPUSHARE_MEMORY": memory, "GPUSHARE_OVERSUBSCRIBE": "1"}
        mounts = python_mounts(TENANT, GRAB)
        return container(["sleep", "inf"], env=env, mounts=mounts, **node.way("runtime")).start()

    first, second = start("6Gi"), start("6Gi")
    unmounted(node)
    with pytest.raises(RuntimeFailed, match="5 GiB requested, 4 GiB free of 16 GiB"):
        start("5Gi")
    with pytest.raises(RuntimeFailed, match="oversubscribed shares: 4.50 GiB requested, 2 GiB free of 20"):
        start("3Gi")
    for one in (first, second):
        (share,) = listed(node)[one.id]["shares"]
        assert (share["memory_limit_bytes"], share["memory_virtual_bytes"]) == (6 * GIB, 9 * GIB)
    grabbed = json.loads(first.exec(PYTHON, f"/opt/{GRAB.name}").stdout)
    assert 8 * GIB < grabbed["got_bytes"] < grabbed["total_bytes"] == 9 * GIB
    second.delete()
    start("6Gi")


def test_removed_limits_block_the_device(sleeper: Callable[..., Container], node: Node, way: str) -> None:
    """The running container's limit is unknown; nothing that it starts now gets any memory."""
    first = sleeper("1Gi", way)
    emptied(node)
    with pytest.raises(RuntimeFailed) as refused:
        sleeper("1Gi", way)
    assert "prune --assume-free" in refused.value.last_line
    grab = first.exec(PYTHON, f"/opt/{GRAB.name}")
    assert "total_bytes" not in grab.stdout
    first.delete()
    assert node.leases() == [], node.decisions()
    sleeper("16Gi", way)


def test_share_with_a_damaged_lease_is_kept_while_a_process_has_it(
    sleeper: Callable[..., Container], node: Node
) -> None:
    """No one sees what poststop prints, so the log of decisions has the reason."""
    first = sleeper("1Gi", "hook")
    program = ["nsenter", f"--mount=/proc/{first.pid}/ns/mnt", "sh", "-c", "echo entered; exec sleep inf"]
    entered = subprocess.Popen(program, stdout=subprocess.PIPE)
    try:
        assert entered.stdout and entered.stdout.readline()
        (node.state / "containers" / first.id / storage.LEASE).write_text("{")
        first.delete()
        (kept,) = (line for line in node.decisions() if line["decision"] == "kept")
        assert (kept["id"], kept["by"]) == (first.id, "poststop") and f"pid {entered.pid} is alive" in kept["why"]
    finally:
        entered.kill()
        entered.communicate()
    assert node.cli("prune", "--assume-free").returncode == 0
    sleeper("16Gi", "hook")


def test_lost_state_without_containers_frees_the_device(
    sleeper: Callable[..., Container], node: Node, way: str
) -> None:
    one = sleeper("16Gi", way)
    one.kill()
    one.wait()
    unmounted(node)
    sleeper("16Gi", way)


def test_refresh_reports_the_recovered_shares(sleeper: Callable[..., Container], node: Node) -> None:
    one = sleeper("1Gi", "runtime")
    unmounted(node)
    said = node.cli("refresh")
    assert one.id in said.stdout
    assert one.id not in node.cli("refresh").stdout
    assert listed(node)[one.id]["state"] == "running"


@pytest.fixture
def stranger(container: MakeContainer, node: Node, tmp_path: Path) -> Iterator[Callable[[bytes], None]]:
    """stranger(limits) -> a container with a forged share mounted in the usual place."""
    fake = tmp_path / "fake"

    def start(limits: bytes) -> None:
        fake.mkdir()
        rootfs.run("mount", "-t", "tmpfs", node.state, fake)
        share = fake / "containers" / "odd" / "share"
        share.mkdir(parents=True)
        (share / "limits").write_bytes(limits)
        container(["sleep", "inf"], mounts=[Mount(share, "/usr/lib/gpushare")]).start()

    yield start
    rootfs.run("umount", "--lazy", fake)


@pytest.mark.parametrize("source", ["", "plain"])
def test_tenant_cannot_understate_its_share(
    container: MakeContainer, sleeper: Callable[..., Container], node: Node, source: str
) -> None:
    """With user namespaces even a container's init can mount over its share in its own mount namespace."""
    forge = "read id </go && mount -t tmpfs $1 /forged && mkdir -p /forged/containers/$id/share && "
    forge += "cp /limits /forged/containers/$id/share/ && "
    forge += "mount --bind /forged/containers/$id/share /usr/lib/gpushare && echo >/done && exec sleep inf"
    command = ["unshare", "-Urm", "sh", "-c", forge, "sh", source or str(node.state)]
    first = container(command, env={"GPUSHARE_MEMORY": "10Gi"}, runtime=node.runtime())
    (first.rootfs / "forged").mkdir()
    for name in ("go", "done"):
        os.mkfifo(first.rootfs / name)
    first.start()
    (share,) = listed(node)[first.id]["shares"]
    device = node.state / "containers" / first.id / "share" / "limits"
    (limit,) = shm_abi.read_limits(device.read_bytes()).devices
    real = device.read_bytes()
    assert share["memory_limit_bytes"] == limit.memory_limit_bytes == 10 * GIB
    forged = real.replace((10 * GIB).to_bytes(8, "little"), GIB.to_bytes(8, "little"))
    (first.rootfs / "limits").write_bytes(forged)
    (first.rootfs / "go").write_text(f"{first.id}\n")
    (first.rootfs / "done").read_text()
    unmounted(node)
    node.cli("refresh")
    assert first.id not in listed(node)  # its processes have left the real share, and no file shows its use
    following = sleeper("16Gi", "runtime")
    assert listed(node).keys() == {following.id}


def test_unreadable_limits_block_the_device(
    sleeper: Callable[..., Container], stranger: Callable[[bytes], None], node: Node
) -> None:
    stranger(b"of another version")
    node.cli("refresh")
    with pytest.raises(RuntimeFailed) as refused:
        sleeper("1Gi", "runtime")
    assert "prune --assume-free" in refused.value.last_line
    node.cli("prune", "--assume-free")
    sleeper("16Gi", "runtime")
