"""docs/recipes.md: the reference implementation of Dev Containers starts the container of the page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from tests.support.debian import DOCKER, Debian

from .conftest import limits, section

PACKAGES = (*DOCKER["trixie"], "npm")
CLI = "npm install --global ${SSL_CERT_FILE:+--cafile=$SSL_CERT_FILE} @devcontainers/cli@0.89.0"


def test_dev_container_has_its_share(with_docker: Callable[..., Debian]) -> None:
    debian = with_docker("trixie", "devcontainer", PACKAGES, CLI)
    (text,) = section("docs/recipes.md", "Dev Containers", "json")
    debian.put("/root/work/.devcontainer/devcontainer.json", text.replace('"IMAGE"', '"demo"'))
    done = debian.call("devcontainer", "up", "--workspace-folder", "/root/work", timeout_s=300)
    *_, last = done.stdout.splitlines() or [""]
    assert done.returncode == 0 and json.loads(last)["outcome"] == "success", done.stdout + done.stderr
    assert list(limits(debian).values()) == [4]
    seen = debian.run("devcontainer", "exec", "--workspace-folder", "/root/work", "nvidia-smi")
    assert re.findall(r"/ +(\d+)MiB", seen) == ["4096"], seen
