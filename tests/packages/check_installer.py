"""The installer image, run by runc as its DaemonSets specify: gpushare is installed on a node and removed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.integration.test_installer import DROP_IN, FEATURES, called, node, tree
from tests.support import daemonset
from tests.support.host import TREE, version
from tests.support.rootfs import run
from tests.support.runc import Container

from .conftest import PACKAGES

__all__ = ["node"]  # a fixture
KUBERNETES = TREE / "packaging/kubernetes"
INSTALLER, EXPORTER = KUBERNETES / "installer/daemonset.yaml", KUBERNETES / "exporter/daemonset.yaml"
PROBE = "import sys, urllib.request; sys.stdout.write(urllib.request.urlopen('http://127.0.0.1:9878/metrics').read().decode())"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> daemonset.Image:
    context = PACKAGES / f"gpushare-installer-{version()}.tar.gz"
    return daemonset.unpack(context, tmp_path_factory.mktemp("installer"))


@pytest.fixture
def pod(tmp_path: Path, image: daemonset.Image, node: Path) -> Iterator[Callable[..., Container]]:
    """pod(manifest, arguments...) -> the started container of its pod on this node."""
    made: list[Container] = []

    def start(manifest: Path, *args: str) -> Container:
        made.append(Container(tmp_path / "pods", **daemonset.arguments(manifest, image, {"/": node}, args)))
        return made[-1].start()

    yield start
    for one in made:
        one.close()


def until(one: Container, begins: str) -> None:
    """Wait for an output line of the container with this prefix."""
    words = ["tail", "--lines=+1", "--follow", f"--pid={one.pid}", str(one.bundle / "stdout")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as tail:
        assert tail.stdout is not None
        found = any(line.startswith(begins) for line in tail.stdout)
        tail.kill()
    assert found, one.stdout + one.stderr


def end(one: Container) -> int:
    one.kill(signal.SIGTERM)
    return one.wait()


def test_images_install_export_and_remove(pod: Callable[..., Container], node: Path, tmp_path: Path) -> None:
    before = tree(node)
    early = pod(EXPORTER)
    assert early.wait() == 1 and early.stderr == "gpushare: gpushare is not on this node yet\n"

    installer = pod(INSTALLER)
    until(installer, "ready")
    assert (node / DROP_IN).is_file() and "gpushare.io/present=true\n" in (node / FEATURES).read_text()
    assert (node / "run/gpushare/node.json").is_file()  # a mount that the pod made on the node
    assert called(node) == ["systemctl restart containerd"]

    exporter = pod(EXPORTER)
    until(exporter, "serving metrics at http://0.0.0.0:9878/metrics")
    served = run("nsenter", "--net", "--target", str(exporter.pid), sys.executable, "-c", PROBE)
    assert f'gpushare_build_info{{version="{version()}"}} 1.0' in served and "gpushare_driver_up 1.0" in served

    installed = tree(node)
    assert end(exporter) == 0, exporter.stderr
    assert end(installer) == 0, installer.stdout + installer.stderr
    assert tree(node) == installed

    # A killed pod, then the manifests for removal: another argument of the same container
    again = pod(INSTALLER)
    until(again, "ready")
    again.kill(signal.SIGKILL)
    again.wait()
    (patch,) = yaml.safe_load((KUBERNETES / "remove/kustomization.yaml").read_text())["patches"]
    step = yaml.safe_load(patch["patch"])[0]
    removal = pod(INSTALLER, *step["value"])
    until(removal, "gpushare is removed from this node")
    assert not [path for path in tree(node) - before if "gpushare" in path] and not (node / FEATURES).exists()
    assert removal.state()["status"] == "running"  # or its DaemonSet would restart it in a loop
    assert end(removal) == 0
