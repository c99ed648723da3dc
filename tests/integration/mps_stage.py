"""A host with two GPUs where MPS is allowed but not started, with a simulated daemon; and its containers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from simulator import mpscontrol
from simulator.simhost import default_uuid
from tests.support.host import PYTHON, TREE, Node, python_mounts
from tests.support.processes import reap_zombies
from tests.support.rootfs import unmount_below
from tests.support.runc import Container

GIB = 1 << 30
UUID = default_uuid(0)
PIPE = f"/usr/lib/gpushare/mps/{UUID}"
PROGRAM = TREE / "tests" / "integration" / "programs" / "mpsclient.py"
CLIENT = (PYTHON, f"/opt/{PROGRAM.name}")
MOUNTS = python_mounts(PROGRAM, PROGRAM.with_name("taker.py"))
OUT_OF_MEMORY, CONNECTION_FAILED, MAX_CLIENTS_REACHED = 2, 805, 808  # CUresult
RAISED = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=16G"}
RAISED["CUDA_MPS_PIPE_DIRECTORY"] = "/tmp"


def make_mps_host(make_host: Callable[..., Path], make_node: Callable[..., Node]) -> Iterator[Node]:
    """Two GPUs; MPS is allowed but not started. The state directory is short, because a socket's path must be."""
    with tempfile.TemporaryDirectory(prefix="gs-", dir="/tmp") as short:
        node = make_node(make_host(gpus=2), policy={"allowed_backends": ["shim", "mps"], "unlimited": "shared"})
        mpscontrol.install(node.driver_root)
        node.move(str(node.config), short)
        yield node
        node.cli("mps", "stop", "--force")
        unmount_below(Path(short))
    reap_zombies()


def make_mps_containers(tmp_path: Path, host: Node) -> Iterator[Callable[..., Container]]:
    """container(way, memory, compute, **env) -> a sleeping container with MPS on the first GPU."""
    made: list[Container] = []

    def make(way: str, memory: str = "4Gi", compute: str = "30%", env: Any = None, **arguments: Any) -> Container:
        asked = {"GPUSHARE_DEVICES": "0", "GPUSHARE_BACKEND": "mps", "GPUSHARE_MEMORY": memory}
        asked = {**asked, "GPUSHARE_COMPUTE": compute, **(env or {})}
        arguments = {**host.way(way), "mounts": MOUNTS, "name": f"m{len(made)}", **arguments}
        one = Container(tmp_path / "c", ["sleep", "inf"], env=asked, **arguments)
        made.append(one)
        return one

    yield make
    for one in reversed(made):
        one.close()


def start(host: Node, *args: str) -> int:
    """Start the daemon and return its pid."""
    done = host.cli("mps", "start", "--device", "0", *args, "--format", "json")
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout)[0]["pid"])


def status(host: Node, code: int = 0) -> dict[str, Any]:
    done = host.cli("mps", "status", "--device", "0", "--format", "json")
    assert done.returncode == code, done.stdout + done.stderr
    row: dict[str, Any] = json.loads(done.stdout)[0]
    return row


def client(container: Container, *args: str, env: Any = None, user: str = "") -> dict[str, Any]:
    """Start a program in a running container, with its own environment."""
    options = [word for pair in (env or {}).items() for word in ("--env", "=".join(pair))]
    options += ["--user", user] if user else []
    done = container.exec(*CLIENT, *args, options=tuple(options))
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report
