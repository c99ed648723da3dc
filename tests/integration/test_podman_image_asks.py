"""Images that request a GPU without the variables that policy checks: by a VOLUME at the path of its node."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration import test_podman
from tests.integration.podman_host import GIB, TWO_GIB, refusal
from tests.support.engines.base import SLEEP, Want
from tests.support.engines.image import PROBE
from tests.support.engines.podman import Podman

build, policy = test_podman.build, test_podman.policy
Build, Policy = Callable[..., str], Callable[..., None]


@pytest.fixture
def image(build: Build) -> str:
    return build("VOLUME /dev/nvidia0 /dev/nvidia-caps/nvidia-cap1")


def test_volume_at_a_gpu_s_path_gives_no_gpu(podman: Podman, image: str, policy: Policy) -> None:
    for rules in ({}, {"accept": {"env": "never", "annotations": "never"}}, {"require_limits": True}):
        policy(**rules)
        with podman.start(Want(SLEEP), image=image) as one:
            assert podman.node.leases() == []
            assert "nvidiactl" not in one.exec("ls", "/dev").out


def test_volume_at_a_gpu_s_path_changes_no_limit(podman: Podman, image: str) -> None:
    """The hook removes no mount, so it refuses one at a GPU's node."""
    if podman.way == "hook":
        assert "mount at" in refusal(podman, Want(SLEEP, TWO_GIB), image=image)
        return
    with podman.start(Want(SLEEP, TWO_GIB), image=image) as one:
        assert one.exec(PROBE).answer()["total_bytes"] == 2 * GIB
