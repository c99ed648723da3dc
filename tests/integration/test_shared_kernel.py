"""Two hosts with one kernel and one path of the state directory: neither takes the other's containers for its own lost
ones. A lost directory that is still mounted somewhere is lost."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpushare.state import place

from tests.integration.test_lost_state import listed, unmounted
from tests.support.host import BIN, Node
from tests.support.rootfs import OverlayRoot
from tests.support.runc import Container, RuntimeFailed

MakeContainer = Callable[..., Container]
Words = tuple[str, ...]


@pytest.fixture
def node(node: Node, tmp_path: Path) -> Node:
    """The state directory has a directory of its own above it, like /run."""
    node.move(str(node.config), str(tmp_path / "run" / "state"))
    node.state.mkdir(parents=True)
    return node


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """The root of a container that starts in a namespace of `namespace`, which has the mounts of this moment."""
    made = OverlayRoot(tmp_path / "disk")
    yield made.path
    made.close()


@pytest.fixture
def namespace(disk: Path) -> Iterator[Callable[[str], Words]]:
    """namespace(script) -> the words before a command in a new mount namespace, where `script` has run."""
    made: list[subprocess.Popen[bytes]] = []

    def enter(script: str) -> Words:
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", f"{script}\necho\nexec sleep inf"]
        made.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        output = made[-1].stdout
        assert output is not None and output.readline() == b"\n", "the script failed"
        return "nsenter", "--mount", "--target", str(made[-1].pid)

    yield enter
    for one in made:
        one.kill()
        one.communicate()


def own_run(node: Node) -> str:
    return f"mount -t tmpfs other {node.state.parent}\nmkdir {node.state}"


@pytest.fixture
def sleeper(container: MakeContainer, node: Node, way: str) -> Callable[..., Container]:
    """sleeper(memory) -> a container that has not been started."""
    return lambda memory, **more: container(["sleep", "inf"], env={"GPUSHARE_MEMORY": memory}, **node.way(way), **more)


def activity(node: Node) -> list[str]:
    return sorted(path.name for path in node.state.glob("devices/*/*"))


def test_containers_of_another_host_stay_with_it(
    sleeper: Callable[..., Container], node: Node, disk: Path, namespace: Callable[[str], Words]
) -> None:
    first = sleeper("10Gi").start()
    before = activity(node)
    words = namespace(own_run(node))
    second = sleeper("16Gi", rootfs=disk, prefix=words).start()
    command = [*words, BIN / "gpushare", "--config", node.config, "--state", node.state, "list", "--format", "json"]
    shown = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert [one["id"] for one in shown] == [second.id]
    second.delete()
    assert listed(node).keys() == {first.id} and activity(node) == before
    third = sleeper("6Gi").start()
    assert listed(node).keys() == {first.id, third.id}


def test_directory_without_a_place_counts_as_lost(
    sleeper: Callable[..., Container], node: Node, disk: Path, namespace: Callable[[str], Words]
) -> None:
    """As 0.1.0 made it: its containers are counted twice and not forgotten."""
    sleeper("10Gi").start()
    (node.state / place.FILE).unlink()
    with pytest.raises(RuntimeFailed):
        sleeper("7Gi", rootfs=disk, prefix=namespace(own_run(node))).start()


@pytest.mark.parametrize("copy", ["private copy", "volume"])
def test_copy_of_lost_directory_hides_no_container(
    sleeper: Callable[..., Container], node: Node, namespace: Callable[[str], Words], tmp_path: Path, copy: str
) -> None:
    first = sleeper("10Gi").start()
    volume = tmp_path / "volume"
    volume.mkdir()
    namespace(f"mount --bind {node.state} {volume}\numount --lazy {node.state}" if copy == "volume" else "true")
    unmounted(node)
    with pytest.raises(RuntimeFailed):
        sleeper("7Gi").start()
    assert listed(node).keys() == {first.id}
