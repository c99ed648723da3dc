"""A memory limit above its request: the Request has both, and only the request is granted while no memory is lent."""

from __future__ import annotations

from typing import Any

import pytest
from gpushare.allocation import placement
from gpushare.core.errors import PolicyError, RequestError
from gpushare.core.model import Request
from gpushare.request import lending, request
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.pure import UUIDS, bundle, ledger, node

GIB = 1 << 30
DEVICE = "GPUSHARE_DEVICES=0"


def resolved(*env: str, rules: Any = None, **spec: Any) -> Request:
    found = request.resolve(bundle(*env, **spec), node(**(rules or {})))
    assert found is not None
    return found


def granted(*env: str, rules: Any = None, **spec: Any) -> list[Any]:
    host = node(**(rules or {}))
    return [s.memory_limit_bytes for s in placement.grant(resolved(*env, rules=rules, **spec), host, ledger())]


@pytest.mark.parametrize(
    ("env", "annotations", "sizes"),
    [
        ((DEVICE, "GPUSHARE_MEMORY=4Gi..12Gi"), {}, [4 * GIB]),
        ((DEVICE, "GPUSHARE_MEMORY=25%..50%"), {}, [4 * GIB]),
        (("GPUSHARE_DEVICES=0,1", "GPUSHARE_MEMORY=0=4Gi..8Gi,1=2Gi"), {}, [4 * GIB, 2 * GIB]),
        ((DEVICE,), {"gpushare.io/memory-request": "4Gi", "gpushare.io/memory-limit": "12Gi"}, [4 * GIB]),
        ((), {"gpushare.io/memory-limit": "12Gi"}, [12 * GIB]),
        ((), {"gpushare.io/memory-request": "4Gi"}, [4 * GIB]),
    ],
)
def test_request_is_granted_as_limit(env: Any, annotations: Any, sizes: list[int]) -> None:
    assert granted(*env, annotations=annotations) == sizes


@given(st.integers(1, 16), st.integers(0, 64))
def test_no_limit_raises_the_grant(request_gib: int, more_gib: int) -> None:
    assert granted(DEVICE, f"GPUSHARE_MEMORY={request_gib}Gi..{request_gib + more_gib}Gi") == [request_gib * GIB]


def test_note_has_the_limit_that_is_not_granted() -> None:
    found = resolved("GPUSHARE_DEVICES=0,1", "GPUSHARE_MEMORY=0=4Gi..8Gi,1=2Gi")
    line = "memory 4Gi..8Gi: this version lends no memory, so the limit is the request (4Gi, not 8Gi)"
    assert found.ignored == lending.notes(found) == (line,)
    assert lending.notes(resolved(DEVICE, "GPUSHARE_MEMORY=4Gi")) == ()


def test_scheduler_limit_stays_below_memory_annotations() -> None:
    """The annotations override it, as gpushare.io/memory does."""
    for key in ("gpushare.io/memory-limit", "gpushare.io/memory"):
        found = resolved(DEVICE, "CUDA_DEVICE_MEMORY_LIMIT=1g", annotations={key: "2Gi"})
        assert found.memory[0][1].limit_bytes == 2 * GIB
        assert found.ignored == (f'CUDA_DEVICE_MEMORY_LIMIT="1g": {key} overrides it',)


def test_variable_with_larger_limit_widens() -> None:
    words = (DEVICE, "GPUSHARE_MEMORY=1Gi..4Gi", "CUDA_DEVICE_MEMORY_LIMIT=2g")
    assert granted(*words, rules={"accept_widening": "never"}) == [2 * GIB]
    assert granted(*words, rules={"accept_widening": "always"}) == [1 * GIB]


def test_policy_compares_the_request() -> None:
    assert granted(DEVICE, "GPUSHARE_MEMORY=4Gi..12Gi", rules={"max_memory": "4Gi"}) == [4 * GIB]
    with pytest.raises(PolicyError, match=r"5Gi\.\.12Gi of device 0 is 5 GiB, more than policy.max_memory"):
        granted(DEVICE, "GPUSHARE_MEMORY=5Gi..12Gi", rules={"max_memory": "4Gi"})


def test_unaccepted_annotation_is_refused() -> None:
    for rules in ({"accept_annotations": "never"}, {"annotations": "scoped"}):
        with pytest.raises(PolicyError, match="gpushare.io/memory-limit"):
            granted(DEVICE, annotations={"gpushare.io/memory-limit": "4Gi"}, rules=rules)


def test_unattributed_annotation_is_refused() -> None:
    with pytest.raises(RequestError, match="train.gpushare.io/memory-limit.*does not name this container"):
        granted(DEVICE, annotations={"train.gpushare.io/memory-limit": "4Gi"})


@pytest.mark.parametrize(
    ("allocated", "env", "annotations"),
    [
        (f"MEMORY={UUIDS[0]}=4096Mi", ("GPUSHARE_MEMORY=4Gi..12Gi",), {}),
        (f"MEMORY={UUIDS[0]}=4096Mi", (), {"gpushare.io/memory-limit": "12Gi"}),
        (f"GPU={UUIDS[0]}", (), {"gpushare.io/memory-request": "4Gi"}),
    ],
)
def test_kubelet_allocation_contradicts_other_amounts(allocated: str, env: Any, annotations: Any) -> None:
    with pytest.raises(RequestError, match="contradict|kubelet gave an equal share"):
        granted(f"GPUSHARE_ALLOCATED_{allocated}", *env, annotations=annotations)


def test_kubelet_allocation_accepts_the_same_amount() -> None:
    annotations = {"gpushare.io/memory-request": "4Gi", "gpushare.io/memory-limit": "4Gi"}
    assert granted(f"GPUSHARE_ALLOCATED_MEMORY={UUIDS[0]}=4096Mi", annotations=annotations) == [4 * GIB]
