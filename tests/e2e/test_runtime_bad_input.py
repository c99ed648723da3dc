"""What gpushare-runtime is given and cannot use: one clear line, on stderr and in the engine's log, nothing done."""

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
from gpushare import leaseend, runtime, storage
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.lib import rootfs
from tests.lib.host import Node, write_config
from tests.lib.runc import Container

MakeContainer = Callable[..., Container]
MakeNode = Callable[..., Node]
ONE_GIB = {"GPUSHARE_MEMORY": "1Gi"}
USAGE, CONFIG, DEVICE, KERNEL = 64, 78, 69, 71  # errors.py
MAX_LINE = 600  # characters that a person may be asked to read


def traces(node: Node) -> list[str]:
    """What a start leaves in the state directory, and mounts there."""
    return node.left()


def files(directory: Path) -> dict[str, Any]:
    """A bundle's files: content of regular ones, else the file's kind and inode."""
    found: dict[str, Any] = {}
    for path in directory.iterdir():
        status = path.lstat()
        small = path.is_file() and not path.is_symlink() and status.st_size < 1 << 20
        found[path.name] = path.read_bytes() if small else (status.st_mode, status.st_ino, status.st_size)
    return found


def refused(node: Node, one: Container, code: int, *words: str, prefix: tuple[str, ...] = (), id: str = "") -> str:
    """`create` of a bundle that must fail with `code`. Returns the line; asserts that it is one, in both places, that
    it names each of `words`, and that nothing was done."""
    log = one.bundle.parent / f"{one.id}.log"
    flags = ["--log", str(log), "--log-format", "json"]
    before = files(one.bundle)
    command = [*prefix, *node.runtime(), *flags, "create", "--bundle", str(one.bundle), id or one.id]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    text = done.stderr.decode()
    assert (done.returncode, done.stdout) == (code, b""), text
    assert text.startswith("gpushare: ") and text.count("\n") == 1 and text.endswith("\n"), text
    assert text[:-1].isprintable() and len(text) < MAX_LINE, text
    assert "internal error" not in text and not [word for word in words if word not in text], text
    (entry,) = map(json.loads, log.read_text().splitlines())
    assert (entry["level"], entry["msg"]) == ("error", text[:-1])
    log.unlink()
    assert files(one.bundle) == before
    assert traces(node) == []
    return text


def starts(node: Node, container: MakeContainer) -> None:
    """The host still works."""
    one = container(["true"], env={"GPUSHARE_MEMORY": "16Gi"}, runtime=node.runtime())
    assert one.run() == 0, one.stderr
    one.delete()
    assert traces(node) == []


def test_second_start_of_a_bundle_leaves_the_first_one_s_edit(container: MakeContainer, node: Node) -> None:
    """The first start's runtime may not have read config.json yet: without our edit the container would get what the
    engine put there, without a limit."""
    one = container(["sleep", "inf"], env=ONE_GIB, runtime=node.runtime()).start()
    before = files(one.bundle)
    assert "gpushare.io/applied" in json.loads(before["config.json"])["annotations"]
    command = [*node.runtime(), "--root", str(one.bundle / "other"), "create", "--bundle", str(one.bundle), one.id]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "already has a lease" in done.stderr
    assert files(one.bundle) == before
    assert node.leases() == [one.id]


# The low-level runtime


def no_program(path: Path) -> None:
    pass


def no_permission(path: Path) -> None:
    path.write_text("#!/bin/sh\n")


@pytest.mark.parametrize("make", [no_program, no_permission, Path.mkdir, os.mkfifo], ids=lambda one: one.__name__)
def test_configured_runtime_is_no_program(
    container: MakeContainer, make_node: MakeNode, simhost: Path, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "low")
    node = make_node(simhost, runtime={"path": str(tmp_path / "low")})
    for env in (ONE_GIB, {}):
        refused(node, container(["true"], env=env), CONFIG, repr(str(tmp_path / "low")), "set it to runc or crun")


def test_configured_runtime_is_relative(container: MakeContainer, make_node: MakeNode, simhost: Path) -> None:
    node = make_node(simhost, runtime={"path": "runc"})
    refused(node, container(["true"], env=ONE_GIB), CONFIG, "runtime.path", "runc")


def test_runtime_that_cannot_be_executed(
    container: MakeContainer, make_node: MakeNode, simhost: Path, tmp_path: Path
) -> None:
    """Found and executable, but no format that the kernel knows: noticed only when all is written; taken back."""
    low = tmp_path / "low"
    low.write_bytes(b"\x7fELFrubbish")
    low.chmod(0o755)
    node = make_node(simhost, runtime={"path": str(low)})
    one = container(["true"], env=ONE_GIB)
    before = one.spec
    words = [*node.runtime(), "create", "--bundle", str(one.bundle), one.id]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (KERNEL, 1) and "Exec format error" in done.stderr
    assert json.loads((one.bundle / "config.json").read_text()) == before
    assert traces(node) == []


def test_no_runtime_on_this_host(container: MakeContainer, node: Node) -> None:
    folders = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin")
    paths = [f"{folder}/{name}" for folder in folders for name in ("runc", "crun")]
    hide = "".join(f"[ ! -e {path} ] || mount --bind /dev/null {path}; " for path in paths)
    prefix = ("unshare", "--mount", "sh", "-ec", f'{hide}exec "$@"', "sh")
    refused(node, container(["true"], env=ONE_GIB), CONFIG, "runc", prefix=prefix)
    starts(node, container)


# config.json, as a file


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
def test_config_that_cannot_be_read(container: MakeContainer, node: Node, make: Callable[[Path], None]) -> None:
    one = container(["true"], env=ONE_GIB)
    (one.bundle / "config.json").unlink()
    make(one.bundle / "config.json")
    refused(node, one, USAGE, "config.json")
    starts(node, container)


# config.json, as a value


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
def test_variable_that_is_not_one(container: MakeContainer, node: Node, name: str) -> None:
    line, code, word = LINES[name]
    refused(node, container(["true"], edit=lambda spec: spec["process"]["env"].append(line)), code, word)


def test_other_variable_may_be_long(container: MakeContainer, node: Node) -> None:
    """The kernel takes 128 KiB in one; here the file counts, not the program."""
    one = container(["true"], env={**ONE_GIB, "OTHER": "x" * (100 << 10)}, runtime=node.runtime())
    assert one.run() == 0, one.stderr


@pytest.mark.parametrize("id", ["../escape", "..", "a/b", "a b", "x" * 300, "new\nline", "\u00e9"])
def test_id_that_could_leave_the_state_directory(container: MakeContainer, node: Node, id: str) -> None:
    refused(node, container(["true"], env=ONE_GIB), USAGE, "container id", id=id)
    assert not (node.state / "escape").exists() and not (node.state.parent / "escape").exists()


@pytest.mark.parametrize("key", ["gpushare.io/devices", "gpushare.io/memory"])
def test_annotation_with_a_path(container: MakeContainer, node: Node, key: str) -> None:
    one = container(["true"], annotations={"gpushare.io/memory": "1Gi", key: "../../../etc/shadow"})
    assert "shadow" in refused(node, one, USAGE, key)


# Any value at all in the fields that we read

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
    """Sets a field, and what is above it where that is missing."""
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
    """One `create` in a child of this process, so that hundreds take seconds: (exit code, stderr)."""

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
def test_whatever_is_in_there_the_answer_is_one_line(
    tried: tuple[Tried, Container, Node], changes: dict[str, Any]
) -> None:
    attempt, one, node = tried
    spec = copy.deepcopy(one.spec)
    for path, value in changes.items():
        try:
            put(spec, path, value)
        except (IndexError, ValueError, TypeError, AttributeError):
            pass  # the first change left no place for the second
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


# The driver


def test_driver_root_without_a_driver(container: MakeContainer, make_node: MakeNode, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    node = make_node(tmp_path / "bare")
    refused(node, container(["true"], env=ONE_GIB), DEVICE, "driver")


def test_driver_root_that_is_not_there(container: MakeContainer, make_node: MakeNode, tmp_path: Path) -> None:
    node = make_node(tmp_path / "missing")
    refused(node, container(["true"], env=ONE_GIB), DEVICE, "driver")


def version_of(simhost: Path) -> str:
    return (simhost / "sys/module/nvidia/version").read_text().strip()


def libraries(simhost: Path, stem: str) -> list[Path]:
    return [path for path in simhost.rglob(f"{stem}.so.{version_of(simhost)}") if not path.is_symlink()]


def test_two_driver_versions_at_once(container: MakeContainer, node: Node, simhost: Path) -> None:
    """libcuda of the loaded driver, libnvidia-ml of another: an update that was interrupted."""
    for path in libraries(simhost, "libnvidia-ml"):
        path.rename(path.with_name("libnvidia-ml.so.999.99"))
    refused(node, container(["true"], env=ONE_GIB), DEVICE, "libnvidia-ml", version_of(simhost))


def test_driver_upgrade_counts_at_the_next_start(container: MakeContainer, node: Node, simhost: Path) -> None:
    starts(node, container)
    old, new = version_of(simhost), "999.12.34"
    (simhost / "sys/module/nvidia/version").write_text(f"{new}\n")
    proc = simhost / "proc/driver/nvidia/version"
    if proc.exists():
        proc.write_text(proc.read_text().replace(old, new))
    refused(node, container(["true"], env=ONE_GIB), DEVICE, new)  # its libraries are not there yet
    for path in [path for path in simhost.rglob(f"*.so.{old}") if not path.is_symlink()]:
        path.rename(path.with_name(path.name.replace(old, new)))
    one = container(["ls", "/usr/lib/x86_64-linux-gnu"], env=ONE_GIB, runtime=node.runtime())
    assert one.run() == 0, one.stderr
    assert f"libcuda.so.{new}" in one.stdout.split() and f"libcuda.so.{old}" not in one.stdout.split()


# No room, no right to write


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An empty file system of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    rootfs.run("mount", "-t", "tmpfs", "-o", "size=256k", "gpushare-test", place)
    yield place
    rootfs.unmount_below(place)


def fill(directory: Path) -> Path:
    """Takes all that is left."""
    path = directory / "filler"
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            pass
    return path


def test_no_room_beside_config_json(node: Node, small_disk: Path, container: MakeContainer) -> None:
    starts(node, container)
    with Container(small_disk, ["true"], env=ONE_GIB) as one:
        filler = fill(small_disk)
        log_room = one.bundle.parent / f"{one.id}.log"
        log_room.symlink_to(node.config.parent / "engine.log")
        words = [*node.runtime(), "--log", str(log_room), "--log-format", "json"]
        before = files(one.bundle)
        words += ["create", "--bundle", str(one.bundle), one.id]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr.count("\n")) == (KERNEL, 1), done.stderr
        assert "No space left on device" in done.stderr and "config.json" in done.stderr
        assert files(one.bundle) == before and traces(node) == []
        filler.unlink()
    starts(node, container)


def test_bundle_that_cannot_be_written(node: Node, container: MakeContainer) -> None:
    one = container(["true"], env=ONE_GIB)
    rootfs.run("mount", "--rbind", one.bundle, one.bundle)
    rootfs.run("mount", "-o", "remount,bind,ro", one.bundle)
    try:
        refused(node, one, KERNEL, "Read-only file system", "config.json")
    finally:
        rootfs.run("umount", "--recursive", "--lazy", one.bundle)
        rootfs.unmount_below(one.bundle)
    starts(node, container)


def test_state_directory_that_is_full(node: Node, container: MakeContainer) -> None:
    starts(node, container)
    filler = fill(node.state)
    assert filler.stat().st_size > 0
    refused(node, container(["true"], env=ONE_GIB), KERNEL, "No space left on device")
    filler.unlink()
    starts(node, container)


def test_state_directory_that_cannot_be_made(container: MakeContainer, make_node: MakeNode, simhost: Path) -> None:
    node = make_node(simhost)
    parent = node.state.parent
    node.state.rmdir()
    rootfs.run("mount", "--bind", parent, parent)
    rootfs.run("mount", "-o", "remount,bind,ro", parent)
    try:
        refused(node, container(["true"], env=ONE_GIB), KERNEL, str(node.state))
    finally:
        rootfs.run("umount", parent)
    node.state.mkdir()
    starts(node, container)


def test_state_directory_that_is_read_only(node: Node, container: MakeContainer) -> None:
    starts(node, container)
    rootfs.run("mount", "-o", "remount,ro", node.state)
    try:
        refused(node, container(["true"], env=ONE_GIB), KERNEL, "Read-only file system")
    finally:
        rootfs.run("mount", "-o", "remount,rw", node.state)
    starts(node, container)


def test_configuration_that_is_wrong(node: Node, container: MakeContainer, simhost: Path) -> None:
    for content in ("version: 1\nunknown_key: 1\n", "[", "\0", "version: 2\n"):
        node.config.write_text(content)
        refused(node, container(["true"], env=ONE_GIB), CONFIG, str(node.config))
    node.config.unlink()
    node.config.mkdir()
    refused(node, container(["true"], env=ONE_GIB), CONFIG, str(node.config))
    node.config.rmdir()
    write_config(node.config, simhost)
    starts(node, container)
