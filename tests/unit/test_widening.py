"""Variables that make more of a request than its limit: an image can set them beside the limit of a user."""

from __future__ import annotations

from typing import Any

import pytest
from gpushare import profiles, request
from gpushare.model import Request

from tests.unit.pure import bundle, node

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
def test_word_beside_a_limit_is_ignored_and_reported_where_policy_says_so(word: str) -> None:
    found = asked(word)
    assert gives(found) == gives(asked())
    assert any(line.startswith(word.partition("=")[0]) and "policy.accept.widening" in line for line in found.ignored)
    assert gives(asked(word, widening="always")) != gives(asked())


def test_privileged_container_may_be_listened_to() -> None:
    admin = {"process": {"capabilities": {"bounding": ["CAP_SYS_ADMIN"]}}}
    assert asked(WIDENING[0], widening="privileged", **admin).compute_mode == "soft"
    assert asked(WIDENING[0], widening="privileged").compute_mode == "hard"


def test_annotation_of_the_user_counts() -> None:
    found = asked(annotations={"gpushare.io/compute-mode": "soft"})
    assert (found.compute_mode, found.ignored) == ("soft", ())


def test_priority_in_another_schedulers_words_is_ignored() -> None:
    assert asked("CUDA_TASK_PRIORITY=0", widening="always").priority == 1
    found = asked("CUDA_TASK_PRIORITY=0")
    assert found.priority == 0 and any("policy.accept.widening" in line for line in found.ignored)


def test_cluster_profile_takes_none() -> None:
    assert profiles.CLUSTER["policy.accept.widening"] == "never"
    assert "policy.accept.widening" not in profiles.WORKSTATION
