"""Images that request more beside their user's limit: the container's result under each policy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gpushare.config import profiles
from gpushare.state import shm_abi

from tests.integration import test_podman
from tests.integration.podman_host import GIB
from tests.support import driverhost
from tests.support.engines.base import SLEEP, Want
from tests.support.engines.image import PROBE
from tests.support.engines.podman import Podman, PodmanContainer

build = test_podman.build
Build = Callable[..., str]

LIMITS = {"GPUSHARE_MEMORY": "2Gi", "GPUSHARE_COMPUTE": "30"}
WORDS = {
    "GPUSHARE_COMPUTE_MODE": "soft", "GPUSHARE_PRIORITY": "high", "GPUSHARE_OVERSUBSCRIBE": "1",
    "NVIDIA_NVSWITCH": "enabled", "NVIDIA_MOFED": "enabled", "NVIDIA_GDRCOPY": "enabled", "NVIDIA_GDS": "enabled",
    "NVIDIA_IMEX_CHANNELS": "0",
}  # fmt: skip
NODES = {"nvidia-nvswitchctl", "infiniband/uverbs0", "gdrdrv", "nvidia-fs0", "nvidia-caps-imex-channels/channel0"}
PRIVILEGED = ("--cap-add", "SYS_ADMIN")
ACCEPT = [("always", False, True), ("privileged", False, False), ("privileged", True, True), ("never", True, False)]


class Has(NamedTuple):
    """A container's abilities beyond its limits of memory and compute."""

    is_soft: bool
    priority: int
    is_oversubscribed: bool
    nodes: frozenset[str]


LIMITS_ALONE = Has(False, 0, False, frozenset())
EVERYTHING = Has(True, 1, True, frozenset(NODES))


@pytest.fixture
def configure(podman: Podman) -> Iterator[Callable[[dict[str, Any]], None]]:
    """configure(keys of `policy`) on a host that supports the requests, until the end of the test."""
    driverhost.add_features(podman.node.driver_root)
    before = podman.node.config.read_text()

    def change(policy: dict[str, Any]) -> None:
        keys = {"policy": policy, "oversubscription": {"host_memory": "24Gi"}}
        podman.node.config.write_text(json.dumps({**json.loads(before), **keys}))

    yield change
    podman.node.config.write_text(before)


@pytest.fixture
def image(build: Build) -> str:
    return build("\n".join(f"ENV {name}={value}" for name, value in WORDS.items()))


def bundle(podman: Podman, one: PodmanContainer) -> Path:
    """The directory of the container's config.json."""
    return Path(podman.inspect(one.name)["OCIConfigPath"]).parent


def has(podman: Podman, one: PodmanContainer) -> Has:
    """From the limits file that the shim reads, and the container's nodes. Asserts that the limit itself is the
    user's."""
    limits = shm_abi.read_limits((podman.node.state / "containers" / one.id / "share" / "limits").read_bytes())
    device = limits.devices[0]
    assert (device.memory_limit_bytes, device.compute_percent) == (2 * GIB, 30)
    seen = one.exec("sh", "-c", f"cd /dev && for name in {' '.join(NODES)}; do [ ! -e $name ] || echo $name; done")
    nodes = frozenset(seen.out.split())
    soft = bool(device.flags & shm_abi.DEVICE_COMPUTE_SOFT)
    beyond = bool(device.flags & shm_abi.DEVICE_OVERSUBSCRIBE)
    return Has(soft, device.priority, beyond, nodes)


def require_reported(podman: Podman, one: PodmanContainer, ignored: bool) -> None:
    """Assert that `gpushare explain` names exactly the ignored requests."""
    lines = podman.node.cli("explain", str(bundle(podman, one))).stdout.splitlines()
    said = [line for line in lines if line.startswith("ignored") and "policy.accept.widening" in line]
    assert [name for name in WORDS if not any(f" {name}=" in line for line in said)] == ([] if ignored else list(WORDS))


@pytest.mark.parametrize(("accept", "privileged", "counts"), ACCEPT)
def test_image_s_options_are_added_only_where_policy_accepts_them(
    podman: Podman, image: str, configure: Callable[..., None], accept: str, privileged: bool, counts: bool
) -> None:
    configure({"accept": {"widening": accept}})
    with podman.start(Want(SLEEP, LIMITS), *(PRIVILEGED if privileged else ()), image=image) as one:
        assert has(podman, one) == (EVERYTHING if counts else LIMITS_ALONE)
        require_reported(podman, one, ignored=not counts)


def test_image_s_options_are_ignored_in_a_cluster(podman: Podman, image: str, configure: Callable[..., None]) -> None:
    policy: dict[str, Any] = {}
    for key, value in profiles.CLUSTER.items():
        *parents, last = key.split(".")[1:]
        place = policy
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = value
    configure(policy)
    with podman.start(Want(SLEEP, LIMITS), image=image) as one:
        assert has(podman, one) == LIMITS_ALONE
        assert one.exec(PROBE).answer()["total_bytes"] == 2 * GIB
        require_reported(podman, one, ignored=True)


def test_image_replaces_a_scheduler_s_limit_only_where_policy_accepts_it(
    podman: Podman, build: Build, configure: Callable[..., None]
) -> None:
    image = build("ENV GPUSHARE_MEMORY=8Gi")
    theirs = {"NVIDIA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_MEMORY_LIMIT": "1g"}
    for accept, size in (("always", 8), ("never", 1)):
        configure({"accept": {"widening": accept}})
        with podman.start(Want(SLEEP, theirs), image=image) as one:
            assert one.exec(PROBE).answer()["total_bytes"] == size * GIB
            said = podman.node.cli("explain", str(bundle(podman, one))).stdout
            assert ("more than another scheduler's limit" in said) == (accept == "never")
