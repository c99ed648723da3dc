"""apply.py: device nodes, sockets, and the kernel's reason for a failure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gpushare.core.ops import DeviceNode, Mount, Plan

from tests.integration import ns_util, scene

base, image, source = scene.base, scene.image, scene.source


def test_existing_node_is_kept(image: Path, source: Path) -> None:
    os.mknod(image / "dev/nvidia0", 0o666 | 0o020000, os.makedev(195, 0))
    node = DeviceNode(str(source / "nvidia0"), "/dev/nvidia0", 195, 0, False)
    with ns_util.sandbox(image) as box:
        assert box.apply(Plan("test", (node,)), lambda applied: applied.notes) == ['"/dev/nvidia0" is there already']
        assert box.mounts() == []


@pytest.mark.parametrize(
    ("name", "simulated", "says"),
    [
        ("nvidia0", True, "not a simulated device"),
        ("nvidia7", False, "not the character device 195:0"),
        ("simulated0", False, "not the character device 195:0"),
        ("rw", True, "not a simulated device"),
        ("missing", False, "No such file"),
    ],
)
def test_source_that_is_not_the_device_is_refused(
    image: Path, source: Path, name: str, simulated: bool, says: str
) -> None:
    with ns_util.sandbox(image) as box:
        assert says in box.refuses(DeviceNode(str(source / name), "/dev/nvidia0", 195, 0, simulated))


def test_node_of_another_device_is_refused(image: Path, source: Path) -> None:
    os.mknod(image / "dev/nvidia0", 0o666 | 0o020000, os.makedev(195, 7))
    with ns_util.sandbox(image) as box:
        message = box.refuses(DeviceNode(str(source / "nvidia0"), "/dev/nvidia0", 195, 0, False))
        assert message.startswith('"/dev/nvidia0" is a character device where a file must be')


def test_socket_is_mounted_as_a_socket(image: Path, source: Path) -> None:
    import socket

    server = socket.socket(socket.AF_UNIX)
    server.bind(str(source / "socket"))
    server.listen()
    mount = Mount(str(source / "socket"), "/run/nvidia-persistenced/socket", "socket", ("nosuid",), "socket")
    with ns_util.sandbox(image) as box:
        box.apply(Plan("test", (mount,)))

        def connect() -> int:
            client = socket.socket(socket.AF_UNIX)
            client.connect(mount.target)
            client.close()
            return 0

        assert box.enter(connect) == 0
    server.close()
