"""Variables that raise a request beyond its limit: an image can set them beside the user's limit."""

from __future__ import annotations

from typing import Any

import pytest
from gpushare.config import profiles
from gpushare.core.errors import RequestError
from gpushare.core.model import Request
from gpushare.request import request

from tests.unit.pure import UUIDS, bundle, device, node

LIMITS = ("GPUSHARE_MEMORY=1Gi", "GPUSHARE_COMPUTE=30")
WIDENING = (
    "GPUSHARE_COMPUTE_MODE=soft", "GPUSHARE_PRIORITY=high", "GPUSHARE_OVERSUBSCRIBE=1", "NVIDIA_NVSWITCH=enabled",
    "NVIDIA_MOFED=enabled", "NVIDIA_GDRCOPY=enabled", "NVIDIA_GDS=enabled", "NVIDIA_IMEX_CHANNELS=0",
)  # fmt: skip


def asked(*env: str, widening: str = "never", **more: Any) -> Request:
    found = request.resolve(bundle(*LIMITS, *env, **more), node(accept_widening=widening))
    assert found is not None
    return found


def gives(found: Request) -> tuple[Any, ...]:
    return (
        found.memory, found.compute, found.compute_mode, found.priority, found.oversubscribe, found.features,
        found.imex_channels,
    )  # fmt: skip


@pytest.mark.parametrize("word", WIDENING)
def test_widening_variable_is_ignored_and_reported_by_policy(word: str) -> None:
    found = asked(word)
    assert gives(found) == gives(asked())
    assert any(line.startswith(word.partition("=")[0]) and "policy.accept.widening" in line for line in found.ignored)
    assert gives(asked(word, widening="always")) != gives(asked())


def test_widening_variable_of_privileged_container_can_be_accepted() -> None:
    admin = {"process": {"capabilities": {"bounding": ["CAP_SYS_ADMIN"]}}}
    assert asked(WIDENING[0], widening="privileged", **admin).compute_mode == "soft"
    assert asked(WIDENING[0], widening="privileged").compute_mode == "hard"


def test_widening_annotation_counts() -> None:
    found = asked(annotations={"gpushare.io/compute-mode": "soft"})
    assert (found.compute_mode, found.ignored) == ("soft", ())


def test_parameters_of_a_claim_count() -> None:
    """Only root can give a container the variable of a claim (programs/system_variables.py)."""
    claim = f"GPUSHARE_CLAIM_0_0={UUIDS[0]};memory=1Gi;compute=30;compute-mode=soft"
    rules = node(accept_widening="never")
    found = request.resolve(bundle(claim, "GPUSHARE_PRIORITY=high"), rules)
    assert found is not None and (found.compute_mode, found.priority) == ("soft", 0)
    found = request.resolve(bundle(f"{claim};priority=high"), rules)
    assert found is not None and (found.priority, found.ignored) == (1, ())


def test_priority_variable_of_other_scheduler_is_ignored() -> None:
    assert asked("CUDA_TASK_PRIORITY=0", widening="always").priority == 1
    found = asked("CUDA_TASK_PRIORITY=0")
    assert found.priority == 0 and any("policy.accept.widening" in line for line in found.ignored)


def test_variable_beside_annotation_of_other_scheduler_is_ignored() -> None:
    env, fraction = ("NVIDIA_VISIBLE_DEVICES=0", "CUDA_TASK_PRIORITY=0"), {"gpu-fraction": "0.5"}
    found = request.resolve(bundle(*env, annotations=fraction), node(accept_widening="never"))
    assert found is not None and found.memory[0][1].limit_bytes == 8 << 30
    assert found.priority == 0 and any("policy.accept.widening" in line for line in found.ignored)


def test_cluster_profile_accepts_no_widening() -> None:
    assert profiles.CLUSTER["policy.accept.widening"] == "never"
    assert "policy.accept.widening" not in profiles.WORKSTATION


# Another scheduler's limits, which a variable of the image would replace

THEIRS = ("CUDA_DEVICE_MEMORY_LIMIT=1g", "CUDA_DEVICE_SM_LIMIT=30")


def limited(*env: str, widening: str = "never", **more: Any) -> tuple[int | None, int, str]:
    """(bytes, percent, ignored) of device 0, limited by the other scheduler."""
    found = request.resolve(bundle("NVIDIA_VISIBLE_DEVICES=0", *env, **more), node(accept_widening=widening))
    assert found is not None
    ((_, memory),), ((_, compute),) = found.memory, found.compute
    return memory.limit_bytes, compute, "; ".join(found.ignored)


@pytest.mark.parametrize("word", ["GPUSHARE_MEMORY=8Gi", "GPUSHARE_MEMORY=0=8Gi", "GPUSHARE_MEMORY=50%"])
def test_memory_above_other_schedulers_limit_is_ignored(word: str) -> None:
    size, percent, ignored = limited(*THEIRS, word)
    assert (size, percent) == (1 << 30, 30) and "GPUSHARE_MEMORY=" in ignored and "policy.accept.widening" in ignored
    assert limited(*THEIRS, word, widening="always")[0] != 1 << 30


@pytest.mark.parametrize(
    "env",
    [
        ("CUDA_DEVICE_MEMORY_LIMIT=1g", "NVIDIA_VISIBLE_DEVICES=none"),
        ("CUDA_DEVICE_MEMORY_LIMIT=1g", "CUDA_DISABLE_CONTROL=true"),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1G",),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1G", "NVIDIA_VISIBLE_DEVICES=0"),
    ],
    ids=lambda env: env[-1],
)
def test_memory_above_a_limit_that_alone_requests_no_device_is_ignored(env: tuple[str, ...]) -> None:
    rules = node(accept_widening="never", nvidia_visible_devices="with_limit")
    found = request.resolve(bundle(*env, "GPUSHARE_MEMORY=8Gi"), rules)
    assert found is not None and found.memory[0][1].limit_bytes == 1 << 30
    assert any("GPUSHARE_MEMORY=" in line and "policy.accept.widening" in line for line in found.ignored)


@pytest.mark.parametrize(
    "theirs",
    [
        ("CUDA_DEVICE_MEMORY_LIMIT_0=1g", "CUDA_DEVICE_MEMORY_LIMIT_1=16g"),
        ("CUDA_MEM_LIMIT_0=1g", "CUDA_MEM_LIMIT_1="),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1G",),
        ("CUDA_DEVICE_SM_LIMIT_0=10", "CUDA_DEVICE_SM_LIMIT_1=0"),
        ("NVIDIA_GPU_MEMORY_REQUEST=1024", "NVIDIA_GPU_MEMORY_LIMIT=8192"),
    ],
    ids=lambda theirs: theirs[0],
)
def test_smaller_limit_on_one_device_does_not_raise_own_limit_on_another(theirs: tuple[str, ...]) -> None:
    """Ignored as a whole, the user's variable would leave the image's limit of the other device, or none."""
    env = ("NVIDIA_VISIBLE_DEVICES=0,1", "GPUSHARE_MEMORY=4Gi", "GPUSHARE_COMPUTE=30", *theirs)
    with pytest.raises(RequestError, match="on some devices more than another scheduler's limit, and on some less"):
        request.resolve(bundle(*env), node(accept_widening="never"))
    found = request.resolve(bundle(*env), node())
    assert found is not None and (found.memory[0][1].limit_bytes, found.compute) == (4 << 30, ((None, 30),))


@pytest.mark.parametrize(("name", "bytes_"), [("0", 1 << 30), ("any", None)])
def test_own_part_is_compared_on_the_devices_of_the_container(name: str, bytes_: int | None) -> None:
    host = node(accept_widening="never")
    devices = (device(0), device(1, memory_bytes=1 << 30))
    host = host._replace(inventory=host.inventory._replace(devices=devices))
    one = bundle(f"GPUSHARE_DEVICES={name}", "CUDA_DEVICE_MEMORY_LIMIT=1g", "GPUSHARE_MEMORY=50%")
    if bytes_ is None:
        with pytest.raises(RequestError, match="on some devices more"):
            request.resolve(one, host)
        return
    found = request.resolve(one, host)
    assert found is not None and found.memory[0][1].limit_bytes == bytes_


def test_compute_above_other_schedulers_limit_is_ignored() -> None:
    size, percent, ignored = limited(*THEIRS, "GPUSHARE_COMPUTE=80", "GPUSHARE_MEMORY=512Mi")
    assert (size, percent) == (512 << 20, 30)
    assert "GPUSHARE_COMPUTE=" in ignored and 'GPUSHARE_MEMORY="512Mi": policy' not in ignored


@pytest.mark.parametrize("word", ["GPUSHARE_MEMORY=512Mi", "GPUSHARE_MEMORY=1Gi", "GPUSHARE_DEVICES=0"])
def test_amount_within_other_schedulers_limit_counts(word: str) -> None:
    size, percent, ignored = limited(*THEIRS, word)
    assert size == (512 << 20 if "512" in word else 1 << 30) and percent == 30
    assert "policy.accept.widening" not in ignored


def test_amount_above_annotation_is_ignored() -> None:
    assert limited("GPUSHARE_MEMORY=8Gi", "GPUSHARE_COMPUTE=30", annotations={"gpu-memory": "1024"})[0] == 1 << 30


def test_own_annotation_above_other_limit_counts() -> None:
    assert limited(*THEIRS, annotations={"gpushare.io/memory": "8Gi"})[0] == 8 << 30


def test_contradicting_third_variable_is_refused() -> None:
    with pytest.raises(RequestError, match="set different limits"):
        limited(*THEIRS, "GPU_PORTION=0.5", "GPUSHARE_MEMORY=8Gi")


def test_unaccepted_annotation_beside_own_variable_is_no_error() -> None:
    rules = node(accept_widening="never", accept_annotations="never")
    found = request.resolve(bundle("GPUSHARE_MEMORY=8Gi", annotations={"gpu-memory": "1024"}), rules)
    assert found is not None and found.memory[0][1].limit_bytes == 8 << 30
