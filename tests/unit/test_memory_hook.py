"""NVIDIA's hook apply-cuda-memory-limits: it stays where the driver enforces the limit, and is removed where it would
fail."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from gpushare.allocation import placement
from gpushare.core.model import Config, Device, Inventory, Node, Request, Selection, Share
from gpushare.inject import memory_hook, spec_record, specedit
from gpushare.programs import runtime, session
from gpushare.request import oci, request
from gpushare.request.dialects import nvidia
from gpushare.system import rootless

from tests.unit.pure import UUIDS, device, lease, ledger

GIB = 1 << 30
ASKED = Request("nvidia-memory", Selection("all"), (), sources=(("NVIDIA_GPU_MEMORY_LIMIT", "4096"),))
SHARES = (Share(0, device(0), 4 * GIB), Share(1, device(1), 4 * GIB))


def hook(*uuids: str, program: str = "/usr/bin/nvidia-ctk") -> dict[str, Any]:
    ids = [word for uuid in uuids for word in ("--gpu-id", uuid)]
    return {"path": program, "args": ["nvidia-ctk", "hook", nvidia.MEMORY_HOOK, "--driver-root", "", *ids]}


@pytest.fixture
def newer(tmp_path: Path) -> Inventory:
    """A simulated host with a driver of 615 and cgroup v2."""
    library = tmp_path / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.615.71"
    library.parent.mkdir(parents=True)
    library.write_bytes(Path("/bin/true").read_bytes())
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    return Inventory(str(tmp_path), "615.71", (device(0), device(1)), simulated=True)


def test_hook_stays_where_driver_enforces(newer: Inventory) -> None:
    for one in (hook(UUIDS[0]), hook(*UUIDS), hook(",".join(UUIDS))):
        assert memory_hook.reason(one, ASKED, SHARES, newer) == ""


def mig() -> Device:
    return device(0, uuid="MIG-aaaaaaaa-0000-0000-0000-000000000000", parent=UUIDS[0])


@pytest.mark.parametrize(
    ("one", "asked", "shares", "changes", "why"),
    [
        (hook(UUIDS[0]), ASKED, SHARES, {"driver_version": "595.1"}, r"the driver \(595.1\) has no memory limits, 615"),
        (hook(UUIDS[0]), ASKED, SHARES, {"driver_version": ""}, "has no memory limits, 615"),
        (hook(UUIDS[0]), ASKED, (Share(0, mig(), 4 * GIB),), {}, "no memory limits for MIG devices"),
        (hook(UUIDS[1]), ASKED, SHARES[:1], {}, f'device "{UUIDS[1]}" is not granted'),
        (hook(*UUIDS), ASKED, SHARES[:1], {}, "is not granted"),
        (hook(), ASKED, SHARES, {}, 'device "" is not granted'),
        (hook(UUIDS[0]), ASKED, (), {}, "is not granted"),
        (hook(UUIDS[0]), ASKED, (SHARES[0]._replace(memory_backend="dmem"),), {}, "the backend dmem sets the limit"),
        (hook(UUIDS[0]), ASKED._replace(sources=(("GPUSHARE_MEMORY", "4Gi"),)), SHARES, {}, "do not set the limit"),
    ],
)
def test_hook_is_removed_where_it_would_fail(
    newer: Inventory, one: Any, asked: Request, shares: Any, changes: Any, why: str
) -> None:
    assert re.search(why, memory_hook.reason(one, asked, shares, newer._replace(**changes)))


def test_hook_is_removed_without_unified_cgroups(newer: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_hook.regions, "_tree", lambda inventory: "/sys/fs/cgroup/unified")
    assert "cgroup v2 is not mounted at /sys/fs/cgroup" in memory_hook.reason(hook(UUIDS[0]), ASKED, SHARES, newer)


def test_hook_is_removed_when_rootless(newer: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rootless, "is_rootless", lambda: True)
    assert "this is rootless" in memory_hook.reason(hook(UUIDS[0]), ASKED, SHARES, newer)


@pytest.mark.parametrize(
    ("one", "gpus"),
    [
        (hook(UUIDS[0]), (UUIDS[0],)),
        (hook(*UUIDS), UUIDS),
        (
            {"path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", nvidia.MEMORY_HOOK, "--gpu-id=a,b"]},
            ("a", "b"),
        ),
        (hook(), ()),
        (hook(UUIDS[0], program="/usr/bin/other"), None),
        ({"path": "/usr/bin/nvidia-ctk"}, None),
        ({"path": "/usr/bin/nvidia-ctk", "args": ["nvidia-ctk", "hook", "update-ldcache", nvidia.MEMORY_HOOK]}, None),
        ({"path": "/usr/bin/nvidia-ctk", "args": ["nvidia-ctk", "hook", nvidia.MEMORY_HOOK, "--gpu-id", 7]}, ("",)),
        ({"path": "/usr/bin/nvidia-ctk", "args": 7}, None),
        (7, None),
    ],
)
def test_gpus_of_hook_are_parsed(one: Any, gpus: Any) -> None:
    assert nvidia.memory_hook_gpus(one) == gpus


def test_editor_removes_other_hooks_and_reports_why() -> None:
    kept, gone = hook(UUIDS[0]), hook(UUIDS[1])
    spec = {"hooks": {"createRuntime": [kept, {"path": "/usr/bin/nvidia-ctk"}, gone]}}
    editor = specedit.Editor(spec, leased=True)
    lines = editor.take_out_foreign(lambda one: "" if one == kept else "of no use")
    assert lines == [
        "createRuntime hook /usr/bin/nvidia-ctk",
        "createRuntime hook /usr/bin/nvidia-ctk apply-cuda-memory-limits (of no use)",
    ]
    assert editor.spec["hooks"]["createRuntime"] == [kept]
    assert spec_record.stripped(json.loads(json.dumps(editor.finish(("/opt/bin/gpushare-hook",))))) == spec


@pytest.mark.parametrize(("version", "stays"), [("615.71", True), ("595.1", False)])
def test_runtime_keeps_hook_by_driver_version(newer: Inventory, tmp_path: Path, version: str, stays: bool) -> None:
    (tmp_path / "bundle/rootfs").mkdir(parents=True)
    spec = {
        "root": {"path": "rootfs"},
        "process": {"env": [f"NVIDIA_VISIBLE_DEVICES={UUIDS[0]}", "NVIDIA_GPU_MEMORY_LIMIT=4096"]},
        "hooks": {"createRuntime": [hook(UUIDS[0])]},
    }
    bundle = oci.bundle_of(oci.State("c1", 0, "creating", str(tmp_path / "bundle"), {}), spec)
    host = Node(Config(), newer._replace(driver_version=version))
    found = request.resolve(bundle, host, with_injected=True)
    assert found is not None
    way = runtime.IntoSpec()
    with way.image(session.Start(bundle, found, host), lease(*placement.grant(found, host, ledger()))) as tree:
        assert tree is not None
    why = f"apply-cuda-memory-limits (the driver ({version}) has no memory limits, 615 or newer has)"
    assert list(way.taken) == ([] if stays else [f"createRuntime hook /usr/bin/nvidia-ctk {why}"])


def test_editor_removes_hook_of_container_without_a_share() -> None:
    editor = specedit.Editor({"hooks": {"createRuntime": [hook(UUIDS[0])]}}, leased=False)
    assert editor.take_out_foreign() == [
        "createRuntime hook /usr/bin/nvidia-ctk apply-cuda-memory-limits (no limit is granted)"
    ]
