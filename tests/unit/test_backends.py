"""Who holds which limit: the table, and what it refuses."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any, Optional

import pytest
from gpushare import backends, decision, dmem, leasefile, model, mps, names, placement, resize, rootless, why
from gpushare.errors import DeviceError, GpushareError, PolicyError, RequestError

from tests.unit.pure import device, lease

GIB = 1 << 30
ALL = ("shim", "mps", "dmem")
GPU, PART = device(0), device(0, uuid="MIG-00000000-0000-0000-0000-000000000001", parent=device(0).uuid, mig_index=0)


@pytest.fixture(autouse=True)
def able(monkeypatch: pytest.MonkeyPatch) -> dict[str, Optional[str]]:
    """A host on which everything can be had, unless a test says why not."""
    why_not: dict[str, Optional[str]] = {"mps": None, "dmem": None}
    monkeypatch.setattr(mps, "unsupported", lambda site: why_not["mps"])
    monkeypatch.setattr(dmem, "unsupported", lambda one, config: why_not["dmem"])
    monkeypatch.setattr(rootless, "is_rootless", lambda: False)
    return why_not


def asked(
    backend: str = "auto", memory: bool = True, compute: bool = True, name: str = "0", **more: Any
) -> model.Request:
    return model.Request(
        "own",
        model.Selection("list", names=(name,)),
        ("compute",),
        ((None, model.Amount(GIB, None, "1Gi")),) if memory else (),
        ((None, 30),) if compute else (),
        backend=backend,
        **more,
    )


def node(*allowed: str, mig: bool = False) -> model.Node:
    config = model.Config(policy=model.Policy(allowed_backends=allowed or ALL))
    return model.Node(config, model.Inventory("/", "535", (GPU, device(1)), mig=(PART,) if mig else ()))


def given(request: model.Request, host: model.Node, *held: model.Lease) -> model.Share:
    backends.require_allowed(request, host.config.policy)
    return placement.grant(request, host, placement.ledger_of(held, host.config.policy))[0]


def other(compute_backend: str) -> model.Lease:
    share = model.Share(0, GPU, GIB, 10, page=5, compute_backend=compute_backend)
    return lease(share, container_id="other")


def test_every_part_of_gpushare_knows_the_same_backends() -> None:
    assert tuple(backends.BACKENDS) == names.BACKENDS
    assert all(set(row.holds) <= set(backends.LIMITS) and row.holds for row in backends.BACKENDS.values())
    assert all(row.enforced_by and row.bypassed_by and row.changes_live for row in backends.BACKENDS.values())


def test_nobody_else_asks_which_backend_it_is() -> None:
    hook = Path(backends.__file__).parent
    pattern = re.compile(r"backend\w*\s*(==|!=|in)\s|(==|!=)\s*[\"'](shim|mps|dmem)[\"']")
    found = [
        f"{path.name}: {line}"
        for path in hook.rglob("*.py")
        if path.stem not in ("backends", *names.BACKENDS)
        for line in path.read_text().splitlines()
        if pattern.search(line) and not line.lstrip().startswith(("#", "for "))
    ]
    assert not found


@pytest.mark.parametrize(
    ("backend", "allowed", "holders"),
    [
        ("auto", ("shim",), ("shim", "shim")),
        ("auto", ("shim", "mps", "dmem"), ("shim", "shim")),
        ("auto", ("dmem", "shim"), ("dmem", "shim")),
        ("auto", ("mps", "shim"), ("shim", "mps")),
        ("auto", ("mps", "dmem"), ("dmem", "mps")),
        ("shim", ("mps", "dmem", "shim"), ("shim", "shim")),
        ("mps", ALL, ("shim", "mps")),
        ("dmem", ALL, ("dmem", "shim")),
        ("dmem,mps", ALL, ("dmem", "mps")),
    ],
)
def test_each_limit_has_a_holder_of_its_own(backend: str, allowed: tuple[str, ...], holders: tuple[str, str]) -> None:
    share = given(asked(backend), node(*allowed))
    assert (share.memory_backend, share.compute_backend) == holders
    assert share.memory_limit_bytes == GIB and share.compute_percent == 30


@pytest.mark.parametrize(
    ("request_", "host", "held", "why_not", "error", "text"),
    [
        (asked("mps", compute_mode="soft"), node(), (), {}, DeviceError, "mps cannot: its percentages are hard"),
        (asked("mps", priority=1), node(), (), {}, DeviceError, "no high priority"),
        (asked("mps", name="0:0"), node(mig=True), (), {}, DeviceError, "whole GPUs, not inside of MIG"),
        (asked("mps"), node(), (), {"mps": "down"}, DeviceError, "mps cannot: down; set GPUSHARE_BACKEND=shim"),
        (asked("mps", compute=False), node(), (), {"mps": "down"}, DeviceError, "mps cannot: down"),
        (asked("mps"), node(), (other("shim"),), {}, DeviceError, "containers without MPS are on the device"),
        (asked("shim"), node(), (other("mps"),), {}, DeviceError, "containers of MPS are on the device"),
        (asked("shim", compute=False), node(), (other("mps"),), {}, DeviceError, "containers of MPS are on"),
        (asked("dmem"), node(), (), {"dmem": "old kernel"}, DeviceError, "memory of device 0: dmem cannot: old"),
        (asked("dmem", name="0:0"), node(mig=True), (), {}, DeviceError, "no regions for MIG devices"),
        (asked("dmem", memory=False), node(), (), {}, RequestError, '"dmem" has no limit on memory .* GPUSHARE_MEMORY'),
        (asked("mps"), node("mps"), (), {}, PolicyError, r"limit on memory \(policy.allowed_backends: mps\); add shim"),
        (asked(), node("dmem"), (), {}, PolicyError, "nothing that is allowed .* on compute"),
        (asked(), node("mps", "dmem"), (), {"mps": "down"}, DeviceError, "compute .*: mps cannot: down; add shim to"),
    ],
)  # fmt: skip
def test_bad_combinations_are_refused_with_the_reason(
    request_: model.Request,
    host: model.Node,
    held: tuple[model.Lease, ...],
    why_not: dict[str, str],
    error: type[GpushareError],
    text: str,
    able: dict[str, Optional[str]],
) -> None:
    able.update(why_not)
    with pytest.raises(error, match=text):
        given(request_, host, *held)


@pytest.mark.parametrize("allowed", [("mps", "shim"), ("shim",), ("mps",)])
@pytest.mark.parametrize("why_not", ["serves 48 processes at most", "another user's"])
def test_a_container_without_a_limit_does_not_slow_down_clients_of_mps(
    allowed: tuple[str, ...], why_not: str, able: dict[str, Optional[str]]
) -> None:
    """Nobody has to hold a limit for it, and it still may not be there: its work and that of MPS's clients take turns,
    which no percentage of theirs knows of."""
    able["mps"] = why_not
    request = asked(memory="shim" in allowed, compute=False)
    policy = model.Policy(allowed_backends=allowed, unlimited="shared")
    host = node()._replace(config=model.Config(policy=policy))
    assert given(request, host).compute_backend == "shim"
    with pytest.raises(DeviceError, match="shim cannot: containers of MPS are on the device.*; use another device"):
        given(request, host, other("mps"))


@pytest.mark.parametrize(
    ("backend", "reason"), [("mps", "no memory beyond the device"), ("dmem", "managed memory is not counted")]
)
def test_equal_shares_of_more_than_there_is_are_oversubscribed_too(backend: str, reason: str) -> None:
    """Who never asked for it has memory beyond the device all the same."""
    rule, request = model.SharingRule(2, 1.5), asked(backend, memory=False, compute=False)
    host = node()._replace(config=node().config._replace(sharing=(rule,), host_memory="64Gi"))
    with pytest.raises(DeviceError, match=reason):
        given(request, host)
    kept = host._replace(config=host.config._replace(sharing=(rule._replace(memory_scaling=1.0),)))
    assert backend in (given(request, kept).memory_backend, given(request, kept).compute_backend)


def test_rootless_has_the_shim_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rootless, "is_rootless", lambda: True)
    for backend in ("mps", "dmem"):
        with pytest.raises(DeviceError, match="rootless"):
            given(asked(backend), node())
    share = given(asked(), node("dmem", "mps", "shim"))
    assert (share.memory_backend, share.compute_backend) == ("shim", "shim")


def test_any_takes_the_device_where_the_backend_is(monkeypatch: pytest.MonkeyPatch) -> None:
    there = device(1).uuid
    monkeypatch.setattr(mps, "unsupported", lambda site: None if site.device.uuid == there else "not running")
    request = asked("mps")._replace(selection=model.Selection("any", 1))
    assert given(request, node()).device.uuid == there


@pytest.mark.parametrize("down", [subset for n in range(3) for subset in itertools.combinations(("mps", "dmem"), n)])
@pytest.mark.parametrize("allowed", [p for n in (1, 2, 3) for p in itertools.permutations(ALL, n)])
@pytest.mark.parametrize("backend", ["auto", "shim", "mps", "dmem", "dmem,mps"])
def test_a_limit_is_held_or_the_start_is_refused(
    backend: str, allowed: tuple[str, ...], down: tuple[str, ...], able: dict[str, Optional[str]]
) -> None:
    """Whatever can be had and whatever is asked: a holder that can hold it, is there, and is allowed. And what is
    asked for by name is there, or nothing is."""
    able.update(dict.fromkeys(down, "down"))
    named = set() if backend == "auto" else set(backend.split(","))
    there = set(allowed) - set(down) if backend == "auto" else (named | {"shim"}) & set(allowed)
    covered = {limit for name in there for limit in backends.BACKENDS[name].holds} == set(backends.LIMITS)
    try:
        share = given(asked(backend), node(*allowed))
    except GpushareError:
        assert not (covered and named <= set(allowed) - set(down)), "refused, where all that it needs is there"
        return
    for limit, name in (("memory", share.memory_backend), ("compute", share.compute_backend)):
        assert limit in backends.BACKENDS[name].holds and name in allowed and name not in down
    assert named <= {share.memory_backend, share.compute_backend}


@pytest.mark.parametrize(
    ("backend", "allowed", "why_not", "text"),
    [
        (
            *("auto", ("shim",), {}),
            "memory by shim (auto, the only one allowed); compute by shim (auto, the only one allowed)",
        ),
        (
            "auto",
            ("mps", "dmem", "shim"),
            {"mps": "down", "dmem": "old"},
            "memory by shim (auto, the first allowed one that can, not dmem: old); "
            "compute by shim (auto, the first allowed one that can, not mps: down)",
        ),
        ("dmem", ALL, {}, "memory by dmem (asked); compute by shim (dmem does not hold compute)"),
    ],
)  # fmt: skip
def test_explain_says_who_and_why(
    backend: str, allowed: tuple[str, ...], why_not: dict[str, str], text: str, able: dict[str, Optional[str]]
) -> None:
    able.update(why_not)
    request, host = asked(backend), node(*allowed)
    ledger = placement.ledger_of((), host.config.policy)
    assert why.held(request, host, ledger, placement.grant(request, host, ledger)) == (text,)


def test_a_lease_keeps_the_holders_and_one_of_before_has_the_shim() -> None:
    share = given(asked("dmem,mps"), node())
    kept = leasefile.to_json(lease(share))
    assert leasefile.from_json(kept, "c1").shares == (share,)
    old = json.loads(kept)
    for name in ("memory_backend", "compute_backend"):
        del old["shares"][0][name]
    found = leasefile.from_json(json.dumps(old).encode(), "c1").shares[0]
    assert (found.memory_backend, found.compute_backend) == ("shim", "shim")
    for name in ("memory_backend", "compute_backend"):
        old["shares"][0][name] = "tea"
        with pytest.raises(ValueError, match="a backend of another version"):
            leasefile.from_json(json.dumps(old).encode(), "c1")
        old["shares"][0][name] = "shim"


def test_the_log_names_all_holders() -> None:
    assert " backend=dmem+mps" in decision.facts(lease(given(asked("dmem,mps"), node())))
    assert decision.facts(lease(given(asked(), node("shim")))).endswith(" backend=shim")


def test_a_change_that_the_holder_cannot_hold_is_refused() -> None:
    one = lease(given(asked("mps"), node()))._replace(state="held")
    with pytest.raises(RequestError, match="mps holds a limit of device 0: its percentages are hard"):
        resize.shares(one, resize.wish(mode="soft"), node(), (one,))
    with pytest.raises(RequestError, match="no high priority"):
        resize.shares(one, resize.wish(priority="high"), node(), (one,))
    assert resize.shares(one, resize.wish(compute="20%"), node(), (one,))[0].compute_percent == 20
