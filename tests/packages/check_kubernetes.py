"""`gpushare nri` and `gpushare dra` of the bundle with Kubernetes support: that of the device plugin's image."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpushare.core import constants

from simulator.simhost import make_simhost
from tests.integration import test_dra, test_nri
from tests.integration.test_k8s_plugin import Program
from tests.support import daemonset
from tests.support.dra import ApiServer, Kubelet
from tests.support.engines.base import SLEEP, Want
from tests.support.engines.image import make_root
from tests.support.host import BIN, TREE, Node, version
from tests.support.rootfs import run, unmount_below
from tests.support.runc import Container

from .conftest import PACKAGES

OPT = Path("/opt/gpushare")

GIB = 1 << 30
NRI = TREE / "packaging/kubernetes/nri/daemonset.yaml"
DRA = TREE / "packaging/kubernetes/dra/daemonset.yaml"
LARGEST_MB = 80  # of the bundle, in millions of bytes
# The bundle with Kubernetes support has the notices of these parts more than the ordinary one
MORE = {"grpcio-LICENSE", "protobuf-LICENSE", "libstdc++6"}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> daemonset.Image:
    context = PACKAGES / f"gpushare-plugin-{version()}.tar.gz"
    return daemonset.unpack(context, tmp_path_factory.mktemp("plugin"))


@pytest.fixture
def program(image: daemonset.Image) -> Path:
    return image.rootfs / "gpushare/bin/gpushare"


def test_bundle_has_only_what_the_commands_need(image: daemonset.Image) -> None:
    """Nothing that the builder's virtual environment happens to load: it has NVIDIA's packages, and readline (GPL)."""
    bundle = image.rootfs / "gpushare"
    files = [path for path in bundle.rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in files) < LARGEST_MB * 10**6
    (modules,) = bundle.glob("libexec/_internal/lib/python3*")
    names = {path.name.partition(".")[0] for path in [*modules.iterdir(), *(modules / "lib-dynload").iterdir()]}
    assert {"grpc", "google"} <= names and not {"cuda", "_distutils_hack", "readline", "sitecustomize"} & names
    notices = {path.name for path in (bundle / "licenses").iterdir()}
    assert notices >= MORE and not any(name.startswith(("cuda", "setuptools", "libreadline")) for name in notices)


@pytest.mark.parametrize(
    ("manifest", "command"), [(NRI, "nri"), (DRA, "dra")], ids=lambda value: getattr(value, "stem", value)
)
def test_manifest_s_command_has_help(manifest: Path, command: str, image: daemonset.Image, program: Path) -> None:
    given = daemonset.arguments(manifest, image, {path: image.rootfs for path in paths_of(manifest)})
    assert given["args"][:2] == ["/gpushare/bin/gpushare", command]
    assert run(program, command, "--help").startswith(f"Usage: gpushare {command} [OPTIONS]")


def paths_of(manifest: Path) -> list[str]:
    """Paths of the pod's volumes."""
    return [line.split()[-1] for line in manifest.read_text().splitlines() if line.lstrip().startswith("path: /")]


def test_nri_without_a_socket_names_it_and_the_engines(program: Path, tmp_path: Path, node: Node) -> None:
    words = ["--config", node.config, "--state", node.state, "nri", "--hook", BIN / "gpushare-hook"]
    one = Program([*map(str, (program, *words)), "--socket", str(tmp_path / "none")])
    try:
        one.expect("waiting for .*/none.: No such file or directory .containerd 1.7 and newer and CRI-O 1.26")
    finally:
        assert one.end() == (0, "")


@pytest.fixture
def engine(image_root: Path) -> Iterator[test_nri.Engine]:
    """containerd on a node whose configuration and state are in their usual places, as in a cluster."""
    with test_nri.running(image_root) as made:
        folder, state = Path(constants.CONFIG_PATH).parent, Path(constants.STATE_DIR)
        folder.mkdir(parents=True)
        shutil.copy(made.node.config, folder)
        state.mkdir()
        run("mount", "--rbind", made.node.state, state)
        run("mount", "--make-rshared", state)
        yield made


@pytest.fixture(scope="module")
def image_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("image") / "root")


def test_nri_daemon_set_gives_shares(engine: test_nri.Engine, image: daemonset.Image, tmp_path: Path) -> None:
    """Its container, without privileges, adds the node's hook over the socket of a real containerd."""
    run("mount", "-t", "tmpfs", "tmpfs", OPT.parent)
    (OPT / "current").mkdir(parents=True)
    run("mount", "--bind", BIN.parent, OPT / "current")
    given = daemonset.arguments(NRI, image, {path: Path(path) for path in paths_of(NRI)})
    plugin = Container(tmp_path / "pods", **given)
    try:
        plugin.start()
        follow(plugin, "registered with containerd", "containers exist")
        with engine.pod() as pod:
            one, plain = pod.run(Want(SLEEP, {"GPUSHARE_MEMORY": "2Gi"})), pod.run(Want(SLEEP), "plain")
            assert test_nri.limit(one) == 2 * GIB and test_nri.has_no_gpu(plain)
            created = pod.container(Want(SLEEP, {"GPUSHARE_MEMORY": "2Gi"}), "created")
            plugin.kill(signal.SIGTERM)
            assert plugin.wait() == 0, plugin.stderr
            created.start()
            assert test_nri.limit(one) == 2 * GIB and test_nri.has_no_gpu(created)
    finally:
        plugin.close()
        unmount_below(OPT.parent)


folder = test_dra.folder  # a fixture


def follow(one: Container, *patterns: str) -> None:
    """Wait for output lines that contain these texts, in this order."""
    words = ["tail", "--lines=+1", "--follow", f"--pid={one.pid}", str(one.bundle / "stdout")]
    left = list(patterns)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as tail:
        assert tail.stdout is not None
        for line in tail.stdout:
            if left[0] in line:
                left.pop(0)
            if not left:
                break
        tail.kill()
    assert not left, one.stdout + one.stderr


def test_dra_publishes_and_prepares(
    program: Path, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It talks TLS to the API server and gRPC to kubelet."""
    monkeypatch.setattr(test_dra, "program", lambda: program)
    node = Node(tmp_path / "node", make_simhost(tmp_path / "host", gpus=2, memory_bytes=16 * GIB))
    try:
        assert node.cli("refresh").returncode == 0
        with ApiServer(tmp_path / "account") as api, Kubelet(folder) as kubelet:
            driver = test_dra.Driver(node, folder, api)
            try:
                driver.expect("serving 2 devices")
                kubelet.register()
                driver.expect("registered with kubelet")
                assert kubelet.prepare(api.allocate("a", {"gpu": {"memory": "4Gi", "compute": "30"}}))
            finally:
                assert driver.end() == 0, driver.lines
    finally:
        node.close()
