"""docker in a privileged container with a share: its containers get no GPU by themselves, and the outer share together
if they are given its files."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.docker_host import GIB, TWO_GIB, DockerHost, Hosts, docker_hosts
from tests.support.engines.base import Result
from tests.support.engines.docker import DockerContainer
from tests.support.engines.dockerd import NO_NETWORK
from tests.support.engines.image import PROBE, copy_program, make_tar
from tests.support.host import Node, python_mounts
from tests.support.rootfs import run

EDIT_SPEC = Path(__file__).parent / "programs" / "edit_spec.py"
PROGRAMS = ("dockerd", "containerd", "containerd-shim-runc-v2", "runc", "docker")
CGROUPS = "/sys/fs/cgroup"
SOCKET = "unix:///var/lib/docker/socket"
LIBDIR = "/usr/lib/x86_64-linux-gnu"
# An inner container that uses the outer share needs: the shim and the limits, the libraries, the nodes
SHARE = ("/usr/lib/gpushare", LIBDIR, "/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")


@pytest.fixture(scope="module", params=[2, 1], ids="cgroup v{}".format)
def outer(request: pytest.FixtureRequest, image_root: Path) -> Iterator[DockerContainer]:
    """The outer container. The test machine has v1; with version 2 a hierarchy of v2 is mounted over it."""
    if request.param == 2:
        run("mount", "-t", "cgroup2", "gpushare-test", CGROUPS)
    try:
        with _outer(image_root) as one:
            yield one
    finally:
        if request.param == 2:
            run("umount", CGROUPS)


@contextmanager
def _outer(image_root: Path) -> Iterator[DockerContainer]:
    def prepare(directory: Path, nodes: dict[str, Node]) -> dict[str, tuple[str, ...]]:
        low_level = directory / "less"  # some test machines lack the capability
        words = f"{sys.executable} {EDIT_SPEC} drop-capability CAP_SYS_RESOURCE {shutil.which('runc')}"
        low_level.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        low_level.chmod(0o755)
        nodes["privileged"] = Node(directory / "node2", directory / "host", runtime={"path": str(low_level)})
        nodes["privileged"].cli("refresh")
        return {"privileged": nodes["privileged"].runtime()}

    with docker_hosts(image_root, prepare) as hosts, tempfile.TemporaryDirectory(prefix="gs-") as data:
        make_tar(image_root, Path(data, "inner.tar"))
        image = _with_docker(hosts, image_root, Path(data))
        mounts = [word for mount in python_mounts() for word in ("-v", f"{mount.source}:{mount.target}:ro")]
        options = ("--privileged", "-v", f"{data}:/var/lib/docker", *mounts, *TWO_GIB)
        args = ("dockerd", f"--host={SOCKET}", "--storage-driver=vfs", "--userland-proxy=false", *NO_NETWORK)
        docker: DockerHost = hosts.docker
        with docker.start_with(*options, args=args, image=image, runtime="privileged") as one:
            end = time.monotonic() + 60
            while inner(one, "version").code:  # it tells only its parent that it is ready
                assert time.monotonic() < end and one.inspect("{{.State.Running}}") == "true", logs(one)
            loaded = inner(one, "import", "/var/lib/docker/inner.tar", "t")
            assert loaded.code == 0, loaded.err
            yield one


def _with_docker(hosts: Hosts, image_root: Path, directory: Path) -> str:
    root = Path(shutil.copytree(image_root, directory / "root", symlinks=True))
    for name in PROGRAMS:
        path = shutil.which(name, path="/usr/bin:/usr/sbin") or name
        copy_program(Path(path), root, f"usr/bin/{name}")
    archive = make_tar(root, directory / "outer.tar")
    hosts.docker.daemon.must("import", str(archive), "outer", timeout_s=120)
    run("rm", "-rf", root, archive)
    return "outer"


def inner(outer: DockerContainer, *words: str) -> Result:
    """A command of the inner docker."""
    return outer.exec("docker", "-H", SOCKET, *words)


def logs(outer: DockerContainer) -> str:
    done = outer.daemon.docker("logs", outer.id)
    return (done.out + done.err)[-3000:]


def test_inner_container_has_no_gpu_by_itself(outer: DockerContainer) -> None:
    done = inner(outer, "run", "--rm", "--network", "none", *TWO_GIB, "t", "sh", "-c", "ls /dev /usr/lib/gpushare")
    assert done.code != 0 and "nvidia" not in done.out


def test_inner_containers_share_the_outer_limit(outer: DockerContainer) -> None:
    volumes = [word for path in SHARE for word in ("-v", f"{path}:{path}")]
    done = inner(outer, "run", "--rm", "--network", "none", *volumes, "t", PROBE)
    if Path("/sys/fs/cgroup/devices").exists():
        # v1: below a cgroup that denies a single device, as the other GPU, no cgroup may allow all devices
        assert done.code == 125 and 'failed to write "c *:* m"' in done.err
        return
    answer = done.answer()
    assert (answer["devices"], answer["total_bytes"], answer["refused"]) == (1, 2 * GIB, 2)
    assert GIB < answer["got_bytes"] <= 2 * GIB
    assert json.loads(outer.exec(PROBE).out)["total_bytes"] == 2 * GIB
