"""Edits of configuration files of other software: an undo leaves no entry and changes nothing else."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from gpushare.core.model import LdEntry
from gpushare.core.ops import DeviceNode, DeviceRule, KernelLimit, LdCache, Link, Mount, Plan, ProcMask
from gpushare.engines import jsontext, tomltext
from gpushare.inject import spec_record, specedit
from gpushare.inject.spectree import SpecTree
from gpushare.request import oci

from tests.fuzz.readers import only_one_line_errors
from tests.support.host import BUILD

HOOK = ("/opt/bin/gpushare-hook", "--state", "/s")
KEYS = ("runtimes", "gpushare")
VALUE = {"path": "/usr/bin/gpushare-runtime"}
TABLE = ("plugins", "a.b", "gpushare")
TABLE_VALUE = {"type": "x", "options": {"n": 1}}

_root = str(BUILD / "fuzz" / "scratch" / "bundle")
os.makedirs(f"{_root}/rootfs/usr/lib", exist_ok=True)
with contextlib.suppress(FileExistsError):
    os.symlink("usr/lib", f"{_root}/rootfs/lib")
_source = f"{_root}/source"
with open(_source, "wb"):
    pass
PLAN = Plan(
    "c",
    (
        Mount(_source, "/usr/lib/libcuda.so.535", "file", ("ro", "nosuid", "nodev"), "the shim"),
        Link("/usr/lib/libcuda.so.1", "libcuda.so.535", "name"),
        LdCache((LdEntry("libcuda.so.1", "/usr/lib/libcuda.so.1", 0x0303),)),
        ProcMask(("0000:01:00.0",)),
        DeviceNode("/dev/null", "/dev/null", 1, 3, False),
        DeviceNode(_source, "/dev/nvidia0", 195, 0, True),
        KernelLimit("GPU-1", "nvidia/0000:01:00.0/vidmem", 1 << 30, "/s/containers/c/dmem"),
        DeviceRule(195, 255),
    ),
)


def same(one: Any, other: Any) -> bool:
    """Compare as JSON, where NaN equals NaN."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _edited(spec: dict[str, Any]) -> dict[str, Any]:
    editor = specedit.Editor(spec, leased=True)
    editor.take_out_foreign()
    editor.narrow("/")
    editor.deny(((195, 1),))
    bundle = oci.bundle_of(oci.State("c", 0, "", _root, {}), {**editor.spec, "root": {"path": "rootfs"}})
    with SpecTree(bundle) as tree:
        return editor.put_in(PLAN, tree, HOOK, "/dev/stderr")


def _nonce(spec: dict[str, Any]) -> str:
    nonce: str = json.loads(spec["annotations"]["gpushare.io/applied"])["nonce"]
    return nonce


def spec(data: bytes) -> None:
    """config.json: removing an edit restores the original, and a second edit equals the first."""
    fd = os.memfd_create("fuzz")
    try:
        os.write(fd, data)
        with only_one_line_errors():
            found = oci.read_json(f"/proc/self/fd/{fd}", oci.MAX_CONFIG_BYTES, "config.json")
            before = spec_record.stripped(found)
            text = json.dumps(before)
            edited = _edited(before)
            assert json.dumps(before) == text, "the argument was modified"
            assert same(spec_record.stripped(edited), before)
            again = _edited(spec_record.stripped(edited))
            assert json.dumps(again).replace(_nonce(again), _nonce(edited)) == json.dumps(edited)
    finally:
        os.close(fd)


def json_text(data: bytes) -> None:
    """daemon.json of an engine."""
    text = data.decode("utf-8", "surrogateescape")
    with only_one_line_errors():
        value = jsontext.check(text, "f.json")
        place = value.get(KEYS[0])
        if place is not None and not isinstance(place, dict):
            return  # the engine's module refuses it
        changed = jsontext.put(text, KEYS, VALUE)
        assert same(json.loads(changed), {**value, KEYS[0]: {**(place or {}), KEYS[1]: VALUE}})
        rest = {key: inner for key, inner in (place or {}).items() if key != KEYS[1]}
        left = jsontext.drop(changed, KEYS)
        assert same(
            json.loads(left), {**{k: v for k, v in value.items() if k != KEYS[0]}, **({KEYS[0]: rest} if rest else {})}
        )
        if value and KEYS[0] not in value:
            assert left == text


def toml_text(data: bytes) -> None:
    """config.toml of an engine."""
    text = data.decode("utf-8", "surrogateescape")
    with only_one_line_errors():
        before = tomltext.check(text, "f.toml")
        changed = tomltext.put(text, {TABLE: TABLE_VALUE}, "f.toml")
        assert tomltext.at(tomltext.check(changed, "f.toml"), TABLE) == TABLE_VALUE
        left = tomltext.drop(changed, [TABLE], "f.toml")
        if before.get(TABLE[0]) is None:
            assert tomltext.check(left, "f.toml") == before
        assert tomltext.put(left, {TABLE: TABLE_VALUE}, "f.toml") == changed
