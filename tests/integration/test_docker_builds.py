"""Steps of docker build with a share, under BuildKit with gpushare-runtime as its runtime. docker 26 and newer can set
it; earlier ones start the steps without a share (docs/docker.md)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.docker_host import GIB, DockerHost, docker_host
from tests.integration.test_systemd_cgroups import version_of
from tests.support.engines.base import Result
from tests.support.engines.docker import IMAGE
from tests.support.engines.dockerd import Dockerd
from tests.support.engines.image import PROBE

SETS_RUNTIME = version_of("dockerd") >= (26, 0)
HAS_SHARE = f"{PROBE} | grep '\"total_bytes\": {GIB}'"


class Daemon(Dockerd):
    """BuildKit starts steps with `build_runtime`."""

    build_runtime = Path()

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "DOCKER_BUILDKIT_RUNC_COMMAND": str(self.build_runtime)}


class WithRuntime(DockerHost):
    def make_daemon(self, directory: Path, config: dict[str, Any] | None) -> Dockerd:
        made = Daemon(directory, config)
        made.build_runtime = directory / "build-runtime"
        made.build_runtime.write_text(f'#!/bin/sh\nexec {" ".join(self.node.runtime())} "$@"\n')
        made.build_runtime.chmod(0o755)
        return made


@pytest.fixture(scope="module")
def with_runtime(image_root: Path) -> Iterator[DockerHost]:
    with docker_host(image_root, kind=WithRuntime) as docker:
        yield docker


def build(docker: DockerHost, directory: Path, *lines: str) -> Result:
    (directory / "Dockerfile").write_text("\n".join((f"FROM {IMAGE}", *lines)) + "\n")
    words = ("build", "--no-cache", "--network", "none", "--progress", "plain", str(directory))
    return docker.daemon.docker(*words, DOCKER_BUILDKIT="1", timeout_s=120)


def test_step_with_a_request_has_a_share(with_runtime: DockerHost, tmp_path: Path) -> None:
    done = build(with_runtime, tmp_path, "ENV GPUSHARE_MEMORY=1Gi", f"RUN {HAS_SHARE}")
    assert (done.code == 0) == (SETS_RUNTIME), done.err
    assert with_runtime.node.leases() == []


def test_step_without_a_request_has_none(with_runtime: DockerHost, tmp_path: Path) -> None:
    done = build(with_runtime, tmp_path, "RUN ! ls -d /usr/lib/gpushare")
    assert done.code == 0, done.err


def test_request_for_too_much_fails_the_build(with_runtime: DockerHost, tmp_path: Path) -> None:
    done = build(with_runtime, tmp_path, "ENV GPUSHARE_MEMORY=99Gi", "RUN true")
    refused = done.code != 0 and "gpushare: no device fits 99 GiB of memory" in done.err
    assert refused == SETS_RUNTIME, done.err
