"""The device plugin's image, run by runc as its DaemonSet specifies, between a kubelet and a node with gpushare."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare.cli import k8s_plugin
from gpushare.core import constants

from tests.support import daemonset
from tests.support.host import TREE, Node, version, write_config
from tests.support.kubelet import Kubelet
from tests.support.rootfs import run, unmount_below
from tests.support.runc import Container

from .conftest import PACKAGES

MEMORY, GPU = "gpushare.io/memory-mib", "gpushare.io/gpu"
EACH = 64 << 10  # MiB of a device; ids of two devices nearly fill a message to kubelet
MANIFEST = TREE / "packaging/kubernetes/plugin/daemonset.yaml"
# Kernel files that every container shows: in the pod, the driver is the node's as well.
DRIVER = """#!/bin/sh
pid=$(grep -o '"pid":[0-9]*' | head -n 1)
exec nsenter --mount --target "${{pid#*:}}" mount --bind {source} {rootfs}/proc/driver
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> daemonset.Image:
    context = PACKAGES / f"gpushare-plugin-{version()}.tar.gz"
    return daemonset.unpack(context, tmp_path_factory.mktemp("plugin"))


@pytest.fixture
def node(tmp_path: Path, make_host: Callable[..., Path]) -> Iterator[Node]:
    """The node's directory is shared, like a node's file systems: later mounts appear in pods."""
    (tmp_path / "node").mkdir()
    run("mount", "--bind", tmp_path / "node", tmp_path / "node")
    try:
        run("mount", "--make-shared", tmp_path / "node")
        yield Node(tmp_path / "node", make_host(gpus=2, memory_bytes=EACH << 20))
    finally:
        unmount_below(tmp_path / "node")


@pytest.fixture
def kubelets() -> Iterator[Path]:
    """kubelet's directory; the path of a socket must be short."""
    with tempfile.TemporaryDirectory(prefix="gpushare-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def pod(tmp_path: Path, image: daemonset.Image, node: Node, kubelets: Path) -> Iterator[Callable[[], Container]]:
    made: list[Container] = []
    hook = tmp_path / "driver"
    hook.write_text(DRIVER.format(source=node.driver_root / "proc/driver", rootfs=image.rootfs))
    hook.chmod(0o755)
    given = daemonset.arguments(MANIFEST, image, {k8s_plugin.FOLDER: kubelets, constants.STATE_DIR: node.state})
    edit = given.pop("edit")

    def edited(spec: dict[str, Any]) -> None:
        edit(spec)
        spec["hooks"] = {"createRuntime": [{"path": str(hook)}]}

    def start() -> Container:
        made.append(Container(tmp_path / "pods", **{**given, "edit": edited}))
        return made[-1].start()

    yield start
    for one in made:
        one.close()


def test_daemon_set_s_container_serves_kubelet(
    pod: Callable[[], Container], node: Node, kubelets: Path, image: daemonset.Image, tmp_path: Path
) -> None:
    """From its start, which waits until the state directory is mounted, to kubelet's choices, and to the end."""
    assert [path.name for path in image.rootfs.iterdir()] == ["gpushare"]
    with Kubelet(kubelets) as kubelet:
        assert node.cli("refresh").returncode == 0  # mounts the state directory
        one = pod()
        kubelet.wait(lambda: kubelet.has_listed(MEMORY, GPU) and kubelet.healthy(MEMORY))
        assert len(kubelet.healthy(MEMORY)) == 2 * EACH and not kubelet.healthy(GPU)
        kubelet.allocate(MEMORY, EACH - 100)
        (value,) = kubelet.allocate(MEMORY, 4096).values()  # tests/integration/test_containerd.py starts pods
        assert value.endswith("=4096Mi")

        # A device disappears, and the configuration has other shares
        gpus = node.driver_root / "proc/driver/nvidia/gpus"
        bus = sorted(path.name for path in gpus.iterdir())[1]
        shutil.move(gpus / bus, tmp_path / "gone")
        kubelet.wait(lambda: len(kubelet.healthy(MEMORY)) == EACH)
        shutil.move(tmp_path / "gone", gpus / bus)
        write_config(node.config, node.driver_root, sharing={"split_count": 4})
        assert node.cli("refresh").returncode == 0
        kubelet.wait(lambda: len(kubelet.healthy(GPU)) == 8 and not kubelet.healthy(MEMORY))
        assert kubelet.allocate(GPU, 1).keys() == {constants.ENV_ALLOCATED_GPU}

        one.kill(signal.SIGTERM)
        assert one.wait() == 0, one.stderr
        assert one.stderr == "" and [path.name for path in kubelets.iterdir()] == ["kubelet.sock"]
