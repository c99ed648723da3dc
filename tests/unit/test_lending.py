"""A memory limit above its request: what is granted of it, and why not more."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from gpushare.allocation import limit_request, placement
from gpushare.core.errors import CapacityError, PolicyError, RequestError
from gpushare.core.model import Lease, Node, Request, Share
from gpushare.inject import plan
from gpushare.request import lending, request
from gpushare.state import agentlock, leasefile, shm_abi
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.pure import UUIDS, bundle, lease, ledger, node, share

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
    line = "memory 4 GiB..8 GiB: policy.lending is off, so the limit is the request (4 GiB, not 8 GiB)"
    assert found.ignored == lending.notes(found, node().config) == (line,)
    assert lending.notes(resolved(DEVICE, "GPUSHARE_MEMORY=4Gi"), node().config) == ()


# Limits that policy grants


def shares_of(*env: str, host: Any, others: tuple[Lease, ...] = ()) -> tuple[Any, tuple[Share, ...]]:
    found = request.resolve(bundle(DEVICE, *env), host)
    assert found is not None
    return found, placement.grant(found, host, placement.ledger_of(others, host.config.policy))


def lending_node(way: str, host_memory: str = "64Gi", **rules: Any) -> Node:
    host = node(lending=way, **rules)
    inventory = host.inventory._replace(host_memory_bytes=256 * GIB)
    return Node(host.config._replace(host_memory=host_memory), inventory)


def of_generation(arch: str) -> Node:
    host = lending_node("movable")
    devices = tuple(device._replace(arch=arch) for device in host.inventory.devices)
    return host._replace(inventory=host.inventory._replace(devices=devices))


def test_gpu_of_a_newer_or_unknown_generation_lends_movable_memory() -> None:
    for arch in ("6.0", "12.1", ""):
        _, (share,) = shares_of("GPUSHARE_MEMORY=4Gi..12Gi", host=of_generation(arch))
        assert share.lending == "movable", arch


@pytest.mark.parametrize("text", ["4Gi..12Gi", "25%..75%"])
def test_movable_memory_is_lent_and_the_request_is_counted(text: str) -> None:
    host = lending_node("movable")
    asked, (share,) = shares_of(f"GPUSHARE_MEMORY={text}", host=host)
    assert (share.memory_limit_bytes, share.virtual_bytes, share.lending) == (4 * GIB, 12 * GIB, "movable")
    assert (share.ceiling_bytes, share.oversubscribe) == (12 * GIB, False)
    assert plan.lending_notes(asked, (share,), host.config) == asked.ignored == ()
    books = ledger(lease(share))
    assert (books.used[UUIDS[0]], books.host_bytes) == (4 * GIB, 12 * GIB)


def test_requests_and_not_limits_fill_a_device() -> None:
    """Four containers of 4..12 GiB fit on 16 GiB, a fifth does not."""
    host, others = lending_node("movable"), ()
    for number in range(4):
        _, shares = shares_of("GPUSHARE_MEMORY=4Gi..12Gi", host=host, others=others)
        others = (*others, lease(*shares, container_id=f"c{number + 2}"))
    with pytest.raises(CapacityError, match=r"4 GiB\.\.12 GiB requested, 0 B free of 16 GiB"):
        shares_of("GPUSHARE_MEMORY=4Gi..12Gi", host=host, others=others)


@pytest.mark.parametrize(
    ("host", "env", "why"),
    [
        (lending_node("off"), (), "policy.lending is off"),
        (lending_node("movable", ""), (), "oversubscription.host_memory gives no memory to move to"),
        (lending_node("movable", "8Gi"), (), "oversubscription.host_memory has no room for the limit"),
        (lending_node("movable"), ("GPUSHARE_OVERSUBSCRIBE=true",), "the share is oversubscribed already"),
        (lending_node("movable", max_memory="4Gi"), (), "the device and policy.max_memory allow no more"),
        (lending_node("evict"), (), "gpushare agent does not run"),
        (of_generation("5.2"), (), "of compute capability 5.2, cannot move memory to the host"),
    ],
)
def test_limit_is_the_request_where_memory_cannot_be_taken_back(host: Node, env: Any, why: str) -> None:
    asked, (share,) = shares_of("GPUSHARE_MEMORY=4Gi..12Gi", *env, host=host)
    assert (share.memory_limit_bytes, share.lending) == (4 * GIB, "")
    (line,) = (*asked.ignored, *plan.lending_notes(asked, (share,), host.config))
    assert why in line and line.endswith("so the limit is the request (4 GiB, not 12 GiB)")


def test_limit_is_reduced_to_what_policy_and_device_allow() -> None:
    for host, most in ((lending_node("movable", max_memory="8Gi"), 8), (lending_node("movable"), 16)):
        asked, (share,) = shares_of("GPUSHARE_MEMORY=4Gi..32Gi", host=host)
        assert share.virtual_bytes == most * GIB
        (line,) = plan.lending_notes(asked, (share,), host.config)
        assert line == f"memory 4 GiB..32 GiB: the limit is {most} GiB, all that device and policy.max_memory allow"


def test_agent_that_runs_lets_memory_be_lent(state_dir: Path) -> None:
    state_dir.mkdir(exist_ok=True)
    host = lending_node("evict", "")
    host = host._replace(config=host.config._replace(state_dir=str(state_dir)))
    held = agentlock.take(str(state_dir))
    with pytest.raises(CapacityError, match="another gpushare agent runs"):
        agentlock.take(str(state_dir))
    _, (share,) = shares_of("GPUSHARE_MEMORY=4Gi..12Gi", host=host)
    assert (share.lending, share.virtual_bytes) == ("evict", 12 * GIB)
    assert ledger(lease(share)).host_bytes == 0
    os.close(held)
    assert not agentlock.is_held(str(state_dir))


def test_agent_starts_while_a_start_looks_for_it(state_dir: Path) -> None:
    """`is_held` holds the lock for a moment."""
    state_dir.mkdir(exist_ok=True)
    os.close(agentlock.take(str(state_dir)))
    with (state_dir / agentlock.FILE).open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        later = threading.Timer(0.05, fcntl.flock, (other, fcntl.LOCK_UN))
        later.start()
        os.close(agentlock.take(str(state_dir)))
        later.join()


def test_lent_share_survives_its_files() -> None:
    """lease.json and the limits file have request and limit."""
    for way in ("movable", "evict", ""):
        before = share(0, 0, 4 * GIB)._replace(lending=way, virtual_bytes=12 * GIB if way else 0)
        data = leasefile.to_json(lease(before))
        assert leasefile.from_json(data, "c1").shares[0].lending == way
        (limit,) = shm_abi.read_limits(shm_abi.pack_limits([before], 1)).devices
        assert (limit.memory_limit_bytes, limit.virtual_bytes, limit.lending) == (
            before.memory_limit_bytes,
            before.virtual_bytes,
            way,
        )
    with pytest.raises(ValueError, match="borrows memory by a way of another version"):
        leasefile.from_json(leasefile.to_json(lease(share(0, 0, GIB)._replace(lending="dmem"))), "c1")


def test_request_and_limit_change_together() -> None:
    host = lending_node("movable")
    before = share(0, 0, 4 * GIB)

    def after(text: str, now: Share = before, node: Node = host) -> Share:
        (new,) = limit_request.shares(lease(now), limit_request.parse(text), node, ())
        return new

    lent = after("4Gi..12Gi")
    assert (lent.memory_limit_bytes, lent.ceiling_bytes, lent.lending) == (4 * GIB, 12 * GIB, "movable")
    assert (after("6Gi..8Gi", lent).memory_limit_bytes, after("6Gi..8Gi", lent).ceiling_bytes) == (6 * GIB, 8 * GIB)
    assert (after("6Gi", lent).ceiling_bytes, after("6Gi", lent).lending) == (6 * GIB, "movable")
    (slower,) = limit_request.shares(lease(lent), limit_request.parse(compute="30"), host, ())
    assert slower == lent._replace(compute_percent=30)
    for text, match in (
        ("+1Gi", r"slot 0 has 4 GiB\.\.12 GiB"),
        ("unlimited", "slot 0 borrows up to 12 GiB"),
        ("8Gi..4Gi", "is below the memory request"),
    ):
        with pytest.raises(RequestError, match=match):
            after(text, lent)
    with pytest.raises(PolicyError, match=r"4 GiB\.\.12 GiB: policy.lending is off, so no memory is lent"):
        after("4Gi..12Gi", node=lending_node("off"))
    little = lending_node("movable", "8Gi")
    with pytest.raises(PolicyError, match="oversubscription.host_memory has 8 GiB free"):
        after("4Gi..12Gi", node=little)
    with pytest.raises(
        PolicyError, match="10 GiB: the container can borrow, and oversubscription.host_memory has 8 GiB"
    ):
        after("10Gi", lent._replace(virtual_bytes=6 * GIB), little)
    assert after("10Gi", lent, little).ceiling_bytes == 10 * GIB, "less than before is always allowed"


def test_slots_share_the_budget_of_host_memory() -> None:
    """A change of two slots cannot exceed it, although each of them fits."""
    host = lending_node("movable", "24Gi")
    both = tuple(share(slot, slot, 2 * GIB)._replace(lending="movable", virtual_bytes=8 * GIB) for slot in (0, 1))
    for text, fits in (("2Gi..12Gi", True), ("2Gi..14Gi", False)):
        try:
            found = limit_request.shares(lease(*both), limit_request.parse(text), host, ())
        except PolicyError:
            found = ()
        assert bool(found) is fits, text


@pytest.mark.parametrize(("budget", "lent"), [("16Gi", [8 * GIB, 8 * GIB]), ("15Gi", [8 * GIB, 0])])
def test_slots_of_a_start_share_the_budget_of_host_memory(budget: str, lent: list[int]) -> None:
    host = lending_node("movable", budget)
    found = request.resolve(bundle("GPUSHARE_DEVICES=0,1", "GPUSHARE_MEMORY=2Gi..8Gi"), host)
    assert found is not None
    shares = placement.grant(found, host, placement.ledger_of((), host.config.policy))
    assert [one.virtual_bytes for one in shares] == lent


_STEPS = st.lists(
    st.tuples(st.sampled_from(["start", "change", "end"]), st.integers(1, 10), st.integers(0, 16), st.integers(0, 5)),
    max_size=24,
)


@given(st.sampled_from(["movable", "evict"]), _STEPS)
@example("movable", [("start", 2, 8, 0), ("start", 2, 8, 1), ("start", 2, 2, 2), ("change", 10, 0, 2)])
def test_requests_and_borrowed_host_memory_fit_after_any_sequence(way: str, steps: Any) -> None:
    """Starts, live changes and ends in any order: refused ones change nothing, and no limit is below its request."""
    host, held = lending_node(way, "24Gi"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agentlock, "is_held", lambda *_: True)
        for what, request_gib, more_gib, number in steps:
            text, name = f"{request_gib}Gi..{request_gib + more_gib}Gi", f"c{number}"
            try:
                if what == "start" and name not in held:
                    _, shares = shares_of(f"GPUSHARE_MEMORY={text}", host=host, others=tuple(held.values()))
                    held[name] = lease(*shares, container_id=name)
                elif what == "change" and name in held:
                    wanted = limit_request.parse(text if more_gib else f"{request_gib}Gi")
                    after = limit_request.shares(held[name], wanted, host, held.values())
                    held[name] = held[name]._replace(shares=after)
                elif what == "end":
                    held.pop(name, None)
            except (CapacityError, PolicyError, RequestError):
                pass
            books = placement.ledger_of(tuple(held.values()), host.config.policy)
            found = [one.shares[0] for one in held.values()]
            requests = [one.memory_limit_bytes or 0 for one in found]
            assert books.used.get(UUIDS[0], 0) == sum(requests) <= 16 * GIB
            assert books.host_bytes <= (24 * GIB if way == "movable" else 0)
            assert all(request <= (one.ceiling_bytes or 0) <= 16 * GIB for request, one in zip(requests, found))


# Other schedulers and policy


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
    with pytest.raises(PolicyError, match=r"5 GiB\.\.12 GiB of device 0 is more than policy.max_memory"):
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
        (f"MEMORY={UUIDS[0]}=4096Mi", ("GPUSHARE_MEMORY=5Gi..12Gi",), {}),
        (f"MEMORY={UUIDS[0]}=4096Mi", ("GPUSHARE_MEMORY=4Gi..12Gi",), {"gpushare.io/memory": "4Gi..8Gi"}),
        (f"MEMORY={UUIDS[0]}=4096Mi", ("GPUSHARE_MEMORY=4Gi..12Gi",), {"gpushare.io/memory-limit": "8Gi"}),
        (f"MEMORY={UUIDS[0]}=4096Mi", (), {"gpushare.io/memory-request": "3Gi"}),
        (f"MEMORY={UUIDS[0]}=4096Mi", (), {"gpushare.io/memory-request": "3Gi", "gpushare.io/memory-limit": "12Gi"}),
        (f"GPU={UUIDS[0]}", (), {"gpushare.io/memory-request": "4Gi"}),
    ],
)
def test_kubelet_allocation_contradicts_other_amounts(allocated: str, env: Any, annotations: Any) -> None:
    with pytest.raises(RequestError, match="contradict|kubelet gave an equal share"):
        granted(f"GPUSHARE_ALLOCATED_{allocated}", *env, annotations=annotations)


@pytest.mark.parametrize(
    ("env", "annotations"),
    [
        (("GPUSHARE_MEMORY=4Gi..12Gi",), {}),
        (("GPUSHARE_MEMORY=4096Mi..12Gi",), {"gpushare.io/memory-limit": "12Gi"}),
        ((), {"gpushare.io/memory": "4Gi..12Gi"}),
        ((), {"gpushare.io/memory-limit": "12Gi"}),
        (("GPUSHARE_MEMORY=4Gi",), {"gpushare.io/memory-limit": "12Gi"}),
        ((), {"gpushare.io/memory-request": "4Gi", "gpushare.io/memory-limit": "12Gi"}),
    ],
)
@pytest.mark.parametrize("lending", ["off", "evict"])
def test_kubelet_allocation_is_the_request_below_a_limit(env: Any, annotations: Any, lending: str) -> None:
    """kubelet counts the request. Without lending the request is the limit too, as for every container."""
    allocated = f"GPUSHARE_ALLOCATED_MEMORY={UUIDS[0]}=4096Mi"
    for words in ((allocated, *env), (*env, allocated)):
        found = resolved(*words, annotations=annotations, rules={"lending": lending})
        ((slot, amount),) = found.memory
        assert (slot, amount.limit_bytes, amount.ceiling.limit_bytes) == (None, 4 * GIB, 12 * GIB)
        assert any("policy.lending is off" in line for line in found.ignored) == (lending == "off")
        assert granted(*words, annotations=annotations, rules={"lending": lending}) == [4 * GIB]


def test_limit_below_kubelet_allocation_is_refused() -> None:
    with pytest.raises(RequestError, match=r'memory limit "2Gi" is below the memory request "4096Mi"'):
        granted(f"GPUSHARE_ALLOCATED_MEMORY={UUIDS[0]}=4096Mi", annotations={"gpushare.io/memory-limit": "2Gi"})


def test_kubelet_allocation_accepts_the_same_amount() -> None:
    annotations = {"gpushare.io/memory-request": "4Gi", "gpushare.io/memory-limit": "4Gi"}
    assert granted(f"GPUSHARE_ALLOCATED_MEMORY={UUIDS[0]}=4096Mi", annotations=annotations) == [4 * GIB]
