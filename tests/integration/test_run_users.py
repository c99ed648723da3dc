"""`gpushare run` for users other than root: with --user the same share, without privileges a cooperative one."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

import pytest

from simulator.simhost import make_simhost
from tests.support import judge, programs
from tests.support.host import Node
from tests.support.programs import ENVIRONMENT, GRAB, run

pytestmark = pytest.mark.usefixtures("pruned")
MIB, GIB = 1 << 20, 1 << 30
CONTEXT = 300 * MIB


def test_program_with_user_option_gets_the_share(node: Node) -> None:
    script = 'id -u; id -g; id -G; head -n1 /proc/self/uid_map; exec "$@"'
    done = run(node, "--memory", "2Gi", "--user", "nobody", "--", "sh", "-c", script, "sh", *GRAB)
    assert done.returncode == 0, done.stderr
    *identity, said = done.stdout.splitlines()
    assert identity[:3] == ["65534", "65534", "65534"] and identity[3].split() == ["0", "0", "4294967295"]
    assert json.loads(said)["total_bytes"] == 2 * GIB and json.loads(said)["got_bytes"] >= 2 * GIB - CONTEXT - 4 * MIB
    done = run(node, "--user", "4711:4712", "--", "sh", "-c", "id -u; id -g; id -G; grep CapEff /proc/self/status")
    assert done.stdout.split() == ["4711", "4712", "4712", "CapEff:", "0" * 16]


@pytest.fixture
def users_node(make_node: Callable[..., Node]) -> Iterator[Node]:
    """A node whose files an unprivileged user can read; its state directory is not used."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        made = Node(Path(folder) / "node", make_simhost(Path(folder) / "host", gpus=1, memory_bytes=16 * GIB))
        runtime = Path(folder) / "runtime"
        runtime.mkdir(0o700)
        os.chown(runtime, 4711, 4711)
        yield made
        made.close()


def as_user(node: Node, *arguments: str, runtime: str = "") -> subprocess.CompletedProcess[str]:
    """Run `gpushare ARGUMENTS` as user 4711, with a session."""
    program = (str(programs.BUILD / "bin" / "gpushare"), "--config", str(node.config))
    return user(*program, *arguments, node=node, runtime=runtime)


def user(*command: str, node: Node, runtime: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**ENVIRONMENT, "XDG_RUNTIME_DIR": runtime or str(node.config.parents[1] / "runtime")}
    prefix = ("setpriv", "--reuid", "4711", "--regid", "4711", "--clear-groups", "--")
    return subprocess.run([*prefix, *command], env=environment, capture_output=True, text=True, timeout=90)


def test_unprivileged_user_gets_a_cooperative_share(users_node: Node) -> None:
    told = "gpushare: rootless, so cooperative only: no device cgroup, and shares of other users are not counted\n"
    script = 'id -u; id -g; grep CapEff /proc/self/status; cat /dev/null && exec "$@"'
    done = as_user(users_node, "run", "--memory", "4Gi", "--name", "mine", "--", "sh", "-c", script, "sh", *GRAB)
    assert (done.returncode, done.stderr) == (0, told)
    *identity, said = done.stdout.splitlines()
    assert identity == ["4711", "4711", "CapEff:\t" + "0" * 16]
    assert json.loads(said)["total_bytes"] == 4 * GIB and json.loads(said)["got_bytes"] <= 4 * GIB
    assert judge.peak_bytes(users_node.driver_root, os.stat("/proc/self/ns/pid").st_ino) <= 4 * GIB
    state = users_node.config.parents[1] / "runtime" / "gpushare"
    assert [one["id"] for one in json.loads(as_user(users_node, "list", "--format", "json").stdout)] == ["mine"]
    assert as_user(users_node, "prune").returncode == 0
    assert list((state / "containers").iterdir()) == [] and list((state / "trash").iterdir()) == []


def test_user_learns_which_shares_devices_does_not_count(users_node: Node) -> None:
    done = as_user(users_node, "devices")
    assert done.returncode == 0 and "16 GiB" in done.stdout and done.stderr.count("\n") == 1, done.stderr
    assert "not the shares of root and of other users" in done.stderr
    assert users_node.cli("devices").stderr == ""


def test_shares_of_one_user_do_not_exceed_the_device(users_node: Node) -> None:
    command = f"{programs.BUILD}/bin/gpushare --config {users_node.config} run --memory 9Gi"
    script = f"""exec 3< <(exec {command} --name first -- sh -c "echo ready; exec sleep 100")
        read -r line <&3; {command} -- echo ran; echo "$line $?"; kill $!; wait $!"""
    done = user("bash", "-c", script, node=users_node)
    assert done.stdout == "ready 75\n" and "held by first (9 GiB)" in done.stderr
    done = as_user(users_node, "run", "--memory", "17Gi", "--", "true")
    assert done.returncode == 75 and "17 GiB requested, 16 GiB free" in done.stderr


def test_user_can_change_own_limits(users_node: Node) -> None:
    command = f"{programs.BUILD}/bin/gpushare --config {users_node.config}"
    program = f"""sh -c 'echo ready; read -r go; exec "$@"' sh {" ".join(GRAB)}"""
    script = f"""coproc {command} run --memory 9Gi --name first -- {program}
        read -r line <&"${{COPROC[0]}}"; exec 3<&"${{COPROC[0]}}"; {command} limit set first --memory 2Gi --compute 50
        {command} limit set first --memory 17Gi; echo "$?"; echo go >&"${{COPROC[1]}}"; cat <&3"""
    done = user("bash", "-c", script, node=users_node)
    *said, grabbed = done.stdout.splitlines()
    assert "9 GiB -> 2 GiB" in said[1] and said[-1] == "75", done.stdout + done.stderr
    assert json.loads(grabbed)["total_bytes"] == json.loads(grabbed)["nvml_total_bytes"] == 2 * GIB


def test_user_without_runtime_directory_is_refused(users_node: Node) -> None:
    """gpushare uses no directory of another user, with any value of XDG_RUNTIME_DIR."""
    done = as_user(users_node, "run", "--memory", "1Gi", "--", "true", runtime="/tmp")
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 71 and "/run/user/4711/gpushare" in line and "set XDG_RUNTIME_DIR" in line
