"""The variables of `gpushare dra`: the hook grants what the claim has, and refuses any other amount."""

from __future__ import annotations

import re

import pytest
from gpushare.core.errors import DeviceError, GpushareError, RequestError
from gpushare.core.model import Lease
from gpushare.request import policy, request

from tests.unit import pure

A, B = pure.UUIDS
GIB = 1 << 30
ONE = f"GPUSHARE_CLAIM_u_0={A};memory=4Gi;compute=30"


@pytest.mark.parametrize(
    ("env", "uuids", "memory", "compute"),
    [
        ((ONE,), (A,), {None: 4}, {None: 30}),
        ((ONE, "GPUSHARE_MEMORY=4096Mi", "GPUSHARE_COMPUTE=30%", "GPUSHARE_DEVICES=any"), (A,), {None: 4}, {None: 30}),
        ((f"GPUSHARE_CLAIM_v_0={B};memory=8Gi;compute=5", ONE), (A, B), {0: 4, 1: 8}, {0: 30, 1: 5}),
        ((ONE, f"GPUSHARE_CLAIM_u_1={A};memory=1Gi;compute=5"), (A,), {None: 5}, {None: 35}),
        ((ONE, "NVIDIA_VISIBLE_DEVICES=all"), (A,), {None: 4}, {None: 30}),
    ],
)
def test_claim_becomes_request(env: tuple[str, ...], uuids: object, memory: object, compute: object) -> None:
    found = request.resolve(pure.bundle(*env), pure.node())
    assert found is not None and found.selection.names == uuids
    assert {slot: (one.limit_bytes or 0) // GIB for slot, one in found.memory} == memory
    assert dict(found.compute) == compute


def test_limit_and_priority_of_claim_are_taken() -> None:
    text = f"GPUSHARE_CLAIM_u_0={A};memory=4Gi..12Gi;compute=30;compute-mode=soft;priority=high"
    found = request.resolve(pure.bundle(text), pure.node())
    assert found is not None and (found.compute_mode, found.priority) == ("soft", 1)
    ((_, amount),) = found.memory
    assert amount.ceiling is not None and (amount.limit_bytes, amount.ceiling.limit_bytes) == (4 * GIB, 12 * GIB)


@pytest.mark.parametrize(
    ("env", "line"),
    [
        ((ONE, "GPUSHARE_MEMORY=16Gi"), 'GPUSHARE_MEMORY="16Gi", and the claim has "4Gi": they contradict; leave out'),
        ((ONE, "GPUSHARE_MEMORY=4Gi..8Gi"), 'GPUSHARE_MEMORY="4Gi..8Gi", and the claim has "4Gi"'),
        ((ONE, "GPUSHARE_COMPUTE=50"), 'GPUSHARE_COMPUTE="50", and the claim has "30"'),
        ((f"GPUSHARE_CLAIM_u_0={A};memory=4Gi", "GPUSHARE_COMPUTE=50"), "the scheduler did not count it"),
        ((ONE, f"GPUSHARE_DEVICES={B}"), "they contradict; leave out GPUSHARE_DEVICES"),
        ((ONE, f"GPUSHARE_ALLOCATED_MEMORY={B}=16Gi"), "GPUSHARE_ALLOCATED_MEMORY beside a claim"),
        ((ONE, f"GPUSHARE_CLAIM_u_0={A};memory=9Gi"), "GPUSHARE_CLAIM_u_0 is given twice"),
        ((ONE, f"GPUSHARE_CLAIM_u_1={B};memory=1Gi;compute=1;priority=high"), "a container can have one"),
        ((ONE, f"GPUSHARE_CLAIM_u_1={A};memory=1Gi"), "GPUSHARE_CLAIM_u_1 requests no compute, and"),
        ((f"GPUSHARE_CLAIM_u_0={A}",), "not a value of gpushare dra"),
        ((f"GPUSHARE_CLAIM_u_0={A};memory=50%",), "not a value of gpushare dra"),
        ((f"GPUSHARE_CLAIM_u_0={A};memory=4Gi;more=1",), "not a value of gpushare dra"),
    ],
)
def test_other_amount_is_refused(env: tuple[str, ...], line: str) -> None:
    with pytest.raises(RequestError, match=re.escape(line)):
        request.resolve(pure.bundle(*env), pure.node())


@pytest.mark.parametrize("key", ["memory-request", "memory-limit"])
def test_end_of_a_range_in_an_annotation_is_refused(key: str) -> None:
    """The claim has both ends."""
    with pytest.raises(RequestError, match=f"gpushare.io/{key}=.*the scheduler did not count it"):
        request.resolve(pure.bundle(ONE, annotations={f"gpushare.io/{key}": "12Gi"}), pure.node())


def test_device_that_is_gone_is_refused() -> None:
    with pytest.raises(DeviceError, match='no device "GPU-x"'):
        request.resolve(pure.bundle("GPUSHARE_CLAIM_u_0=GPU-x;memory=4Gi"), pure.node())


def test_second_container_with_the_same_claim_is_refused() -> None:
    def lease(sandbox: str) -> Lease:
        return Lease("first", "held", "", "", (), 0, 0, sandbox=sandbox)

    container, node = pure.bundle(ONE), pure.node()
    found = request.resolve(container, node)
    assert found is not None and policy.pod_wide(found, container) == "GPUSHARE_CLAIM_u_0"
    policy.refuse_second(found, container, [lease(""), lease("GPUSHARE_CLAIM_u_1")])
    with pytest.raises(GpushareError, match="container first already has the share of this claim"):
        policy.refuse_second(found, container, [lease("GPUSHARE_CLAIM_v_0,GPUSHARE_CLAIM_u_0")])
