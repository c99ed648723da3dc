"""Images that claim, by annotations of a CRI, to be a pod's sandbox or container. Podman copies such annotations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration import test_podman, test_podman_seen
from tests.integration.nvidia_cdi import cdi as nvidia_cdi
from tests.integration.nvidia_cdi import with_simulated_nodes
from tests.integration.podman_host import GIB, TWO_GIB, refusal
from tests.support.engines.base import SLEEP, Want
from tests.support.engines.image import PROBE
from tests.support.engines.podman import Podman

build, policy, etc_cdi = test_podman.build, test_podman.policy, test_podman_seen.etc_cdi
gpus_in_dev = test_podman_seen.gpus_in_dev
Build, Policy = Callable[..., str], Callable[..., None]

SANDBOX = "io.kubernetes.cri.container-type=sandbox"
CRIO_SANDBOX = "io.kubernetes.cri-o.ContainerType=sandbox"
NAMED = ("io.kubernetes.cri.container-name=app", "io.kubernetes.cri.sandbox-namespace=ml")
CLAIMS = {"sandbox": (SANDBOX,), "CRI-O sandbox": (CRIO_SANDBOX,), "container": NAMED}


@pytest.fixture(params=CLAIMS)
def kind(request: pytest.FixtureRequest) -> str:
    """The image's claim."""
    name: str = request.param
    return name


@pytest.fixture
def image(kind: str, build: Build) -> str:
    return build("", *(word for claim in CLAIMS[kind] for word in ("--annotation", claim)))


@pytest.fixture
def device(podman: Podman, etc_cdi: Path) -> tuple[str, str]:
    """A GPU as NVIDIA's CDI file describes it."""
    root = podman.node.driver_root
    described = with_simulated_nodes(nvidia_cdi(root), root)
    described["devices"] = described["devices"][:1]
    (etc_cdi / "nvidia.json").write_text(json.dumps(described))
    return ("--device", "nvidia.com/gpu=0")


def test_user_s_limit_holds(podman: Podman, image: str) -> None:
    assert podman.run(Want(env=TWO_GIB), image=image).answer()["total_bytes"] == 2 * GIB


def test_injected_device_has_the_user_s_limit(podman: Podman, image: str, device: tuple[str, str]) -> None:
    """Also a limit in an annotation: the image's container name must not assign it to another container."""
    if podman.way == "hook":
        assert "/usr/bin/nvidia-cdi-hook" in refusal(podman, Want(SLEEP, TWO_GIB), *device, image=image)
        return
    with podman.start(Want(SLEEP, TWO_GIB), *device, image=image) as one:
        assert one.exec(PROBE).answer()["total_bytes"] == 2 * GIB
    said = refusal(podman, Want(SLEEP, annotations={"gpushare.io/memory": "1Gi"}), *device, image=image)
    assert "would make this a container of a pod" in said and "leave the annotation out" in said


@pytest.mark.parametrize(
    "rules", [{"require_limits": True}, {"accept": {"cdi": "never"}}, {"allowed_devices": ["7"]}], ids=str
)
def test_policy_applies_to_a_claimed_pod(
    podman: Podman, image: str, device: tuple[str, str], policy: Policy, rules: object
) -> None:
    policy(**rules)  # type: ignore[arg-type]
    if (podman.way, rules) == ("hook", {"allowed_devices": ["7"]}):  # the hook neither removes nor checks devices
        return
    said = refusal(podman, Want(SLEEP), *device, image=image)
    assert any(key in said for key in ("require_limits", "policy.accept.cdi", "allowed_devices")), said
    assert podman.node.leases() == []


def test_privileged_container_of_a_claimed_pod_needs_a_policy_entry(
    podman: Podman, kind: str, image: str, gpus_in_dev: Path, policy: Policy
) -> None:
    """The entry of a pod's container, whose name the image claims, does not count."""
    policy(privileged_containers=["ml/*"])
    remedy = "would make this a container of a pod"
    if podman.way == "hook":  # it leaves such a container without a request unchanged
        said = refusal(podman, Want(SLEEP, TWO_GIB), "--privileged", image=image)
        assert (remedy if kind == "container" else "privileged") in said
    elif kind == "container":
        assert remedy in refusal(podman, Want(SLEEP), "--privileged", image=image)
    else:
        made = Want(("sh", "-c", "ls /dev; mknod /tmp/gpu c 195 0; : </tmp/gpu"))
        done = podman.run(made, 60, "--privileged", image=image)
        assert "nvidia" not in done.out and "Operation not permitted" in done.err
