"""Fixtures for `make test-recipes`."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from demo.playground import IMAGE, IMPORT_OPTIONS, image
from simulator.simhost import make_simhost
from tests.docs.blocks import fenced
from tests.support import busy
from tests.support.debian import Debian, Docker
from tests.support.engines.image import make_tar
from tests.support.host import BUILD, TREE

GIB = 1 << 30
CONFIG = "version: 1\ndriver: {root: /srv/driver}\nlog: {decisions: /var/log/gpushare}\n"


@pytest.fixture(autouse=True)
def _nothing_is_left(no_leaks: None) -> None:
    """`no_leaks` for all tests in this directory."""


@pytest.fixture
def with_gpushare() -> Iterator[Callable[..., Debian]]:
    """with_gpushare(suite, name, packages, more) -> a Debian with gpushare's .deb, a simulated GPU of 16 GiB, and the
    program `busy`."""
    with ExitStack() as cleanup:

        def make(suite: str, name: str, packages: tuple[str, ...], more: str = "") -> Debian:
            folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="gs-")))
            folder.chmod(0o755)
            debian = cleanup.enter_context(Debian(suite, name, packages, folder, more))
            (deb,) = (BUILD / "packages").glob("gpushare_*_amd64.deb")
            shutil.copy(deb, debian.path / "srv")
            debian.run("dpkg", "--install", f"/srv/{deb.name}")
            make_simhost(debian.path / "srv/driver", memory_bytes=16 * GIB)
            shutil.copy(busy.build(), debian.path / "usr/bin")
            debian.put("/etc/gpushare/config.yaml", CONFIG)
            debian.run("gpushare", "refresh")
            return debian

        yield make


@pytest.fixture
def with_docker(with_gpushare: Callable[..., Debian], tmp_path: Path) -> Iterator[Callable[..., Debian]]:
    """with_docker(suite, name, packages, more, daemon={}, configured=True) -> the same with a docker daemon, its
    configuration, the runtime `gpushare`, and the image `demo`."""
    with ExitStack() as cleanup:

        def make(*words: Any, daemon: dict[str, Any] | None = None, configured: bool = True) -> Debian:
            debian = with_gpushare(*words)
            debian.put("/etc/docker/daemon.json", json.dumps(daemon or {}) + "\n")
            if configured:
                debian.run("gpushare", "runtime", "configure", "docker")
            cleanup.enter_context(Docker(debian))
            shutil.copy(make_tar(image(tmp_path / "image"), tmp_path / "image.tar"), debian.path / "srv")
            debian.run("docker", "import", *IMPORT_OPTIONS, "/srv/image.tar", IMAGE)
            return debian

        yield make


def section(page: str, heading: str, language: str) -> list[str]:
    """The blocks in that language below a heading of a page."""
    text = (TREE / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return ["\n".join(lines) + "\n" for one, lines in fenced(text) if one == language]


def shell(debian: Debian, command: str) -> str:
    """Type a command of a page; `IMAGE` is `demo`."""
    return debian.run("bash", "-c", command.replace(" IMAGE", f" {IMAGE}"))


def limits(debian: Debian, *prefix: str) -> dict[str, int]:
    """Name or ID of a container or program that has a share -> its memory limit in GiB."""
    found = json.loads(debian.run(*prefix, "gpushare", "list", "--format", "json"))
    alive = [one for one in found if one["state"] == "running"]
    return {one["name"] or one["id"]: one["shares"][0]["memory_limit_bytes"] // GIB for one in alive}
