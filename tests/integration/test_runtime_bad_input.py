"""Invalid input of gpushare-runtime: one clear line on stderr and in the engine's log, and nothing done."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare.programs import runtime
from gpushare.state import leaseend, storage
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.integration.bad_starts import (
    DEVICE,
    MAX_LINE,
    ONE_GIB,
    USAGE,
    MakeContainer,
    MakeNode,
    files,
    refused,
    starts,
    traces,
)
from tests.support.host import Node
from tests.support.runc import Container


def test_second_start_of_a_bundle_keeps_the_first_edit(container: MakeContainer, node: Node) -> None:
    """The first start's runtime may not have read config.json yet: without the edit it would read the engine's
    original, without a limit."""
    one = container(["sleep", "inf"], env=ONE_GIB, runtime=node.runtime()).start()
    before = files(one.bundle)
    assert "gpushare.io/applied" in json.loads(before["config.json"])["annotations"]
    command = [*node.runtime(), "--root", str(one.bundle / "other"), "create", "--bundle", str(one.bundle), one.id]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "already has a lease" in done.stderr
    assert files(one.bundle) == before
    assert node.leases() == [one.id]


# config.json as a file


def fifo(path: Path) -> None:
    os.mkfifo(path)


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b'{"process": {"env": ["GPUSHARE_MEMORY=1Gi"]}, "x": "')
        file.truncate(100 << 20)


def deep(path: Path) -> None:
    path.write_text('{"GPUSHARE_MEMORY": ' + "[" * 500_000 + "]" * 500_000 + "}")


def deep_objects(path: Path) -> None:
    path.write_text('{"GPUSHARE_MEMORY": ' + '{"a":' * 100_000 + "1" + "}" * 100_000 + "}")


def not_utf8(path: Path) -> None:
    path.write_bytes(b'{"process": {"env": ["GPUSHARE_MEMORY=\xff1Gi"]}}')


def utf16(path: Path) -> None:
    path.write_text('{"process": {"env": ["GPUSHARE_MEMORY=1Gi"]}}', encoding="utf-16")


def big_number(path: Path) -> None:
    path.write_text('{"GPUSHARE_MEMORY": ' + "9" * 100_000 + "}")


def cut(path: Path) -> None:
    path.write_text('{"process": {"env": ["GPUSHARE_MEMORY=1Gi"')


def nothing(path: Path) -> None:
    pass


FILES = (
    Path.mkdir, fifo, dangling, loop, device, huge, deep, deep_objects, not_utf8, utf16, big_number, cut, nothing,
    Path.touch,
)  # fmt: skip


@pytest.mark.parametrize("make", FILES, ids=lambda one: one.__name__)
def test_unreadable_config_is_refused(container: MakeContainer, node: Node, make: Callable[[Path], None]) -> None:
    one = container(["true"], env=ONE_GIB)
    (one.bundle / "config.json").unlink()
    make(one.bundle / "config.json")
    refused(node, one, USAGE, "config.json")
    starts(node, container)


# config.json as a value


LINES = {
    "newline": ("GPUSHARE_MEMORY=1Gi\nlevel=info", USAGE, "GPUSHARE_MEMORY"),
    "nul": ("GPUSHARE_MEMORY=1Gi\0", USAGE, "NUL"),
    "long": ("GPUSHARE_MEMORY=" + "1" * (1 << 20), USAGE, "GPUSHARE_MEMORY"),
    "escape": ("GPUSHARE_MEMORY=\x1b[2J1Gi", USAGE, "GPUSHARE_MEMORY"),
    "surrogate": ("GPUSHARE_MEMORY=\ud800", USAGE, "GPUSHARE_MEMORY"),
    "path": ("GPUSHARE_DEVICES=../../dev/sda", USAGE, "GPUSHARE_DEVICES"),
    "many": ("GPUSHARE_DEVICES=" + ",".join(map(str, range(100_000))), DEVICE, "GPUSHARE_DEVICES"),
}


@pytest.mark.parametrize("name", LINES)
def test_malformed_variable_is_refused(container: MakeContainer, node: Node, name: str) -> None:
    line, code, word = LINES[name]
    refused(node, container(["true"], edit=lambda spec: spec["process"]["env"].append(line)), code, word)


def test_long_variable_of_another_name_is_accepted(container: MakeContainer, node: Node) -> None:
    """The kernel accepts 128 KiB in one variable; here only the file matters."""
    one = container(["true"], env={**ONE_GIB, "OTHER": "x" * (100 << 10)}, runtime=node.runtime())
    assert one.run() == 0, one.stderr


# Any value in the fields that gpushare reads

READ = (
    "annotations", "annotations.x", "hooks", "hooks.prestart", "hooks.prestart.0", "hooks.prestart.0.path",
    "hooks.poststop", "hooks.createRuntime", "hostname", "linux", "linux.cgroupsPath", "linux.devices",
    "linux.devices.0", "linux.devices.0.path", "linux.devices.0.major", "linux.namespaces", "linux.namespaces.0",
    "linux.resources", "linux.resources.devices", "linux.resources.devices.0", "linux.resources.devices.0.major",
    "linux.uidMappings", "linux.maskedPaths", "mounts", "mounts.0", "mounts.0.destination", "mounts.0.source",
    "mounts.0.type", "mounts.0.options", "mounts.0.options.0", "process", "process.args", "process.capabilities",
    "process.capabilities.bounding", "process.env", "process.env.0", "process.user", "process.user.uid", "root",
    "root.path", "root.readonly", "ociVersion",
)  # fmt: skip
TEXT = st.text(max_size=20) | st.sampled_from(["/", "..", "/dev/nvidia0", "rootfs", "void", "/usr/lib", "\0", "a\nb"])
SCALAR = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
VALUE = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8
)


def put(spec: dict[str, Any], path: str, value: Any) -> None:
    """Set a field, and create its missing parents."""
    *above, last = path.split(".")
    here: Any = spec
    for step, following in zip(above, [*above[1:], last]):
        empty: Any = [{}] if following.isdigit() else {}
        if isinstance(here, list):
            here = here[int(step)]
        else:
            here[step] = here.get(step) or empty
            here = here[step]
    if isinstance(here, list):
        here[int(last) : int(last) + 1] = [value]
    elif isinstance(here, dict):
        here[last] = value


class Tried:
    """One `create` in a forked child, so that hundreds take seconds: (exit code, stderr)."""

    def __init__(self, node: Node, one: Container) -> None:
        self._words = ["--gpushare-config", str(node.config), "--gpushare-state", str(node.state)]
        self._words += ["create", "--bundle", str(one.bundle), one.id]

    def run(self) -> tuple[int, str]:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.dup2(writer, 2)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                sys.argv[0] = "/opt/gpushare/bin/gpushare-runtime"
                os._exit(runtime.main(self._words))
            finally:
                os._exit(99)
        os.close(writer)
        with os.fdopen(reader, "rb") as output:
            text = output.read().decode()
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


@pytest.fixture
def tried(container: MakeContainer, make_node: MakeNode, simhost: Path) -> Iterator[tuple[Tried, Container, Node]]:
    node = make_node(simhost, runtime={"path": "/bin/true"})
    one = container(["true"], env=ONE_GIB)
    yield Tried(node, one), one, node


@settings(
    max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(changes=st.dictionaries(st.sampled_from(READ), VALUE, min_size=1, max_size=2))
@example(changes={"hooks.prestart": True})
@example(changes={"mounts.0.destination": "\0"})
@example(changes={"mounts.0.destination": "\ud800"})
@example(changes={"linux.devices": [{"path": "/dev/nvidia0", "major": [195], "minor": {}}]})
@example(changes={"linux.resources.devices": [{"allow": True, "major": [], "minor": {}}]})
def test_arbitrary_config_starts_or_is_refused_in_one_line(
    tried: tuple[Tried, Container, Node], changes: dict[str, Any]
) -> None:
    attempt, one, node = tried
    spec = copy.deepcopy(one.spec)
    for path, value in changes.items():
        try:
            put(spec, path, value)
        except (IndexError, ValueError, TypeError, AttributeError):
            pass  # the first change removed the second one's parent
    before = json.dumps(spec).encode()
    (one.bundle / "config.json").write_bytes(before)
    code, text = attempt.run()
    after = (one.bundle / "config.json").read_bytes()
    if code == 0:
        assert text == ""
        leaseend.release(str(node.state), one.id)  # its process has ended: the next start would do this
        storage.empty_trash(str(node.state))
    else:
        assert code in (64, 69, 71, 75, 77, 78), text
        assert text.startswith("gpushare: ") and text.count("\n") == 1 and len(text) < MAX_LINE, text
        assert after == before
        assert traces(node) == []
    assert sorted(path.name for path in one.bundle.iterdir()) == ["config.json", "disk"]
