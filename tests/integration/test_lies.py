"""A tenant that constantly corrupts its writable memory, which its peers and the host read: no other process crashes,
hangs or divides by zero. tests/limiter/test_spoof.py has the shares of compute."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.busy import build, words
from tests.support.host import PYTHON, TREE, Node, python_mounts
from tests.support.judge import taken
from tests.support.runc import Container
from tests.support.spec import Mount

MakeContainer = Callable[..., Container]
GIB = 1 << 30
GRAB = TREE / "tests" / "integration" / "programs" / "grab.py"
TENANT = TREE / "demo" / "tenant.py"
SCRIBBLE = TREE / "tests" / "integration" / "programs" / "scribble.c"
SAMPLES = 3
COMMANDS = (["list"], ["devices"], ["inspect"])


@pytest.fixture(scope="module")
def scribble(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("scribble") / "scribble"
    flags = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{TREE}/shim/include")
    subprocess.run(["gcc", *flags, "-o", out, SCRIBBLE], check=True)
    return out


@pytest.fixture
def start(container: MakeContainer, node: Node, scribble: Path) -> Callable[..., Container]:
    """start(pattern="") -> a container that keeps the device busy, and constantly corrupts its files with `pattern`."""

    def make(pattern: str = "") -> Container:
        work = " ".join(["/opt/busy", *words(seconds=1000, kernel=200)])
        scribbles = f"/opt/scribble {pattern} /usr/lib/gpushare/rw/usage /usr/lib/gpushare/pages/*"
        script = f"{work} & exec {scribbles}" if pattern else f"exec {work}"
        env = {"GPUSHARE_MEMORY": "4Gi", "GPUSHARE_COMPUTE": "50%"}
        mounts = [Mount(build(), "/opt/busy"), Mount(scribble, "/opt/scribble"), *python_mounts(TENANT, GRAB)]
        return container(["sh", "-c", script], env=env, mounts=mounts, runtime=node.runtime()).start()

    return make


def namespace(one: Container) -> int:
    return os.stat(f"/proc/{one.pid}/ns/pid").st_ino


def run_all_commands(node: Node, simhost: Path, peer: Container, attacker: Container) -> None:
    """Run all host commands; their output about the intact container is correct."""
    for command in (*COMMANDS, ["inspect", attacker.id]):
        done = node.cli(*command, *([peer.id] if command == ["inspect"] else []), timeout_s=20)
        assert "Traceback" not in done.stderr and "internal error" not in done.stderr, (command, done.stderr)
        assert done.returncode == 0 or command == ["doctor"], (command, done.stderr)
    listed = {one["id"]: one for one in json.loads(node.cli("list", "--format", "json").stdout)}
    (share,) = listed[peer.id]["shares"]
    assert share["memory_used_bytes"] == taken(simhost, namespace(peer)).current_bytes
    assert listed[peer.id]["note"] == ""


@pytest.mark.parametrize("pattern", ["garbage", "noise", "idle", "crowd"])
def test_corrupt_activity_files_leave_peers_and_host_working(
    start: Callable[..., Container], container: MakeContainer, node: Node, simhost: Path, pattern: str
) -> None:
    peer, attacker = start(), start(pattern)
    for one in (peer, attacker):
        while not taken(simhost, namespace(one)).busy_ns:
            assert one.state()["status"] == "running"
    for _ in range(SAMPLES):
        run_all_commands(node, simhost, peer, attacker)
    grab = peer.exec(PYTHON, f"/opt/{GRAB.name}")
    assert grab.returncode == 0, grab
    grabbed = json.loads(grab.stdout)
    assert grabbed["total_bytes"] == 4 * GIB and grabbed["got_bytes"] > 3 * GIB
    late = container(["true"], env={"GPUSHARE_MEMORY": "1Gi"}, runtime=node.runtime())
    assert late.run() == 0, late.stderr
    for one in (peer, attacker):
        assert one.state()["status"] == "running", (one is attacker, one.wait(5), one.stdout, one.stderr)
        one.kill()
        one.wait()
        one.delete()
    late.delete()
    assert node.left() == []
