"""gpushare run: ungranted devices, with each kind of cgroup setup."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration import ns_util
from tests.support.host import Node
from tests.support.programs import ENVIRONMENT, GRAB, run, words

pytestmark = pytest.mark.usefixtures("pruned")
GIB = 1 << 30


@pytest.fixture
def two_gpus(make_node: Callable[..., Node], make_host: Callable[..., Path]) -> Node:
    return make_node(make_host("two", gpus=2, memory_bytes=16 * GIB), "two-node")


def test_nodes_of_other_gpus_cannot_be_made_and_opened(two_gpus: Node, tmp_path: Path) -> None:
    make = "mknod other c 195 1; mknod own c 195 0 && mknod zero c 1 5 && head -c1 zero"
    done = run(two_gpus, "--devices", "0", "--memory", "1Gi", "--", "sh", "-c", make, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == "\0"
    assert "Operation not permitted" in done.stderr and not (tmp_path / "other").exists()


def test_nodes_of_other_gpus_are_hidden(two_gpus: Node) -> None:
    done = run(two_gpus, "--devices", "1", "--memory", "1Gi", "--", "sh", "-c", "cd /dev; ls -d nvidia*; ls | wc -l")
    *nvidia, count = done.stdout.split()
    assert nvidia == ["nvidia-uvm", "nvidia-uvm-tools", "nvidia1", "nvidiactl"]
    others = [name for name in os.listdir("/dev") if not name.startswith("nvidia")]
    assert int(count) == len(nvidia) + len(others)


def test_hidden_nodes_cannot_be_opened(tmp_path: Path) -> None:
    """If the host's driver made its nodes, each is covered by itself with a nodev mount."""
    node, scratch = tmp_path / "node", tmp_path / "scratch"
    os.mknod(node, 0o666 | 0o020000, os.makedev(1, 5))
    scratch.mkdir()

    def body() -> Any:
        from gpushare.programs import hostroot
        from gpushare.system import syscalls

        syscalls.unshare(syscalls.CLONE_NEWNS, "test")
        with open(node, "rb") as zero:
            first = zero.read(1)
        root = hostroot.HostRoot(str(scratch))
        root.hide(str(node))
        root.finish()
        try:
            os.open(node, os.O_RDONLY)
        except OSError as error:
            return [len(first), error.strerror, os.listdir(scratch)]
        return "opened"

    assert ns_util.in_child(body) == [1, "Permission denied", []]
    with open(node, "rb") as zero:
        assert zero.read(1) == b"\0"


VIEWS = {
    "v2": "umount -R /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup",
    "read-only": "mount -o remount,ro,bind /sys/fs/cgroup/devices",
    "none": "umount -R /sys/fs/cgroup",
}


@pytest.mark.parametrize("view", VIEWS)
def test_limit_holds_with_each_kind_of_cgroup(two_gpus: Node, tmp_path: Path, view: str) -> None:
    """On v2 an eBPF program denies access. Without a usable cgroup, one line reports it and the limit still holds."""
    inner = f'mknod {tmp_path}/other c 195 1; mknod {tmp_path}/own c 195 0; exec "$@"'
    command = words(two_gpus, "--devices", "0", "--memory", "2Gi", "--", "sh", "-c", inner, "sh", *GRAB)
    assert two_gpus.cli("refresh").returncode == 0  # the state is the host's, not the view's
    prefix = ["unshare", "-m", "sh", "-c", f'{VIEWS[view]} && exec "$@"', "sh"]
    done = subprocess.run([*prefix, *command], env=ENVIRONMENT, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["total_bytes"] == 2 * GIB
    assert (tmp_path / "own").exists()
    if view == "v2":
        assert "Operation not permitted" in done.stderr and not (tmp_path / "other").exists()
        unified = subprocess.run(
            [
                "unshare",
                "-m",
                "sh",
                "-c",
                f"{VIEWS[view]} && {' '.join(words(two_gpus)[:-1])} prune && ls /sys/fs/cgroup",
            ],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "removed" in unified.stdout and "gpushare-sh-" not in unified.stdout.partition("cgroup.procs")[2]
    else:
        assert done.stderr.count("gpushare:") == 1 and "no device cgroup (" in done.stderr
        assert (tmp_path / "other").exists()
