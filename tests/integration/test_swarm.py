"""docs/docker.md: services of docker's swarm mode, which counts GPU memory as a generic resource."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import fenced
from tests.integration.docker_host import DockerHost, docker_host
from tests.support.engines.docker import IMAGE
from tests.support.host import TREE

LOOPBACK = ("--advertise-addr", "127.0.0.1", "--listen-addr", "127.0.0.1", "--data-path-addr", "127.0.0.1")


def recipe(language: str) -> str:
    section = (TREE / "docs/docker.md").read_text().partition("\n## In swarm mode\n")[2].partition("\n## ")[0]
    (text,) = ["\n".join(lines) for one, lines in fenced(section) if one == language]
    return text


@pytest.fixture
def swarm(image_root: Path) -> Iterator[DockerHost]:
    """A swarm of this host, with the generic resource of the recipe; gpushare is the default runtime."""
    (resource,) = json.loads(recipe("json"))["node-generic-resources"]
    with docker_host(image_root, f"--node-generic-resource={resource}") as docker:
        docker.daemon.must("swarm", "init", *LOOPBACK)
        yield docker
        docker.daemon.must("swarm", "leave", "--force")


def until(true: Callable[[], Any], what: str) -> None:
    """Poll the swarm, which offers no event to a client of 20.10."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def test_swarm_places_services_by_gpu_memory(swarm: DockerHost) -> None:
    """4 and 13 of 16 GiB: the second service waits until the first one is removed."""
    command = next(line for line in recipe("sh").splitlines() if line.startswith("docker service create"))
    words = command.replace("IMAGE", IMAGE).split()[1:]
    words[2:2] = ["--detach", "--network", "host", "--stop-signal", "KILL"]  # sleep ignores TERM for 10 s
    swarm.daemon.must(*words, "sleep", "1000")

    def state(name: str) -> str:
        return swarm.daemon.must("service", "ps", "--format", "{{.CurrentState}} {{.Error}}", name)

    until(lambda: "Running" in state("serve"), state("serve"))
    (one,) = json.loads(swarm.node.cli("list", "--format", "json").stdout)
    assert one["shares"][0]["memory_limit_bytes"] == 4 << 30
    more = [word.replace("serve", "batch").replace("gpu-gib=4", "gpu-gib=13") for word in words]
    swarm.daemon.must(*more, "sleep", "1000")
    until(lambda: "no suitable node" in state("batch"), state("batch"))
    swarm.daemon.must("service", "rm", "serve")
    until(lambda: "Running" in state("batch"), state("batch"))
