"""docs/recipes.md and docs/podman.md: Apptainer below `gpushare run`, and `podman run --gpus`, in Debian sid."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from demo.playground import image
from tests.support.debian import Debian
from tests.support.engines.image import make_tar

from .conftest import section, shell

SMI = re.compile(r"/ +(\d+)MiB")


@pytest.fixture
def with_image(with_gpushare: Callable[..., Debian], tmp_path: Path) -> Callable[..., Debian]:
    """with_image(name, packages) -> a Debian sid with these packages and the image of the playground in /srv/image."""

    def make(name: str, packages: tuple[str, ...]) -> Debian:
        debian = with_gpushare("sid", name, packages)
        shutil.copytree(image(tmp_path / "image"), debian.path / "srv/image", symlinks=True)
        shutil.copy(make_tar(tmp_path / "image", tmp_path / "image.tar"), debian.path / "srv")
        return debian

    return make


def test_apptainer_below_run_gets_the_share(with_image: Callable[..., Debian]) -> None:
    debian = with_image("apptainer", ("apptainer", "squashfs-tools", "uidmap"))
    debian.run("useradd", "--create-home", "alice")
    debian.run("apptainer", "build", "--sandbox", "/srv/IMAGE.sif", "/srv/image")  # a directory works like a file
    debian.run("chmod", "--recursive", "a+rX", "/srv/IMAGE.sif")
    (line,) = section("docs/recipes.md", "Apptainer", "sh")
    words = line.replace("IMAGE.sif", "/srv/IMAGE.sif").split()
    assert SMI.findall(debian.run(*words)) == ["4096"]
    at = words.index("--bind")
    without = debian.call(*words[:at], *words[at + 2 :])
    assert without.returncode and not SMI.findall(without.stdout)


def test_podman_translates_gpus_to_names_of_nvidia(with_image: Callable[..., Debian]) -> None:
    debian = with_image("podman", ("podman", "runc"))
    options = "--cgroup-manager cgroupfs --runtime runc --storage-driver vfs"
    debian.run("podman", *options.split(), "import", "/srv/image.tar", "demo")
    (block,) = (one for one in section("docs/podman.md", "CDI", "sh") if "--gpus" in one)
    write, start = block.splitlines()
    shell(debian, write)
    start = start.replace("podman run", f"podman {options} run --rm --network none").replace("IMAGE", "demo nvidia-smi")
    assert SMI.findall(shell(debian, start)) == ["4096"]
