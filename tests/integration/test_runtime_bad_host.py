"""gpushare-runtime on a faulty host: the low-level runtime, the driver, the disk, gpushare's own files."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.bad_starts import (
    CONFIG,
    KERNEL,
    ONE_GIB,
    MakeContainer,
    MakeNode,
    files,
    refused,
    starts,
    traces,
)
from tests.support import rootfs
from tests.support.host import Node, write_config
from tests.support.runc import Container

# The low-level runtime


def no_program(path: Path) -> None:
    pass


def no_permission(path: Path) -> None:
    path.write_text("#!/bin/sh\n")


@pytest.mark.parametrize("make", [no_program, no_permission, Path.mkdir, os.mkfifo], ids=lambda one: one.__name__)
def test_runtime_that_is_no_program_is_refused(
    container: MakeContainer, make_node: MakeNode, simhost: Path, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "low")
    node = make_node(simhost, runtime={"path": str(tmp_path / "low")})
    for env in (ONE_GIB, {}):
        refused(node, container(["true"], env=env), CONFIG, f'"{tmp_path / "low"}"', "set it to runc or crun")


def test_relative_runtime_path_is_refused(container: MakeContainer, make_node: MakeNode, simhost: Path) -> None:
    node = make_node(simhost, runtime={"path": "runc"})
    refused(node, container(["true"], env=ONE_GIB), CONFIG, "runtime.path", "runc")


def test_runtime_in_an_unknown_format_is_refused(
    container: MakeContainer, make_node: MakeNode, simhost: Path, tmp_path: Path
) -> None:
    """Found and executable, but in a format unknown to the kernel: detected after all is written, which is then
    undone."""
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


def test_missing_runtime_is_refused(container: MakeContainer, node: Node) -> None:
    folders = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin")
    paths = [f"{folder}/{name}" for folder in folders for name in ("runc", "crun")]
    hide = "".join(f"[ ! -e {path} ] || mount --bind /dev/null {path}; " for path in paths)
    prefix = ("unshare", "--mount", "sh", "-ec", f'{hide}exec "$@"', "sh")
    refused(node, container(["true"], env=ONE_GIB), CONFIG, "runc", prefix=prefix)
    starts(node, container)


# The driver


# No space, no write permission


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An empty file system of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    rootfs.run("mount", "-t", "tmpfs", "-o", "size=256k", "gpushare-test", place)
    yield place
    rootfs.unmount_below(place)


def fill(directory: Path) -> Path:
    """Use all remaining space."""
    path = directory / "filler"
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            pass
    return path


def test_full_bundle_directory_is_refused(node: Node, small_disk: Path, container: MakeContainer) -> None:
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


def test_read_only_bundle_is_refused(node: Node, container: MakeContainer) -> None:
    one = container(["true"], env=ONE_GIB)
    rootfs.run("mount", "--rbind", one.bundle, one.bundle)
    rootfs.run("mount", "-o", "remount,bind,ro", one.bundle)
    try:
        refused(node, one, KERNEL, "Read-only file system", "config.json")
    finally:
        rootfs.run("umount", "--recursive", "--lazy", one.bundle)
        rootfs.unmount_below(one.bundle)
    starts(node, container)


def test_full_state_directory_is_refused(node: Node, container: MakeContainer) -> None:
    starts(node, container)
    filler = fill(node.state)
    assert filler.stat().st_size > 0
    refused(node, container(["true"], env=ONE_GIB), KERNEL, "No space left on device")
    filler.unlink()
    starts(node, container)


def test_impossible_state_directory_is_refused(container: MakeContainer, make_node: MakeNode, simhost: Path) -> None:
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


def test_read_only_state_directory_is_refused(node: Node, container: MakeContainer) -> None:
    starts(node, container)
    rootfs.run("mount", "-o", "remount,ro", node.state)
    try:
        refused(node, container(["true"], env=ONE_GIB), KERNEL, "Read-only file system")
    finally:
        rootfs.run("mount", "-o", "remount,rw", node.state)
    starts(node, container)


def test_invalid_configuration_is_refused(node: Node, container: MakeContainer, simhost: Path) -> None:
    for content in ("version: 1\nunknown_key: 1\n", "[", "\0", "version: 2\n"):
        node.config.write_text(content)
        refused(node, container(["true"], env=ONE_GIB), CONFIG, str(node.config))
    node.config.unlink()
    node.config.mkdir()
    refused(node, container(["true"], env=ONE_GIB), CONFIG, str(node.config))
    node.config.rmdir()
    write_config(node.config, simhost)
    starts(node, container)
