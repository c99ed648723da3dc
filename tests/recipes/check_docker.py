"""docs/docker.md: CDI devices by --device, --gpus and a Compose reservation, with docker of Debian 13 and sid."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.support.debian import Debian

from .conftest import limits, section, shell

PACKAGES = ("docker.io", "docker-cli", "docker-compose")
# docker 26 needs the feature, docker 28 has it
DAEMON = {"trixie": {"features": {"cdi": True}}, "sid": {}}
SMI = re.compile(r"/ +(\d+)MiB")


@pytest.fixture(params=DAEMON)
def debian(request: pytest.FixtureRequest, with_docker: Callable[..., Debian]) -> Debian:
    """docker's default runtime is runc: only CDI adds gpushare."""
    suite = request.param
    made = with_docker(suite, "compose", PACKAGES, daemon=DAEMON[suite], configured=False)
    shell(made, "gpushare cdi generate --output /etc/cdi/gpushare.yaml")
    return made


def test_cdi_device_is_a_share_by_every_option(debian: Debian) -> None:
    (block,) = section("docs/docker.md", "With CDI", "sh")
    starts = [line for line in block.splitlines() if line.startswith("docker run")]
    assert [re.findall(r"--(device|gpus)", line) for line in starts] == [["device"], ["gpus"]]
    for line in starts:
        assert SMI.findall(shell(debian, line)) == ["4096"], line
    # Without a toolkit and without our device, docker itself refuses
    done = debian.call("docker", "run", "--rm", "--gpus", "all", "demo", "true")
    assert done.returncode == 125 and "could not select device driver" in done.stderr, done.stderr


def test_names_of_nvidia_are_shares(debian: Debian) -> None:
    (block,) = section("docs/docker.md", "With --gpus", "sh")
    write, *starts = block.splitlines()
    shell(debian, write)
    assert len(starts) == 2
    for line in starts:
        assert SMI.findall(shell(debian, line)) == ["4096"], line


def test_too_large_request_by_gpus_is_refused_with_the_reason(debian: Debian) -> None:
    option = 'driver=cdi,"device=gpushare.io/share=any"'
    done = debian.call("docker", "run", "--rm", "--gpus", option, "-e", "GPUSHARE_MEMORY=17Gi", "demo", "true")
    assert done.returncode and "17 GiB" in done.stderr and "gpushare: " in done.stderr, done.stderr


def test_compose_reservation_is_a_share(debian: Debian) -> None:
    text = next(one for one in section("docs/docker.md", "With CDI", "yaml") if "reservations" in one)
    debian.put("/root/shop/compose.yaml", text.replace("image: IMAGE", "image: demo"))
    version = shell(debian, "docker compose version")
    debian.run("docker", "compose", "--project-directory", "/root/shop", "up", "--detach")
    assert limits(debian) == {"shop-train-1": 4}, version
    assert SMI.findall(shell(debian, "docker exec shop-train-1 nvidia-smi")) == ["4096"]
    debian.run("docker", "compose", "--project-directory", "/root/shop", "down", "--timeout", "0")
    assert limits(debian) == {}


def test_compose_services_of_the_recipe_share_one_gpu(debian: Debian) -> None:
    """Compose 2 and newer; tests/docs/test_tour.py runs the same file with docker-compose 1.29."""
    shell(debian, "gpushare runtime configure docker && systemctl reload docker")
    (text,) = section("docs/recipes.md", "Compose with two services", "yaml")
    debian.put("/root/pair/compose.yaml", text.replace("image: IMAGE", "image: demo"))
    debian.run("docker", "compose", "--project-directory", "/root/pair", "up", "--detach")
    assert limits(debian) == {"pair-serve-1": 4, "pair-batch-1": 8}
    for service in ("serve", "batch"):
        assert f"pair-{service}-1" in shell(debian, f"gpushare inspect {service}")
    debian.run("docker", "compose", "--project-directory", "/root/pair", "down", "--timeout", "0")
