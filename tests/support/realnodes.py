"""A driver root whose device nodes are character devices with NVIDIA's numbers. No driver is behind them: an open that
the device cgroup allows fails with ENXIO, one that it denies with EPERM. A simulated node is a regular file, which a
container opens even where its cgroup denies the device.

    with real_nodes(engine.node, tmp_path / "real"), engine.start(Want(SLEEP, {"GPUSHARE_DEVICES": "0"})) as one:
        assert opened(one, "/dev/nvidia0") == ALLOWED
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from simulator.simhost import make_simhost

from .engines.base import Running
from .host import Node

NODES = {"nvidia0": (195, 0), "nvidia1": (195, 1), "nvidiactl": (195, 255)}
ALLOWED, DENIED = "No such device or address", "Operation not permitted"


def make_nodes(directory: Path) -> None:
    """Make the nodes, in place of files of these names."""
    directory.mkdir(exist_ok=True)
    for name, (major, minor) in NODES.items():
        (directory / name).unlink(missing_ok=True)
        os.mknod(directory / name, 0o666 | stat.S_IFCHR, os.makedev(major, minor))


@contextmanager
def real_nodes(node: Node, root: Path) -> Iterator[Path]:
    """Let `node` have such a driver root, with two GPUs, for the time of the context."""
    make_simhost(root, gpus=2, memory_bytes=16 << 30)
    (root / ".gpushare-sim").unlink()
    make_nodes(root / "dev")
    before = node.config.read_text()
    node.config.write_text(json.dumps({**json.loads(before), "driver": {"root": str(root)}}))
    try:
        yield root
    finally:
        node.config.write_text(before)


def opened(one: Running, path: str) -> str:
    """The kernel's error when a program in the container opens a node for reading and writing; "" if it opens."""
    done = one.exec("sh", "-c", f": <>{path}")
    return done.err.strip().rpartition(": ")[2] if done.code else ""


def access(one: Running, minor: int) -> str:
    """`opened` of NVIDIA's device with this number, by a node that the host made in the container."""
    path = f"/dev/made{minor}"
    made = Path(f"/proc/{one.pid}/root{path}")
    if not made.exists():
        os.mknod(made, 0o666 | stat.S_IFCHR, os.makedev(195, minor))
    return opened(one, path)
