"""Apply a plan to config.json and remove it again."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from gpushare.core.errors import KernelError, RequestError
from gpushare.core.model import Bundle, LdEntry
from gpushare.core.ops import DeviceNode, DeviceRule, InPlace, LdCache, Link, Mount, Plan, ProcMask
from gpushare.inject import spec_record, specedit
from gpushare.inject.spectree import SpecTree
from gpushare.programs import runtime
from gpushare.request import oci
from gpushare.system import syscalls

HOOK = ("/opt/bin/gpushare-hook", "--config", "/c.yaml", "--state", "/s")


def bundle_of(root: Path, spec: dict[str, Any]) -> Bundle:
    return oci.bundle_of(oci.State("c", 0, "", str(root), {}), {**spec, "root": {"path": "rootfs"}})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A bundle directory with a root file system, and two files to mount."""
    (tmp_path / "rootfs" / "usr" / "lib").mkdir(parents=True)
    (tmp_path / "rootfs" / "lib").symlink_to("usr/lib")
    (tmp_path / "source").write_text("")
    return tmp_path


def plan_for(root: Path) -> Plan:
    source = str(root / "source")
    return Plan(
        "c",
        (
            Mount(source, "/usr/lib/libcuda.so.535", "file", ("ro", "nosuid", "nodev"), "the shim"),
            Link("/usr/lib/libcuda.so.1", "libcuda.so.535", "name"),
            LdCache((LdEntry("libcuda.so.1", "/usr/lib/libcuda.so.1", 0x0303),)),
            ProcMask(("0000:01:00.0",)),
            DeviceNode("/dev/null", "/dev/null", 1, 3, False),
            DeviceNode(source, "/dev/nvidia0", 195, 0, True),
            DeviceNode("/dev/zero", "/dev/nvidiactl", 195, 255, False),
            DeviceRule(195, 255),
        ),
    )


def put(root: Path, spec: dict[str, Any], plan: Plan | None = None) -> dict[str, Any]:
    editor = specedit.Editor(spec, leased=True)
    editor.take_out_foreign()
    with SpecTree(bundle_of(root, editor.spec)) as tree:
        return editor.put_in(plan or plan_for(root), tree, HOOK, "/dev/stderr")


def test_plan_becomes_spec_entries(root: Path) -> None:
    spec = put(root, {})
    source = str(root / "source")
    assert spec["mounts"] == [
        {
            "destination": "/usr/lib/libcuda.so.535",
            "type": "bind",
            "source": source,
            "options": ["bind", "rprivate", "ro", "nosuid", "nodev"],
        },
        {
            "destination": "/dev/nvidia0",
            "type": "bind",
            "source": source,
            "options": ["bind", "rprivate", "nosuid", "noexec", "nodev"],
        },
        {
            "destination": "/dev/nvidiactl",
            "type": "bind",
            "source": "/dev/zero",
            "options": ["bind", "rprivate", "nosuid", "noexec"],
        },
    ]
    (device,) = spec["linux"]["devices"]
    assert (device["path"], device["type"], device["major"], device["minor"]) == ("/dev/null", "c", 1, 3)
    assert spec["linux"]["resources"]["devices"] == [
        {"allow": True, "type": "c", "major": 195, "minor": 255, "access": "rw"}
    ]
    assert spec["annotations"]["run.oci.hooks.stderr"] == "/dev/stderr"
    for stage, action in (("createRuntime", "adopt"), ("poststop", "poststop")):
        (hook,) = spec["hooks"][stage]
        assert hook["path"] == HOOK[0] and hook["args"] == ["gpushare-hook", *HOOK[1:], action]
        assert [line.partition("=")[0] for line in hook["env"]] == ["PATH", "GPUSHARE_APPLIED"]
    record = spec_record.record_of(spec)
    assert record is not None and record.leased
    assert [type(op).__name__ for op in spec_record.remaining(record)] == ["InPlace", "Link", "LdCache", "ProcMask"]
    assert spec_record.remaining(record)[1:] == (
        Link("/usr/lib/libcuda.so.1", "libcuda.so.535", ""),
        LdCache((LdEntry("libcuda.so.1", "/usr/lib/libcuda.so.1", 0x0303),)),
        ProcMask(("0000:01:00.0",)),
    )


def test_remaining_mounts_are_left_to_hook(root: Path) -> None:
    """With the shim directory, the hook makes every mount except the shim and the limits. The record has their
    targets."""
    source, share, shim = (str(root / name) for name in ("source", "share", "shim/libcuda.so"))
    (root / "share" / "rw").mkdir(parents=True)
    flags = ("ro", "nosuid", "nodev")
    mounts = (
        Mount(share, "/usr/lib/gpushare", "dir", flags, ""),
        Mount(share, "/usr/lib/gpushare/rw", "dir", flags, ""),
        Mount(shim, "/lib/libcuda.so.535", "file", flags, ""),
        Mount(source, "/lib/libnvidia-nvvm.so.535", "file", flags, ""),
        DeviceNode(source, "/dev/nvidia0", 195, 0, True),
        DeviceNode("/dev/zero", "/dev/zero", 1, 5, False),
    )
    editor = specedit.Editor({}, leased=True)
    with SpecTree(bundle_of(root, editor.spec)) as tree:
        spec = editor.put_in(Plan("c", mounts), tree, HOOK, "", str(root / "shim"))
    assert [mount["destination"] for mount in spec["mounts"]] == ["/usr/lib/gpushare", "/usr/lib/libcuda.so.535"]
    assert [device["path"] for device in spec["linux"]["devices"]] == ["/dev/zero"]
    record = spec_record.record_of(spec)
    assert record is not None and spec_record.remaining(record) == (
        InPlace(share, "/usr/lib/gpushare", "dir"),
        Mount(share, "/usr/lib/gpushare/rw", "dir", flags, ""),
        InPlace(shim, "/usr/lib/libcuda.so.535", "file"),
        Mount(source, "/usr/lib/libnvidia-nvvm.so.535", "file", flags, ""),
        DeviceNode(source, "/dev/nvidia0", 195, 0, True),
    )
    assert spec_record.stripped(spec) == {}


# Applied and restored. The target `spec` of tests/fuzz does it with any specification.


def test_later_additions_survive_restore(root: Path) -> None:
    spec = put(root, {"mounts": [{"destination": "/proc"}]})
    spec["mounts"].insert(0, {"destination": "/new"})
    spec["hooks"]["poststop"].append({"path": "/new"})
    spec["annotations"]["new"] = "1"
    assert spec_record.stripped(spec) == {
        "mounts": [{"destination": "/new"}, {"destination": "/proc"}],
        "hooks": {"poststop": [{"path": "/new"}]},
        "annotations": {"new": "1"},
    }


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"version": 2}', '{"version": 1, "nonce": "NONCE"}', "[" * 9999]
)
def test_invalid_record_is_dropped(root: Path, text: str) -> None:
    spec = put(root, {})
    nonce = json.loads(spec["annotations"]["gpushare.io/applied"])["nonce"]
    spec["annotations"]["gpushare.io/applied"] = text.replace("NONCE", nonce)
    assert spec_record.record_of(spec) is None
    assert "gpushare.io/applied" not in spec_record.stripped(spec)["annotations"]


def test_record_without_hook_is_ignored(root: Path) -> None:
    spec = put(root, {})
    assert spec_record.record_of({"annotations": spec["annotations"]}) is None
    assert spec_record.stripped({"annotations": dict(spec["annotations"]), "mounts": spec["mounts"]})["mounts"]


@pytest.mark.parametrize(
    "spec",
    [{"mounts": {}}, {"hooks": []}, {"hooks": {"poststop": {}}}, {"linux": []}, {"linux": {"devices": "x"}}]
    + [{"linux": {"resources": 1}}, {"annotations": []}],
)
def test_wrong_types_are_refused_by_name(spec: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"config\.json: "):
        specedit.Editor(spec, leased=True)


def test_nvidia_hooks_and_mounts_are_removed() -> None:
    tool = {"path": "/usr/bin/nvidia-ctk"}
    spec = {
        "hooks": {"prestart": [tool, {"path": "/bin/x"}], "createContainer": [tool]},
        "mounts": [{"destination": "/usr/lib64/libcuda.so.1"}, {"destination": "/usr/lib64/libc.so.6"}],
        "linux": {
            "devices": [
                {"path": "/dev/nvidia1", "major": 195, "minor": 1},
                {"path": "/dev/nvidia-uvm", "major": 511, "minor": 0},
                {"path": "/dev/fuse", "major": 10, "minor": 229},
            ],
            "resources": {
                "devices": [
                    {"allow": False, "access": "rwm"},
                    {"allow": True, "type": "c", "major": 195, "minor": 1, "access": "rwm"},
                    {"allow": True, "type": "c", "major": 511, "minor": 0, "access": "rwm"},
                    {"allow": True, "type": "c", "major": 10, "minor": 229, "access": "rwm"},
                ]
            },
        },
    }
    editor = specedit.Editor(spec, leased=True)
    assert editor.take_out_foreign() == [
        "device /dev/nvidia1",
        "device /dev/nvidia-uvm",
        "prestart hook /usr/bin/nvidia-ctk",
        "createContainer hook /usr/bin/nvidia-ctk",
        "mount at /usr/lib64/libcuda.so.1",
    ]
    assert editor.spec["hooks"]["prestart"] == [{"path": "/bin/x"}] and editor.spec["hooks"]["createContainer"] == []
    assert [device["path"] for device in editor.spec["linux"]["devices"]] == ["/dev/fuse"]
    assert [rule.get("major") for rule in editor.spec["linux"]["resources"]["devices"]] == [None, 10]
    assert [mount["destination"] for mount in editor.spec["mounts"]] == ["/usr/lib64/libc.so.6"]


# The file


def test_wide_rule_is_replaced_by_rules_for_other_majors(root: Path) -> None:
    wide = {"allow": True, "type": "c", "access": "rwm"}
    first, last = {"allow": False, "access": "rwm"}, {"allow": True, "type": "c", "major": 1, "minor": 3}
    editor = specedit.Editor({"linux": {"resources": {"devices": [first, wide, last]}}}, leased=False)
    editor.narrow(str(root))
    found = editor.spec["linux"]["resources"]["devices"]
    assert (found[0], found[-1]) == (first, last) and len(found) > 500
    assert wide not in found and not any(rule.get("major") == 195 for rule in found)


def test_undo_restores_only_its_own_edit(root: Path) -> None:
    """Another start of the bundle may have written config.json since."""
    edited, path = put(root, {}), root / "config.json"
    path.write_text(json.dumps(edited))
    record = spec_record.record_of(edited)
    assert record is not None
    way = runtime.IntoSpec(str(path), {"clean": True})
    for nonce, left in (("0" * 32, edited), (record.nonce, {"clean": True})):
        way._nonce = nonce
        way.undo()
        assert json.loads(path.read_text()) == left


def test_write_replaces_atomically(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    path.chmod(0o604)
    os.chown(path, 12, 34)
    old = path.stat().st_ino
    specedit.write(str(path), {"a": "\udcff\u00e9"})
    status = path.stat()
    assert json.loads(path.read_text()) == {"a": "\udcff\u00e9"}
    assert (status.st_mode & 0o777, status.st_uid, status.st_gid) == (0o604, 12, 34) and status.st_ino != old
    assert list(tmp_path.iterdir()) == [path]


def test_failed_write_keeps_old_file(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match=r"config\.json"):
        specedit.write(str(tmp_path / "config.json"), {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [0, errno.EINVAL, errno.ENOSYS])
def test_write_works_without_rename_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    path.chmod(0o640)
    if error:

        def cannot(first: str, second: str) -> None:
            raise syscalls.SyscallError("renameat2", second, error)

        monkeypatch.setattr(syscalls, "exchange", cannot)
    specedit.write(str(path), {"ociVersion": "1.0.2"})
    assert json.loads(path.read_text()) == {"ociVersion": "1.0.2"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["config.json"]
