"""Podman of an unprivileged user: containers have their limits, and the user learns that these are cooperative."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from simulator.simhost import make_simhost
from tests.integration import engines
from tests.support.engines import rootless
from tests.support.engines.base import SLEEP, Want
from tests.support.engines.image import PROBE, make_root
from tests.support.engines.rootless import RootlessPodman
from tests.support.host import BUILD, Node
from tests.support.judge import peak_bytes
from tests.support.rootfs import run

GIB = 1 << 30
TWO_GIB = {"GPUSHARE_MEMORY": "2Gi"}
ROWS = [("runc", "hook"), ("crun", "runtime")]


@pytest.fixture(scope="module")
def image_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("image") / "root")


@pytest.fixture(scope="module", params=ROWS, ids=", ".join)
def _made(request: pytest.FixtureRequest, image_root: Path) -> Iterator[RootlessPodman]:
    low_level, way = request.param
    unified = Path("/sys/fs/cgroup/unified")
    hybrid = low_level == "crun" and os.path.ismount(unified)
    if hybrid:  # crun refuses a host with cgroup v1 and v2 at once
        run("umount", unified)
    directory = Path(tempfile.mkdtemp(prefix="gs-"))
    directory.chmod(0o755)
    try:
        with rootless.user(directory / "user") as home:
            driver = make_simhost(directory / "host", gpus=1, memory_bytes=16 * GIB)
            node = Node(directory / "node", driver, runtime=engines.runtime_path(low_level))
            made = RootlessPodman(node, home, image_root, low_level, way)
            try:
                yield made
            finally:
                made.close()
    finally:
        run("rm", "-rf", directory)
        if hybrid:
            run("mount", "-t", "cgroup2", "none", unified)


@pytest.fixture
def podman(_made: RootlessPodman) -> Iterator[RootlessPodman]:
    yield _made
    assert _made.node.leases() == [], "a lease was left behind"


def gpushare(podman: RootlessPodman, *args: str) -> subprocess.CompletedProcess[str]:
    """The user's own `gpushare`."""
    words = [*rootless.as_user(), str(BUILD / "bin" / "gpushare"), "--config", str(podman.node.config), *args]
    return subprocess.run(words, capture_output=True, text=True, env=podman.environment(), timeout=60)


def test_limit_is_visible_reached_and_enforced(podman: RootlessPodman) -> None:
    answer = podman.run(Want(env=TWO_GIB)).answer()
    assert (answer["devices"], answer["total_bytes"], answer["refused"]) == (1, 2 * GIB, 2)
    assert GIB < peak_bytes(podman.node.driver_root, answer["pidns"]) <= 2 * GIB


def test_cooperative_limit_is_reported(podman: RootlessPodman) -> None:
    """The first line of the container's log reports it, where the runtime's output goes (a hook's is lost), and so does
    doctor. A container without a request gets no such line."""
    told = "rootless, so cooperative only: no device cgroup, and shares of other users are not counted"
    for env, expected in ((TWO_GIB, f"gpushare: {told}\n" if podman.way == "runtime" else ""), ({}, "")):
        with podman.start(Want(SLEEP, env)) as one:
            one.stop()  # then all of it is written
            assert podman.podman("logs", one.name).err == expected
    checks = json.loads(gpushare(podman, "doctor", "--format", "json").stdout)["checks"]
    assert [row["detail"] for row in checks if row["name"] == "rights"] == [told]


def test_state_is_in_the_user_s_runtime_directory(podman: RootlessPodman) -> None:
    """It is in the user's runtime directory, visible to programs outside podman's namespaces."""
    with podman.start(Want(SLEEP, TWO_GIB)) as one:
        assert one.exec(PROBE).answer()["total_bytes"] == 2 * GIB
        assert one.exec("sh", "-c", "echo > /usr/lib/gpushare/limits").code != 0
        assert podman.node.leases() == [one.id]
        assert (rootless.STATE / "containers").stat().st_uid == rootless.UID
        listed = gpushare(podman, "list")
        assert one.id[:12] in listed.stdout and one.name in listed.stdout, listed.stderr
        assert gpushare(podman, "limit", "show", one.name).returncode == 0
        assert not Path("/run/gpushare").exists()


def test_containers_of_one_user_do_not_exceed_the_device(podman: RootlessPodman) -> None:
    rootless.require_device_is_not_exceeded(podman)
