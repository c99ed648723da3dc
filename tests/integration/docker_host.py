"""A host with two simulated GPUs of 16 GiB and a docker daemon, for tests of docker's own features."""

from __future__ import annotations

import select
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from simulator.simhost import make_simhost
from tests.support.engines.base import Result
from tests.support.engines.docker import GPUSHARE, IMAGE, Docker, DockerContainer, start
from tests.support.engines.dockerd import Dockerd
from tests.support.engines.image import PROBE
from tests.support.host import Node
from tests.support.rootfs import run

GIB = 1 << 30
TWO_GIB = ("-e", "GPUSHARE_MEMORY=2Gi")
MakeRuntimes = Callable[[Path], dict[str, Any]]


class DockerHost(Docker):
    """Docker, with containers described by command-line options instead of `base.Want`."""

    def try_run(self, *options: str, args: tuple[str, ...], image: str = IMAGE, runtime: str = "gpushare") -> Result:
        """docker run --rm OPTIONS IMAGE ARGS."""
        return self._run(*GPUSHARE, "--runtime", runtime, *options, image, *args)

    def start_with(
        self, *options: str, args: tuple[str, ...], image: str = IMAGE, runtime: str = "gpushare"
    ) -> DockerContainer:
        """docker run --detach OPTIONS IMAGE ARGS. Raises Refused."""
        return start(self.daemon, *GPUSHARE, "--runtime", runtime, *options, image, *args)


class Daemon(Dockerd):
    """BuildKit starts steps with `build_runtime`."""

    build_runtime = Path()

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "DOCKER_BUILDKIT_RUNC_COMMAND": str(self.build_runtime)}


class BuildHost(DockerHost):
    """Steps of docker build run under gpushare-runtime, with docker 26 and newer."""

    def make_daemon(self, directory: Path, config: dict[str, Any] | None) -> Dockerd:
        made = Daemon(directory, config)
        made.build_runtime = directory / "build-runtime"
        made.build_runtime.write_text(f'#!/bin/sh\nexec {" ".join(self.node.runtime())} "$@"\n')
        made.build_runtime.chmod(0o755)
        return made


@contextmanager
def docker_host(
    image_root: Path, *options: str, runtimes: MakeRuntimes | None = None, kind: type[DockerHost] = DockerHost
) -> Iterator[DockerHost]:
    """gpushare is the default runtime, as with `configure --default`; `runtimes(directory)` returns additional ones."""
    directory = Path(tempfile.mkdtemp(prefix="gs-"))
    directory.chmod(0o711)  # the root of a user namespace must traverse it
    node = Node(directory / "node", make_simhost(directory / "host", gpus=2, memory_bytes=16 * GIB))
    try:
        node.cli("refresh")  # mounts the state directory; it stays mounted
        config = {"runtimes": runtimes(directory)} if runtimes else None
        made = kind(node, directory / "docker", image_root, *options, config=config, default=True)
        try:
            yield made
        finally:
            made.close()
    finally:
        node.close()
        run("rm", "-rf", directory)


class Hosts(NamedTuple):
    docker: DockerHost
    nodes: dict[str, Node]  # one for each runtime in daemon.json


@contextmanager
def docker_hosts(
    image_root: Path, prepare: Callable[[Path, dict[str, Node]], dict[str, tuple[str, ...]]]
) -> Iterator[Hosts]:
    """`prepare(directory, nodes)` makes additional nodes and returns, for each, the command line of its runtime."""
    nodes: dict[str, Node] = {}

    def runtimes(directory: Path) -> dict[str, Any]:
        lines = prepare(directory, nodes).items()
        return {name: {"path": path, "runtimeArgs": args} for name, (path, *args) in lines}

    with docker_host(image_root, runtimes=runtimes) as docker:
        try:
            yield Hosts(docker, {**nodes, "gpushare": docker.node})
        finally:
            for node in nodes.values():
                node.close()


def total(one: DockerContainer) -> int:
    """Return the device memory in bytes that a program started by docker exec sees. The simulated device frees the
    memory of an ended program shortly after the next program starts, not before. After a container that used all
    memory, the next program may need a second attempt."""
    first = one.exec(PROBE)
    answer = (one.exec(PROBE) if first.code else first).answer()
    assert "failed" not in answer, answer
    assert answer["got_bytes"] < answer["total_bytes"] == answer["nvml_total_bytes"]
    return int(answer["total_bytes"])


class Events:
    """`docker events` that match `filters`: past events since `since`, then new ones."""

    def __init__(self, daemon: Dockerd, *filters: str, since: str = "10m") -> None:
        self._command = daemon.command("events", "--format", "{{.Action}}", "--since", since)
        for one in filters:
            self._command += ["--filter", one]

    def __enter__(self) -> Events:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, bufsize=0)
        return self

    def next(self) -> str:
        """Wait for the next event."""
        assert self._process.stdout
        ready, _, _ = select.select([self._process.stdout], [], [], 60)
        return self._process.stdout.readline().decode().strip() if ready else "nothing came"

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
