"""Containers that claim, by annotations of a CRI, to be a pod's sandbox or container. Podman before version 5 copies
such annotations from images; from version 5 on, the user's own --annotation makes the same claim."""

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
def claim(kind: str) -> tuple[str, ...]:
    return tuple(word for text in CLAIMS[kind] for word in ("--annotation", text))


@pytest.fixture
def image(claim: tuple[str, ...], build: Build) -> str:
    return build("", *claim)


@pytest.fixture
def again(podman: Podman, claim: tuple[str, ...]) -> tuple[str, ...]:
    """The claim as options of `podman run`, where podman does not copy the image's."""
    return () if podman.copies_image_annotations else claim


@pytest.fixture
def device(podman: Podman, etc_cdi: Path) -> tuple[str, str]:
    """A GPU as NVIDIA's CDI file describes it."""
    root = podman.node.driver_root
    described = with_simulated_nodes(nvidia_cdi(root), root)
    described["devices"] = described["devices"][:1]
    (etc_cdi / "nvidia.json").write_text(json.dumps(described))
    return ("--device", "nvidia.com/gpu=0")


def test_user_s_limit_holds(podman: Podman, image: str, again: tuple[str, ...]) -> None:
    assert podman.run(Want(env=TWO_GIB), 60, *again, image=image).answer()["total_bytes"] == 2 * GIB


def test_injected_device_has_the_user_s_limit(
    podman: Podman, image: str, device: tuple[str, str], again: tuple[str, ...]
) -> None:
    """Also a limit in an annotation: the claimed container name must not assign it to another container."""
    words = (*device, *again)
    if podman.way == "hook":
        assert "/usr/bin/nvidia-cdi-hook" in refusal(podman, Want(SLEEP, TWO_GIB), *words, image=image)
        return
    with podman.start(Want(SLEEP, TWO_GIB), *words, image=image) as one:
        assert one.exec(PROBE).answer()["total_bytes"] == 2 * GIB
    said = refusal(podman, Want(SLEEP, annotations={"gpushare.io/memory": "1Gi"}), *words, image=image)
    assert "would make this a container of a pod" in said and "leave the annotation out" in said


@pytest.mark.parametrize(
    "rules", [{"require_limits": True}, {"accept": {"cdi": "never"}}, {"allowed_devices": ["7"]}], ids=str
)
def test_policy_applies_to_a_claimed_pod(
    podman: Podman, image: str, device: tuple[str, str], again: tuple[str, ...], policy: Policy, rules: object
) -> None:
    policy(**rules)  # type: ignore[arg-type]
    if (podman.way, rules) == ("hook", {"allowed_devices": ["7"]}):  # the hook neither removes nor checks devices
        return
    said = refusal(podman, Want(SLEEP), *device, *again, image=image)
    assert any(key in said for key in ("require_limits", "policy.accept.cdi", "allowed_devices")), said
    assert podman.node.leases() == []


def test_privileged_container_of_a_claimed_pod_needs_a_policy_entry(
    podman: Podman, kind: str, image: str, again: tuple[str, ...], gpus_in_dev: Path, policy: Policy
) -> None:
    """The entry of a pod's container, whose name is claimed, does not count."""
    policy(privileged_containers=["ml/*"])
    remedy = "would make this a container of a pod"
    if podman.way == "hook":  # it leaves such a container without a request unchanged
        said = refusal(podman, Want(SLEEP, TWO_GIB), "--privileged", *again, image=image)
        assert (remedy if kind == "container" else "privileged") in said
    elif kind == "container":
        assert remedy in refusal(podman, Want(SLEEP), "--privileged", *again, image=image)
    else:
        made = Want(("sh", "-c", "ls /dev; mknod /tmp/gpu c 195 0; : </tmp/gpu"))
        done = podman.run(made, 60, "--privileged", *again, image=image)
        assert "nvidia" not in done.out and "Operation not permitted" in done.err
