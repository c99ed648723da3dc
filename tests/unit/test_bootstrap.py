"""packaging/bootstrap installs what is missing, with fake apt-get and dpkg-query."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.host import TREE
from tests.support.launcher import script

# The package `client` has the command docker
APT = """for word; do case $word in install|update|-*) ;; *) echo "$word" >>{dir}/installed ;; esac; done
if grep -qx {client} {dir}/installed; then printf '#!/bin/sh\\n' >{dir}/docker; chmod 755 {dir}/docker; fi"""
QUERY = """for word; do name=$word; done; grep -qx "$name" {dir}/installed && printf 'install ok installed'"""


@pytest.mark.parametrize("client", ["docker.io", "docker-cli"])
def test_docker_s_client_is_installed(tmp_path: Path, client: str) -> None:
    """Of Debian 12, where docker.io has it, and of later versions, where it is a package of its own."""
    for name in ("bash", "sh", "mktemp", "rm", "cat", "id", "grep", "chmod", "flock", "mkdir", "dirname"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    script(tmp_path / "apt-get", APT.format(dir=tmp_path, client=client))
    script(tmp_path / "dpkg-query", QUERY.format(dir=tmp_path))
    (tmp_path / "installed").touch()
    for already in (False, True):
        command = [TREE / "packaging" / "bootstrap", "playground"]
        done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stderr) == (0, "")
        assert (done.stdout == "") == already
    installed = (tmp_path / "installed").read_text().split()
    assert (tmp_path / "docker").exists() and "gcc" in installed
    assert ("docker-cli" in installed) == (client == "docker-cli")
    assert len(installed) == len(set(installed))
