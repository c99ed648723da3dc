"""docker of an unprivileged user (rootlesskit): containers have their limits, by cooperation only, and the state is the
user's own."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulator.simhost import make_simhost
from tests.support.engines import rootless
from tests.support.engines.base import SLEEP, Want
from tests.support.engines.image import PROBE, make_root
from tests.support.engines.rootless import RootlessDocker
from tests.support.host import BIN, Node
from tests.support.judge import peak_bytes
from tests.support.rootfs import run

GIB = 1 << 30
TWO_GIB = {"GPUSHARE_MEMORY": "2Gi"}


@pytest.fixture(scope="module")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RootlessDocker]:
    image_root = make_root(tmp_path_factory.mktemp("image") / "root")
    directory = Path(tempfile.mkdtemp(prefix="gs-"))
    directory.chmod(0o755)
    try:
        with rootless.user(directory / "user") as home:
            driver = make_simhost(directory / "host", gpus=1, memory_bytes=16 * GIB)
            made = RootlessDocker(Node(directory / "node", driver), home, image_root)
            try:
                yield made
            finally:
                made.close()
    finally:
        run("rm", "-rf", directory)


@pytest.fixture
def docker(_made: RootlessDocker) -> Iterator[RootlessDocker]:
    yield _made
    assert _made.node.leases() == [], "a lease was left behind"


def gpushare(docker: RootlessDocker, *args: str) -> subprocess.CompletedProcess[str]:
    """The user's own `gpushare`, outside of docker's namespaces."""
    words = [*rootless.as_user(), str(BIN / "gpushare"), "--config", str(docker.node.config), *args]
    return subprocess.run(words, capture_output=True, text=True, env=rootless.session(docker.home), timeout=60)


def test_limit_is_visible_reached_and_enforced(docker: RootlessDocker) -> None:
    answer = docker.run(Want(env=TWO_GIB)).answer()
    assert (answer["devices"], answer["total_bytes"], answer["refused"]) == (1, 2 * GIB, 2)
    assert GIB < peak_bytes(docker.node.driver_root, answer["pidns"]) <= 2 * GIB


def test_state_is_in_the_user_s_runtime_directory(docker: RootlessDocker) -> None:
    """Also when docker's own /run is writable; it is visible to the user's programs outside of docker's namespaces."""
    with docker.start(Want(SLEEP, TWO_GIB)) as one:
        assert one.exec(PROBE).answer()["total_bytes"] == 2 * GIB
        assert docker.node.leases() == [one.id]
        listed = json.loads(gpushare(docker, "list", "--format", "json").stdout)
        assert one.id in json.dumps(listed)
        assert not Path("/run/gpushare").exists()


def test_containers_of_one_user_do_not_exceed_the_device(docker: RootlessDocker) -> None:
    rootless.require_device_is_not_exceeded(docker)


def test_restarted_container_gets_its_share_again(docker: RootlessDocker) -> None:
    with docker.start(Want(SLEEP, TWO_GIB)) as one:
        one.stop()
        one.restart()
        assert one.exec(PROBE).answer()["total_bytes"] == 2 * GIB
        assert docker.node.leases() == [one.id]
