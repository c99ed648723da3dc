"""Directories that resemble a share after the state directory was lost: which ones are accepted."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.apart import allow_traversal, chown_root, with_user_namespace
from tests.integration.test_host_user import USER
from tests.integration.test_lost_state import listed, unmounted
from tests.support.host import PYTHON, TREE, Node, python_mounts
from tests.support.runc import Container, RuntimeFailed

MakeContainer = Callable[..., Container]
PROGRAMS = TREE / "tests" / "integration" / "programs"
FORGE, FORGE_FROM_TWO = PROGRAMS / "forge.py", PROGRAMS / "forge_from_two.py"


@pytest.fixture
def limits(container: MakeContainer, node: Node, way: str) -> bytes:
    """A limits file that grants the whole device."""
    one = container(["sleep", "inf"], env={"GPUSHARE_MEMORY": "16Gi"}, **node.way(way)).start()
    data = (node.state / "containers" / one.id / "share" / "limits").read_bytes()
    one.kill()
    one.wait()
    one.delete()
    return data


@pytest.mark.parametrize("content", ["the whole device", "garbage"])
@pytest.mark.parametrize("who", [USER, ()], ids=["a user of the host", "0 is 0"])
def test_forged_share_is_ignored(
    container: MakeContainer, node: Node, way: str, tmp_path: Path, limits: bytes, who: tuple[str, ...], content: str
) -> None:
    program = tmp_path / "forge.py"
    program.write_text(FORGE.read_text())
    for folder in (tmp_path, *tmp_path.parents[:-1]):
        folder.chmod(folder.stat().st_mode | 0o055)
    unmounted(node)
    command = (*who, "unshare", "-Urm", "/usr/bin/python3", "-I", str(program), str(node.state))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as forger:
        assert forger.stdin and forger.stdout
        try:
            forger.stdin.write(limits if content == "the whole device" else b"garbage")
            forger.stdin.close()
            assert forger.stdout.readline() == b"made\n"
            one = container(["sleep", "inf"], env={"GPUSHARE_MEMORY": "16Gi"}, **node.way(way))
            one.start()
            assert listed(node).keys() == {one.id}
        finally:
            forger.kill()


def test_container_with_a_user_namespace_keeps_its_share(
    container: MakeContainer, node: Node, way: str, tmp_path: Path
) -> None:
    allow_traversal(tmp_path)
    one = container(["sleep", "inf"], env={"GPUSHARE_MEMORY": "10Gi"}, edit=with_user_namespace, **node.way(way))
    chown_root(one)
    one.start()
    unmounted(node)
    with pytest.raises(RuntimeFailed, match=f"{one.id}|exit code: 75"):
        container(["true"], env={"GPUSHARE_MEMORY": "10Gi"}, **node.way(way)).start()
    (share,) = listed(node)[one.id]["shares"]
    assert share["memory_limit_bytes"] == 10 << 30


@pytest.mark.parametrize("forge", [f"unshare -Urm {PYTHON} /opt/{FORGE.name}", f"{PYTHON} /opt/{FORGE_FROM_TWO.name}"])
def test_share_forged_in_a_container_s_user_namespace_is_ignored(
    container: MakeContainer, node: Node, way: str, limits: bytes, forge: str
) -> None:
    mounts = python_mounts(FORGE, FORGE_FROM_TWO)
    one = container(["sh", "-c", f"{forge} {node.state} /made </limits"], mounts=mounts)
    (one.rootfs / "limits").write_bytes(limits)
    os.mkfifo(one.rootfs / "made")
    one.start()
    assert (one.rootfs / "made").read_text() == "made\n", one.stderr
    unmounted(node)
    refreshed = node.cli("refresh")
    assert refreshed.returncode == 0 and "x" not in listed(node)
    other = container(["true"], env={"GPUSHARE_MEMORY": "16Gi"}, **node.way(way))
    assert other.run() == 0, other.stderr
