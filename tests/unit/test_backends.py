"""The backends: which one enforces which limit, and which combinations are refused."""

from __future__ import annotations

import ast
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any, Optional

import pytest
from gpushare.allocation import backends, limit_request, placement
from gpushare.allocation.backends.dmem import regions as dmem
from gpushare.allocation.backends.mps import state as mps
from gpushare.core import constants, model
from gpushare.core.errors import DeviceError, GpushareError, PolicyError, RequestError
from gpushare.programs import why
from gpushare.request import policy
from gpushare.state import audit_log, leasefile
from gpushare.system import rootless

from tests.unit.pure import device, lease

GIB = 1 << 30
ALL = ("shim", "mps", "dmem")
GPU, PART = device(0), device(0, uuid="MIG-00000000-0000-0000-0000-000000000001", parent=device(0).uuid, mig_index=0)

UNSUPPORTED = mps.unsupported


@pytest.fixture(autouse=True)
def able(monkeypatch: pytest.MonkeyPatch) -> dict[str, Optional[str]]:
    """A host that supports every backend, unless a test sets a reason against one."""
    why_not: dict[str, Optional[str]] = {"mps": None, "dmem": None}
    monkeypatch.setattr(mps, "unsupported", lambda site: why_not["mps"])
    monkeypatch.setattr(dmem, "unsupported", lambda one, config: why_not["dmem"])
    monkeypatch.setattr(rootless, "is_rootless", lambda: False)
    return why_not


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch, able: dict[str, Optional[str]]) -> pytest.MonkeyPatch:
    """MPS runs, and `unsupported` computes whether it can serve a container."""
    state = mps.MpsState(driver_version="535", thread_percent=100, clients=48)
    monkeypatch.setattr(mps, "state", lambda uuid, state_dir: state)
    monkeypatch.setattr(mps, "unsupported", UNSUPPORTED)
    return monkeypatch


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
    policy.require_allowed_backends(request, host.config.policy)
    return placement.grant(request, host, placement.ledger_of(held, host.config.policy))[0]


def other(compute_backend: str) -> model.Lease:
    share = model.Share(0, GPU, GIB, 10, page=5, compute_backend=compute_backend)
    return lease(share, container_id="other")


def test_backend_tables_agree() -> None:
    assert tuple(backends.BACKENDS) == constants.BACKENDS
    assert all(set(row.enforces) <= set(backends.LIMITS) and row.enforces for row in backends.BACKENDS.values())
    rows = (*backends.BACKENDS.values(), backends.BEYOND)
    assert all(row.enforced_by and row.bypassed_by and row.changes_live and row.tested for row in rows)
    assert backends.BEYOND.name not in constants.BACKENDS and backends.BEYOND.enforces == (backends.VIRTUAL,)


# Modules that read or write a format with backend names, and decide nothing by them
FORMATS = {
    ("shm_abi.py", "HOLDERS.get(share.memory_backend, 0)"),
    ("leasefile.py", "{one.memory_backend, one.compute_backend} <= set(constants.BACKENDS)"),
}
KNOWN = re.compile(r"""(?<![\w.])(['"])(shim|mps|dmem)\1|\b(SHIM|MPS|DMEM|mps\.NAME|\w+_backend)\b(?!\()""")
# Python 3.9 has no `match`
CASE: tuple[type[ast.AST], ...] = (ast.MatchValue,) if sys.version_info >= (3, 10) else ()
LOOKUPS = ("get", "startswith", "endswith", "index", "count", "find", "__contains__")


def compared_nodes(node: ast.AST) -> list[ast.AST]:
    """The operands of an expression or case that are compared or looked up."""
    if isinstance(node, (ast.Compare, *CASE)):
        return [node]
    if isinstance(node, ast.Subscript):
        return [node.slice]
    method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOOKUPS
    return list(node.args) if method else []  # type: ignore[attr-defined]


def comparisons(text: str, file: str) -> set[tuple[str, str]]:
    """Where a source compares a backend name: `==`, `in`, `match`, a dictionary lookup and so on."""
    return {
        (file, ast.unparse(node))
        for node in ast.walk(ast.parse(text))
        if any(KNOWN.search(ast.unparse(part)) for part in compared_nodes(node))
    }


def test_no_other_module_compares_backend_names() -> None:
    package = Path(backends.__file__).parent
    files = [path for path in package.parents[1].rglob("*.py") if package not in path.parents]
    assert set().union(*(comparisons(path.read_text(), path.name) for path in files)) == FORMATS


@pytest.mark.parametrize(
    "code",
    [
        'if share.memory_backend == "dmem": pass',
        'x = "mps" != holder',
        'x = holder in ("shim", "mps")',
        "x = NAME in (share.compute_backend,)",
        "x = backends.MPS not in allowed",
        "x = mps.NAME in allowed",
        *(['match holder:\n case "mps": pass'] if CASE else []),
        "x = {1: 2}[share.compute_backend]",
        "x = TABLE.get(share.compute_backend)",
        'x = request.backend.startswith("mps")',
    ],
)
def test_comparison_of_backend_name_is_found(code: str) -> None:
    assert comparisons(code, "x.py")
    assert not comparisons('x = ["mps"]\ny = share._replace(memory_backend="shim")\nz = other.NAME == "a"', "x.py")


@pytest.mark.parametrize(
    ("backend", "allowed", "enforcers"),
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
def test_each_limit_gets_its_enforcer(backend: str, allowed: tuple[str, ...], enforcers: tuple[str, str]) -> None:
    share = given(asked(backend), node(*allowed))
    assert (share.memory_backend, share.compute_backend) == enforcers
    assert share.memory_limit_bytes == GIB and share.compute_percent == 30


@pytest.mark.parametrize(
    ("request_", "host", "held", "why_not", "error", "text"),
    [
        (asked("mps", compute_mode="soft"), node(), (), {}, DeviceError, "mps cannot: its percentages are hard"),
        (asked("mps", priority=1), node(), (), {}, DeviceError, "no high priority"),
        (asked("mps", name="0:0"), node(mig=True), (), {}, DeviceError, "whole GPUs, not for MIG"),
        (asked("mps"), node(), (), {"mps": "down"}, DeviceError, "mps cannot: down; set GPUSHARE_BACKEND=shim"),
        (asked("dmem"), node("dmem"), (), {"dmem": "old kernel"}, DeviceError, "old kernel; add shim to"),
        (asked("mps", compute=False), node(), (), {"mps": "down"}, DeviceError, "mps cannot: down"),
        (asked("mps"), node(), (other("shim"),), {}, DeviceError, "other containers on this device do not use MPS"),
        (asked("shim"), node(), (other("mps"),), {}, DeviceError, "containers that use MPS are on the device"),
        (asked("shim", compute=False), node(), (other("mps"),), {}, DeviceError, "containers that use MPS are on"),
        (asked("dmem"), node(), (), {"dmem": "old kernel"}, DeviceError, "memory of device 0: dmem cannot: old"),
        (asked("dmem", name="0:0"), node(mig=True), (), {}, DeviceError, "no regions for MIG devices"),
        (asked("dmem", memory=False), node(), (), {}, RequestError, '"dmem" was requested, but no limit on memory'),
        (asked("mps"), node("mps"), (), {}, PolicyError, r"limit on memory \(policy.allowed_backends: mps\); add shim"),
        (asked(), node("dmem"), (), {}, PolicyError, "no backend that this node allows .* on compute"),
        (asked(), node("mps", "dmem"), (), {"mps": "down"}, DeviceError, "compute .*: mps cannot: down; add shim to"),
    ],
)  # fmt: skip
def test_bad_combination_is_refused_with_reason(
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


# Properties of a container or host, the backend that each rules out, and its reason. Any other combination works.
OVER, SOFT, URGENT, MIG, SEVERAL, ROOTLESS = "oversubscribe", "soft", "high priority", "MIG", "several", "rootless"
FEATURES = (OVER, SOFT, URGENT, MIG, SEVERAL, ROOTLESS)
CANNOT = {
    ("mps", OVER): "mps cannot: it has no memory beyond the device's own",
    ("mps", SOFT): "mps cannot: its percentages are hard: it does not lend idle compute",
    ("mps", URGENT): "mps cannot: it has no high priority, only a low one",
    ("mps", MIG): "mps cannot: gpushare offers it for whole GPUs, not for MIG devices",
    ("mps", SEVERAL): "mps cannot: a program connects to the daemon of one GPU, and this container asks for several",
    ("mps", ROOTLESS): "mps cannot: the MPS daemon runs as root, and gpushare runs rootless here",
    ("dmem", OVER): "dmem cannot: managed memory is not counted there",
    ("dmem", MIG): "dmem cannot: the driver has no regions for MIG devices",
    ("dmem", ROOTLESS): "dmem cannot: it needs rights over cgroups, and this is rootless",
}
COMBINATIONS = [kit for n in range(len(FEATURES) + 1) for kit in itertools.combinations(FEATURES, n)]


@pytest.mark.parametrize("kit", COMBINATIONS, ids=lambda kit: "+".join(kit) or "plain")
def test_every_combination_is_granted_or_refused_with_reason(kit: tuple[str, ...], running: pytest.MonkeyPatch) -> None:
    running.setattr(rootless, "is_rootless", lambda: ROOTLESS in kit)
    host = node(mig=MIG in kit)
    host = host._replace(config=host.config._replace(host_memory="64Gi"))
    first = "0:0" if MIG in kit else "0"
    words: dict[str, Any] = {
        "oversubscribe": OVER in kit,
        "compute_mode": "soft" if SOFT in kit else "hard",
        "priority": int(URGENT in kit),
    }
    for backend in ("shim", "mps", "dmem", "dmem,mps", "auto"):
        request = asked(backend, **words)._replace(
            selection=model.Selection("list", names=(first, "1") if SEVERAL in kit else (first,))
        )
        cannot = {name: {CANNOT[name, word] for word in kit if (name, word) in CANNOT} for name in ("mps", "dmem")}
        expected = set().union(*(cannot[name] for name in backend.split(",") if name in cannot))
        if expected:
            with pytest.raises(DeviceError) as refused:
                given(request, host)
            assert refused.value.brief in expected and refused.value.hint == "set GPUSHARE_BACKEND=shim"
            continue
        shares = placement.grant(request, host, placement.ledger_of((), host.config.policy))
        assert len(shares) == 1 + (SEVERAL in kit)
        for share in shares:
            assert (share.soft, share.priority, share.virtual_bytes > 0) == (SOFT in kit, URGENT in kit, OVER in kit)
            wanted = backend.split(",") if backend != "auto" else ()
            assert share.compute_backend == ("mps" if "mps" in wanted else "shim")
            assert share.memory_backend == ("dmem" if "dmem" in wanted else "shim")


@pytest.mark.parametrize("kit", COMBINATIONS[1:], ids="+".join)
def test_auto_lists_skipped_backends(kit: tuple[str, ...], running: pytest.MonkeyPatch) -> None:
    """Also when oversubscription comes from an equal share without a request."""
    running.setattr(rootless, "is_rootless", lambda: ROOTLESS in kit)
    host = node("mps", "dmem", "shim", mig=MIG in kit)
    rule = model.SharingRule(4, 1.5 if OVER in kit else 1.0)
    host = host._replace(config=host.config._replace(host_memory="64Gi", sharing=(rule,)))
    words: dict[str, Any] = {"compute_mode": "soft" if SOFT in kit else "hard", "priority": int(URGENT in kit)}
    first = "0:0" if MIG in kit else "0"
    request = asked(memory=False, **words)._replace(
        selection=model.Selection("list", names=(first, "1") if SEVERAL in kit else (first,))
    )
    ledger = placement.ledger_of((), host.config.policy)
    share, *_ = placement.grant(request, host, ledger)
    text = why.held(request, host, ledger, (share,))[0]
    for name, holder in (("mps", share.compute_backend), ("dmem", share.memory_backend)):
        reasons = [CANNOT[name, word].replace(" cannot", "") for word in kit if (name, word) in CANNOT]
        assert holder == ("shim" if reasons else name)
        assert any(f"not {reason}" in text for reason in reasons) == bool(reasons), text


@pytest.mark.parametrize("allowed", [("mps", "shim"), ("shim",), ("mps",)])
@pytest.mark.parametrize("why_not", ["serves 48 processes at most", "another user's"])
def test_container_without_limit_is_refused_on_mps_device(
    allowed: tuple[str, ...], why_not: str, able: dict[str, Optional[str]]
) -> None:
    """The container needs no enforcer, but the driver would still time-slice its work against that of MPS clients, and
    MPS percentages do not account for that."""
    able["mps"] = why_not
    request = asked(memory="shim" in allowed, compute=False)
    policy = model.Policy(allowed_backends=allowed, unlimited="shared")
    host = node()._replace(config=model.Config(policy=policy))
    assert given(request, host).compute_backend == "shim"
    with pytest.raises(
        DeviceError, match="shim cannot: containers that use MPS are on the device.*; use another device"
    ):
        given(request, host, other("mps"))


@pytest.mark.parametrize(
    ("backend", "reason"), [("mps", "no memory beyond the device"), ("dmem", "managed memory is not counted")]
)
def test_equal_share_beyond_device_counts_as_oversubscribed(backend: str, reason: str) -> None:
    """An equal share can include host memory without a request."""
    rule, request = model.SharingRule(2, 1.5), asked(backend, memory=False, compute=False)
    host = node()._replace(config=node().config._replace(sharing=(rule,), host_memory="64Gi"))
    with pytest.raises(DeviceError, match=reason):
        given(request, host)
    kept = host._replace(config=host.config._replace(sharing=(rule._replace(memory_scaling=1.0),)))
    assert backend in (given(request, kept).memory_backend, given(request, kept).compute_backend)


def test_rootless_supports_only_shim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rootless, "is_rootless", lambda: True)
    for backend in ("mps", "dmem"):
        with pytest.raises(DeviceError, match="rootless"):
            given(asked(backend), node())
    share = given(asked(), node("dmem", "mps", "shim"))
    assert (share.memory_backend, share.compute_backend) == ("shim", "shim")


def test_any_selects_device_with_requested_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    there = device(1).uuid
    monkeypatch.setattr(mps, "unsupported", lambda site: None if site.device.uuid == there else "not running")
    request = asked("mps")._replace(selection=model.Selection("any", 1))
    assert given(request, node()).device.uuid == there


@pytest.mark.parametrize("down", [subset for n in range(3) for subset in itertools.combinations(("mps", "dmem"), n)])
@pytest.mark.parametrize("allowed", [p for n in (1, 2, 3) for p in itertools.permutations(ALL, n)])
@pytest.mark.parametrize("backend", ["auto", "shim", "mps", "dmem", "dmem,mps"])
def test_limit_is_enforced_or_start_is_refused(
    backend: str, allowed: tuple[str, ...], down: tuple[str, ...], able: dict[str, Optional[str]]
) -> None:
    """For every request and host: each limit has an enforcer that is supported, available and allowed. A backend that
    is requested by name is used, or the start is refused."""
    able.update(dict.fromkeys(down, "down"))
    named = set() if backend == "auto" else set(backend.split(","))
    there = set(allowed) - set(down) if backend == "auto" else (named | {"shim"}) & set(allowed)
    covered = {limit for name in there for limit in backends.BACKENDS[name].enforces} == set(backends.LIMITS)
    try:
        share = given(asked(backend), node(*allowed))
    except GpushareError:
        assert not (covered and named <= set(allowed) - set(down)), "refused although every requirement is met"
        return
    for limit, name in (("memory", share.memory_backend), ("compute", share.compute_backend)):
        assert limit in backends.BACKENDS[name].enforces and name in allowed and name not in down
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
        ("dmem", ALL, {}, "memory by dmem (requested); compute by shim (dmem does not enforce compute)"),
    ],
)  # fmt: skip
def test_explain_lists_enforcers_and_reasons(
    backend: str, allowed: tuple[str, ...], why_not: dict[str, str], text: str, able: dict[str, Optional[str]]
) -> None:
    able.update(why_not)
    request, host = asked(backend), node(*allowed)
    ledger = placement.ledger_of((), host.config.policy)
    assert why.held(request, host, ledger, placement.grant(request, host, ledger)) == (text,)


def test_lease_keeps_enforcers() -> None:
    share = given(asked("dmem,mps"), node())
    kept = leasefile.to_json(lease(share))
    assert leasefile.from_json(kept, "c1").shares == (share,)
    old = json.loads(kept)
    for name in ("memory_backend", "compute_backend"):
        old["shares"][0][name] = "tea"
        with pytest.raises(ValueError, match="a backend of another version"):
            leasefile.from_json(json.dumps(old).encode(), "c1")
        old["shares"][0][name] = "shim"


def test_log_names_all_enforcers() -> None:
    assert " backend=dmem+mps" in audit_log.facts(lease(given(asked("dmem,mps"), node())))
    assert audit_log.facts(lease(given(asked(), node("shim")))).endswith(" backend=shim")


def test_change_that_enforcer_cannot_apply_is_refused() -> None:
    one = lease(given(asked("mps"), node()))._replace(state="held")
    with pytest.raises(
        RequestError, match="mps enforces a limit of device 0 and cannot apply this change: its percentages are hard"
    ):
        limit_request.shares(one, limit_request.parse(mode="soft"), node(), (one,))
    with pytest.raises(RequestError, match="no high priority"):
        limit_request.shares(one, limit_request.parse(priority="high"), node(), (one,))
    assert limit_request.shares(one, limit_request.parse(compute="20%"), node(), (one,))[0].compute_percent == 20
