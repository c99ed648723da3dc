"""Annotations that redirect hook output to host files: crun opens the files, and the hook writes nothing to them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare.core import constants
from gpushare.request import hookoutput, oci
from gpushare.state import log

STDOUT, STDERR = constants.HOOK_OUTPUT_ANNOTATIONS
HOOK = str(Path(oci.__file__).resolve().parents[2])
REFUSED = {"process": {"env": [["$(touch made)"]]}, "root": {"path": "rootfs"}}
FILE = "/etc/profile.d/z.sh"


@pytest.mark.parametrize(
    "annotations, expected",
    [
        ({}, False),
        (None, False),
        ({"a": FILE}, False),
        ({STDERR: FILE}, True),
        ({STDOUT: FILE}, True),
        ({STDOUT: "/dev/stderr"}, True),
        ({STDERR: "/dev/stderr"}, False),  # crun's own stderr, as gpushare-runtime sets it
        ({STDERR: "/dev/stderr", STDOUT: FILE}, True),
        ({STDERR: "/dev/stderr/"}, True),
        ({STDERR: None}, True),
    ],
)
def test_redirecting_annotations_are_recognized(annotations: Any, expected: bool) -> None:
    assert hookoutput.is_redirected(annotations) is expected


def test_only_redirecting_annotations_are_removed() -> None:
    spec = {"annotations": {STDOUT: FILE, STDERR: "/dev/stderr", "a": "b"}, "hooks": {}}
    assert hookoutput.without(spec) == {"annotations": {"a": "b"}, "hooks": {}}
    assert spec["annotations"][STDOUT] == FILE  # the argument is unchanged
    for other in ({}, {"annotations": None}, {"annotations": {"a": "b"}}):
        assert hookoutput.without(other) is other


@pytest.fixture(autouse=True)
def _unmounted(tmp_path: Path) -> Iterator[None]:
    yield
    if (tmp_path / "state").is_mount():
        subprocess.run(["umount", tmp_path / "state"], check=True)


def run_hook(bundle: Path, state: bytes, stage: str = "prestart") -> subprocess.CompletedProcess[bytes]:
    words = ["--state", str(bundle / "state"), stage]
    text = (
        f"import sys; sys.path.insert(0, {HOOK!r}); from gpushare.programs import hook; sys.exit(hook.main({words!r}))"
    )
    return subprocess.run([sys.executable, "-ISc", text], input=state, capture_output=True, cwd="/")


def state_of(bundle: Path, annotations: Any) -> bytes:
    return json.dumps({"id": "c1", "pid": 0, "bundle": str(bundle), "annotations": annotations}).encode()


@pytest.mark.parametrize("where", ["state", "config.json"])
@pytest.mark.parametrize("key", constants.HOOK_OUTPUT_ANNOTATIONS)
def test_hook_prints_nothing_to_redirected_file(tmp_path: Path, where: str, key: str) -> None:
    in_config = {"annotations": {key: FILE}} if where == "config.json" else {}
    (tmp_path / "config.json").write_text(json.dumps({**REFUSED, **in_config}))
    done = run_hook(tmp_path, state_of(tmp_path, {key: FILE} if where == "state" else {}))
    assert (done.returncode, done.stdout, done.stderr) == (64, b"", b"")
    assert log.read(str(tmp_path / "state"), "c1").startswith("config.json: process.env holds")  # kept for inspect


def test_hook_prints_to_stderr_of_crun(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REFUSED))
    done = run_hook(tmp_path, state_of(tmp_path, {STDERR: "/dev/stderr"}))
    assert done.returncode == 64 and done.stderr.startswith(b"gpushare: config.json: process.env")


@pytest.mark.parametrize(
    "state",
    [
        b'{"annotations": {"run.oci.hooks.stderr": "/x"}, "bundle": ',
        b'{"annotations": {"run.oci.hooks.stderr": "/x"}, "id": "c1", "bundle": "relative $(touch made)"}',
        b'{"annotations": {"run.oci.hooks.stdout": "/x"}, "id": "../$(touch made)", "bundle": "/b"}',
        b'{"annotations": {"run.oci.hooks.stdout": "/x", "a": 1}, "id": "c1", "bundle": "/b"}',
        b'{"x": "' + b"y" * oci.MAX_STATE_BYTES + b'", "annotations": {"run.oci.hooks.stderr": "/x"}}',
    ],
    ids=["cut short", "bundle", "id", "type", "longer than what is read"],
)
@pytest.mark.parametrize("stage", ["prestart", "createRuntime", "adopt", "poststop"])
def test_invalid_state_prints_nothing(tmp_path: Path, state: bytes, stage: str) -> None:
    done = run_hook(tmp_path, state, stage)
    assert (done.returncode, done.stdout, done.stderr) == (0 if stage == "poststop" else 64, b"", b"")


def test_endless_state_is_refused(tmp_path: Path) -> None:
    with open("/dev/zero", "rb") as zeros:
        text = f"import sys; sys.path.insert(0, {HOOK!r}); from gpushare.programs import hook; "
        text += "sys.exit(hook.main(['prestart']))"
        done = subprocess.run([sys.executable, "-ISc", text], stdin=zeros, capture_output=True)
    assert (done.returncode, done.stderr) == (64, b"")  # the rest of the state may name a file
