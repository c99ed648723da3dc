"""docker run, with gpushare-runtime in daemon.json as `gpushare runtime configure docker` writes it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from .. import host
from ..host import Node
from ..spec import Mount
from .base import Refused, Result, Want
from .dockerd import Dockerd
from .image import PROBE, make_tar

IMAGE = "gpushare-test"
GPUSHARE = ("--runtime", "gpushare", "--network", "none")


class Docker:
    """An engine whose daemon runs from the start; `daemon` offers docker's own features."""

    way = "runtime"
    name = "docker"
    annotates = False  # `docker run --annotation` came with 25
    shows_reason = True
    restarts = True

    def __init__(
        self,
        node: Node,
        directory: Path,
        image_root: Path,
        *options: str,
        config: dict[str, Any] | None = None,
        default: bool = False,
    ) -> None:
        self.node = node
        self.daemon = self.make_daemon(directory, config)
        configure(node, self.daemon, *(["--default"] if default else []))
        self._archive = make_tar(image_root, directory / "image.tar")
        try:
            self.daemon.start(*options)
            self.load(IMAGE)
        except BaseException:
            self.close()
            raise

    def make_daemon(self, directory: Path, config: dict[str, Any] | None) -> Dockerd:
        return Dockerd(directory, config)

    def load(self, name: str, *changes: str) -> str:
        """Import the image as `name`, changed by these lines of a Dockerfile."""
        words = [word for line in changes for word in ("--change", line)]
        self.daemon.must("import", *words, str(self._archive), name)
        return name

    def run(self, want: Want, timeout_s: float = 60) -> Result:
        return self._run(*words(want), timeout_s=timeout_s)

    def _run(self, *options: str, timeout_s: float = 60) -> Result:
        """docker run --rm OPTIONS. The probe always prints a line, but dockerd drops a program's output that does not
        arrive within 2 s of the program's end (moby issue 45689). That happens on a busy machine: run it again."""
        for _ in range(3):
            done = self.daemon.docker("run", "--rm", *options, timeout_s=timeout_s)
            if options[-1] != PROBE or done != Result(0, "", ""):
                break
        return done

    def start(self, want: Want) -> DockerContainer:
        return start(self.daemon, *words(want))

    def close(self) -> None:
        self.daemon.close()


def configure(node: Node, daemon: Dockerd, *options: str) -> None:
    """Write the entry in daemon.json, with this node's directories as arguments of the runtime."""
    program = ("--program", str(host.BIN / "gpushare-runtime"))
    # The daemon's directory is the host's root, so the record for --undo is there as well.
    where = ("--root", str(daemon.directory), "--config-file", "/daemon.json")
    done = node.cli("runtime", "configure", "docker", *where, *program, *options)
    assert done.returncode == 0, done.stderr


def words(want: Want) -> list[str]:
    """The words after `docker run`."""
    options = [*GPUSHARE, "--user", want.user]
    for key, value in want.env.items():
        options += ["--env", f"{key}={value}"]
    for mount in want.mounts:
        options += ["--mount", _volume(mount)]
    for point in want.tmpfs:
        options += ["--tmpfs", point]
    if want.read_only:
        options.append("--read-only")
    return [*options, IMAGE, *want.args]


def _volume(mount: Mount) -> str:
    read_only = ",readonly" if "ro" in mount.options else ""
    return f"type=bind,source={mount.source},target={mount.target}{read_only}"


def start(daemon: Dockerd, *args: str) -> DockerContainer:
    """`docker run --detach`. On failure docker keeps the container, so remove it and raise Refused."""
    done = daemon.docker("run", "--detach", *args)
    container_id = done.out.strip()
    if done.code:
        if container_id:
            daemon.must("rm", "-f", container_id)
        raise Refused(done)
    return DockerContainer(daemon, container_id)


class DockerContainer:
    """See base.Running."""

    def __init__(self, daemon: Dockerd, container_id: str) -> None:
        self.daemon = daemon
        self.id = container_id
        self._there = True

    @property
    def pid(self) -> int:
        return int(self.inspect("{{.State.Pid}}"))

    def inspect(self, template: str) -> str:
        return self.daemon.must("inspect", "--format", template, self.id)

    def exec(self, *args: str, user: str = "") -> Result:
        return self.daemon.docker("exec", *(("--user", user) if user else ()), self.id, *args)

    def stop(self) -> None:
        self.daemon.must("stop", "--time", "0", self.id)

    def wait(self, timeout_s: float = 60) -> int:
        """The program's exit code."""
        return int(self.daemon.must("wait", self.id, timeout_s=timeout_s))

    def restart(self) -> None:
        done = self.daemon.docker("start", self.id)
        if done.code:
            raise Refused(done)

    def remove(self) -> None:
        if self._there:
            self._there = False
            try:
                self.daemon.must("rm", "--force", "--volumes", self.id)
            except subprocess.TimeoutExpired as error:
                raise AssertionError(f"docker rm hangs:\n{self.daemon.log[-4000:]}") from error

    def __enter__(self) -> DockerContainer:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()
