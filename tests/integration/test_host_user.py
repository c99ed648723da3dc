"""An unprivileged user of the host beside the containers of other users: their shares are closed to the user, and no
file that the user may open delays a start or an end."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tests.security import proof
from tests.support.host import Node
from tests.support.runc import RuntimeFailed

MakeContainer = Callable[..., Any]
USER = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--")
SHARE = {"GPUSHARE_MEMORY": "1Gi"}
# Open and lock everything accessible below a directory, list it, and wait for the end of input
GRABBER = """
import fcntl, json, os, sys
said = {"readable": [], "writable": [], "closed": []}
held = []
for folder, folders, files in os.walk(sys.argv[1], onerror=lambda error: said["closed"].append(error.filename)):
    for name in (".", *files):
        path = os.path.join(folder, name)
        for kind, flags in (("readable", os.O_RDONLY), ("writable", os.O_RDWR)):
            try:
                held.append(os.open(path, flags | os.O_NONBLOCK))
                fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
                said[kind].append(os.path.relpath(path, sys.argv[1]))
            except OSError:
                pass
print(json.dumps(said), flush=True)
sys.stdin.read()
"""


def test_user_s_lock_below_the_mount_does_not_block_the_first_start(
    container: MakeContainer, node: Node, way: str
) -> None:
    """An administrator or systemd may have created it, accessible to all like /run."""
    node.state.mkdir(exist_ok=True)
    for directory in (node.state, *node.state.parents):
        if str(directory).startswith("/tmp/"):
            directory.chmod(directory.stat().st_mode | 0o055)
    script = f"exec 9<{node.state}; flock 9; echo locked; cat"
    with subprocess.Popen([*USER, "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as grabber:
        assert grabber.stdin and grabber.stdout and grabber.stdout.readline() == b"locked\n"
        one = container(["true"], env=SHARE, **node.way(way))
        assert one.run() == 0, one.stderr
        assert grabber.poll() is None
        grabber.stdin.close()


def test_state_directory_of_another_user_is_refused(container: MakeContainer, node: Node, way: str) -> None:
    node.state.mkdir(exist_ok=True)
    os.chown(node.state, 65534, 65534)
    with pytest.raises(RuntimeFailed, match="state directory .* belongs to uid 65534, not 0; chown 0 "):
        container(["true"], env=SHARE, **node.way(way)).start()
    os.chown(node.state, 0, 0)
    (node.state / ".lock").touch()
    os.chown(node.state / ".lock", 65534, 65534)
    with pytest.raises(RuntimeFailed, match=r"lock\S+ is not a file of uid 0 alone with mode 600; rm "):
        container(["true"], env=SHARE, **node.way(way)).start()
    (node.state / ".lock").unlink()


def test_another_user_cannot_read_shares_or_block_starts(container: MakeContainer, node: Node, way: str) -> None:
    for directory in (node.state, *node.state.parents):  # accessible to all users, like /run/gpushare
        if str(directory).startswith("/tmp/"):
            directory.chmod(directory.stat().st_mode | 0o055)
    one = container(["sleep", "inf"], env=SHARE, **node.way(way)).start()
    command = [*USER, "/usr/bin/python3", "-Ic", GRABBER, str(node.state)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as grabber:
        assert grabber.stdin and grabber.stdout
        report = json.loads(grabber.stdout.readline())
        assert "." in report["readable"], "the premise: the state directory is open to the user"
        assert set(report["readable"]) <= {".", "errors", "launcher", "node.json"} and report["writable"] == []
        assert sorted(path.rpartition("/")[2] for path in report["closed"]) == [
            "containers",
            "devices",
            "idmap",
            "trash",
        ]
        node.config.write_text(node.config.read_text() + "\n")  # forces a complete new compilation
        other = container(["true"], env=SHARE, **node.way(way))
        assert other.run() == 0
        other.delete()
        one.kill()
        one.wait()
        one.delete()
        assert node.cli("refresh").returncode == 0
        assert grabber.poll() is None
        grabber.stdin.close()
    proof.require_nothing_left(node)
