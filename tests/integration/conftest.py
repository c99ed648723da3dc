"""End-to-end fixtures. Every test in this directory also checks for leftovers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration import docker_host, engines, podman_host
from tests.integration.docker_host import DockerHost
from tests.support.engines.containerd import Containerd
from tests.support.engines.image import make_root
from tests.support.engines.podman import Podman
from tests.support.host import Node
from tests.support.kills import PARTS, Kills
from tests.support.rootfs import run
from tests.support.tenant import Tenant

collect_ignore = [] if shutil.which("crio") else ["test_crio.py"]  # make engines


@pytest.fixture(autouse=True)
def _nothing_is_left(no_leaks: None) -> None:
    """`no_leaks` for all tests in this directory."""


# Files whose tests do not care which start is the first one on a host
COMPILED = (
    "mig", "oversubscribe", "pages", "placement", "policy", "propagation", "release", "run", "run_devices", "run_users",
    "runtime", "runtime_bundles", "schedulers", "stress", "suspend", "unlimited", "usage",
)  # fmt: skip


@pytest.fixture
def make_node(make_node: Callable[..., Node], request: pytest.FixtureRequest) -> Callable[..., Node]:
    def make(*arguments: Any, **config: Any) -> Node:
        made = make_node(*arguments, **config)
        if request.path.stem[len("test_") :] in COMPILED:
            made.compile()
        return made

    return make


@pytest.fixture(scope="session")
def image_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root file system of the image that all engines start."""
    return make_root(tmp_path_factory.mktemp("image") / "root")


@pytest.fixture(scope="module")
def _docker_host(image_root: Path) -> Iterator[DockerHost]:
    with docker_host.docker_host(image_root) as made:
        yield made


@pytest.fixture
def docker(_docker_host: DockerHost) -> Iterator[DockerHost]:
    """A module's own docker; each test leaves it empty."""
    yield _docker_host
    left = _docker_host.daemon.must("ps", "-aq").split()
    if left:
        _docker_host.daemon.docker("rm", "-f", *left)
    assert _docker_host.node.leases() == [], "a lease was left behind"


@pytest.fixture(scope="module", params=podman_host.ROWS)
def _podman(request: pytest.FixtureRequest, image_root: Path) -> Iterator[Podman]:
    with podman_host.podman_host(request.param, image_root) as made:
        yield made


@pytest.fixture
def podman(_podman: Podman) -> Iterator[Podman]:
    """A module's own podman, with hook or runtime."""
    yield _podman
    _podman.settle()
    assert _podman.node.leases() == [], "a lease was left behind"


@pytest.fixture(scope="module", params=["hook", "runtime"])
def _containerd(request: pytest.FixtureRequest, image_root: Path) -> Iterator[Containerd]:
    with engines.containerd(request.param, image_root) as made:
        yield made


@pytest.fixture
def containerd(_containerd: Containerd) -> Iterator[Containerd]:
    """A module's own containerd, with hook or runtime."""
    yield _containerd
    assert _containerd.node.leases() == [], "a lease was left behind"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if PARTS and "kills" in metafunc.fixturenames:
        metafunc.parametrize("kills", range(PARTS), indirect=True, ids=lambda part: f"part {part}")


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> Kills:
    """Kill points to test: a sample, or a share of all points in `make test-kills`."""
    return Kills(request.node.nodeid, getattr(request, "param", 0))


@pytest.fixture
def tenant(tmp_path: Path, node: Node) -> Iterator[Callable[..., Tenant]]:
    """tenant(name, env, **arguments of lib.runc.Container) -> Tenant on the simulated host, closed at the end."""
    made: list[Tenant] = []

    def make(name: str, env: dict[str, str], **arguments: Any) -> Tenant:
        made.append(Tenant(tmp_path / "tenants", name, env, node, **arguments))
        return made[-1]

    yield make
    for one in reversed(made):
        one.close()


@pytest.fixture
def pruned(request: pytest.FixtureRequest) -> Iterator[None]:
    """For `gpushare run`: remove cgroups of ended programs with their leases."""
    nodes = [request.getfixturevalue(name) for name in ("node", "two_gpus") if name in request.fixturenames]
    yield
    for node in nodes:
        node.cli("prune")


@pytest.fixture(params=["hook", "runtime"])
def way(request: pytest.FixtureRequest) -> str:
    """The ways into a container, hook and runtime, for Node.way: both must behave alike."""
    name: str = request.param
    return name


@pytest.fixture
def no_hybrid_cgroups() -> Iterator[None]:
    """Hide cgroup v2 in this run's mount namespace: crun refuses a host with both versions."""
    unified = Path("/sys/fs/cgroup/unified")
    hybrid = unified.is_dir() and os.path.ismount(unified)
    if hybrid:
        run("umount", unified)
    yield
    if hybrid:
        run("mount", "-t", "cgroup2", "none", unified)
