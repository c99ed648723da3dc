"""A plan on the host's own root: parts that exist already, parts in an overlay layer, and no effect on the host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from gpushare.core import constants
from gpushare.core.errors import KernelError
from gpushare.core.ops import Cover, DeviceNode, Link, Mount, Op, Plan
from gpushare.inject import apply
from gpushare.programs import hostroot
from gpushare.system import bpf, syscalls

from tests.integration import ns_util

_RO = ("ro", "nosuid", "nodev")


def mount(source: object, target: object, kind: str = "file") -> Mount:
    return Mount(str(source), str(target), kind, _RO, "test")


@pytest.fixture
def lib(tmp_path: Path) -> Path:
    """A library directory of a host with the driver."""
    made = tmp_path / "lib"
    made.mkdir()
    (made / "libx.so.535").write_text("host's")
    (made / "libx.so.1").symlink_to("libx.so.535")
    (made / "dangling").symlink_to("nowhere")
    (tmp_path / "shim").write_text("shim")
    (tmp_path / "scratch").mkdir()
    return made


def test_existing_files_need_no_op(lib: Path) -> None:
    real, shim = lib / "libx.so.535", lib.parent / "shim"
    same: tuple[Op, ...] = (mount(real, real), mount(lib / "libx.so.1", real), Link(f"{lib}/libx.so.1", real.name, ""))
    kept: tuple[Op, ...] = (mount(shim, real), Link(f"{lib}/libx.so.1", "other", ""), Link(f"{lib}/new", real.name, ""))
    plan = hostroot.needed(Plan("c", (*same, *kept, mount("/x", "/no/socket", "socket")), ("before",)))
    assert plan.ops == kept
    assert plan.notes == ("before", "/no/socket is left out: it is not on this host")


def test_layer_is_made_only_for_missing_paths(lib: Path) -> None:
    shim = lib.parent / "shim"
    there = (
        mount(shim, lib / "libx.so.535"),
        Link(f"{lib}/libx.so.1", "other", ""),
        Cover(str(shim), "/none", _RO, ""),
    )
    private = mount(shim, "/usr/lib/gpushare/driver/libcuda-real.so.1")
    assert hostroot.layers_of((*there, private)) == []
    assert hostroot.layers_of((mount(shim, lib / "new"),)) == [str(lib)]
    assert hostroot.layers_of((Link(f"{lib}/dangling", "x", ""),)) == [str(lib)]
    (lib.parent / "alias").symlink_to(lib)
    deep = mount(shim, lib.parent / "alias" / "not" / "there" / "x")
    assert hostroot.layers_of((deep, mount(shim, lib.parent / "y"))) == [str(lib.parent), str(lib)]
    with pytest.raises(KernelError, match=r"\"/no-such/x\" is not on this host; mkdir \"/no-such\""):
        hostroot.layers_of((mount(shim, "/no-such/x"),))


def test_existing_device_node_needs_no_layer() -> None:
    null = DeviceNode("/dev/null", "/dev/null", 1, 3, False)
    assert hostroot.layers_of((null,)) == []
    for other in (null._replace(minor=5), null._replace(simulated=True), null._replace(target="/dev/nvidia77")):
        assert hostroot.layers_of((other,)) == ["/dev"]


def _in_own_namespace(scratch: Path, ops: tuple[Op, ...], look: Any) -> Any:
    """Put `ops` in place in a child's namespace and return the result of `look`."""

    def body() -> Any:
        syscalls.unshare(syscalls.CLONE_NEWNS, "test")
        plan = Plan("c", ops, ())
        kept: list[int] = []
        trees = apply.copies(plan, kept)
        layers = hostroot.layers_of(ops)
        root = hostroot.HostRoot(str(scratch))
        root.add_layers(layers)
        apply.put(root, plan, trees)
        root.finish()
        return look()

    return ns_util.in_child(body)


@pytest.mark.parametrize("kind", ["file", "dir", "socket"])
def test_no_mount_point_is_created_in_a_directory_of_the_host(lib: Path, kind: str) -> None:
    """Links of an image can lead below a directory that is mounted, such as /run/udev."""
    before = ns_util.snapshot(lib)
    inside, outside = mount(lib, "/shown", "dir"), mount(lib.parent / "shim", "/shown/libx.so.535")
    kept: list[int] = []
    for op in (mount(lib.parent / "shim", "/shown/data/b8:16", kind), mount(lib.parent / "shim", "/shown/new", kind)):
        with pytest.raises(KernelError, match='below "/shown", where gpushare mounts a directory of the host'):
            apply.copies(Plan("c", (inside, op), ()), kept)
    assert len(apply.copies(Plan("c", (inside, outside), ()), kept)) == 2
    own, deep = mount(lib, constants.PRIVATE_DIR, "dir"), f"{constants.PRIVATE_DIR}/a/a/libcuda.so.1"
    with pytest.raises(KernelError, match="where gpushare mounts"):
        apply.copies(Plan("c", (own, mount(lib.parent / "shim", deep, kind)), ()), kept)
    for fd in kept:
        os.close(fd)
    assert ns_util.snapshot(lib) == before


def test_host_with_driver_needs_only_mounts(lib: Path) -> None:
    before, mounts = ns_util.snapshot(lib), ns_util.host_mounts()
    ops = (mount(lib.parent / "shim", lib / "libx.so.535"),)

    def look() -> Any:
        (lib / "written").write_text("by the program, and kept")
        return [(lib / "libx.so.1").read_text(), os.listdir(lib.parent / "scratch")]

    assert _in_own_namespace(lib.parent / "scratch", ops, look) == ["shim", []]
    (lib / "written").unlink()
    assert ns_util.snapshot(lib) == before and ns_util.host_mounts() == mounts


def test_layer_shows_lower_files_and_keeps_mounts(lib: Path) -> None:
    before, inner = ns_util.snapshot(lib), lib / "inner"
    inner.mkdir()
    ops = (mount(lib.parent / "shim", lib / "new"), mount(lib.parent / "shim", lib / "a" / "b" / "c"))
    ops += (Link(f"{lib}/dangling", "libx.so.535", ""),)  # type: ignore[assignment]

    def look() -> Any:
        texts = [(lib / name).read_text() for name in ("new", "a/b/c", "libx.so.1", "dangling", "inner/mounted")]
        try:
            (lib / "written").write_text("lost")
        except OSError as error:
            texts.append(error.strerror or "")
        (inner / "written").write_text("kept")
        return texts

    def with_mount() -> Any:
        syscalls.unshare(syscalls.CLONE_NEWNS, "test")
        syscalls.mount_setattr(os.open("/", os.O_PATH), 0, syscalls.MS_PRIVATE, "/", recursive=True)
        tree = syscalls.detached_tmpfs({}, 0, "inner")
        syscalls.move_mount(tree, os.open(inner, os.O_PATH), "inner")
        (inner / "mounted").write_text("inner")
        return [_in_own_namespace(lib.parent / "scratch", ops, look), sorted(os.listdir(inner))]

    shown, left = ns_util.in_child(with_mount)
    assert shown == ["shim", "shim", "host's", "host's", "inner", "Read-only file system"]
    assert left == ["mounted", "written"]
    inner.rmdir()
    assert ns_util.snapshot(lib) == before


def test_op_without_layer_fails_and_host_is_unchanged(lib: Path) -> None:
    """An op without a layer fails, whatever the plan, and the host is unchanged."""
    before = ns_util.snapshot(lib)

    def body() -> Any:
        syscalls.unshare(syscalls.CLONE_NEWNS, "test")
        root = hostroot.HostRoot(str(lib.parent / "scratch"))
        errors = []
        for attempt in (
            lambda: root.mount_point(f"{lib}/new", "file"),
            lambda: root.mount_point(f"{lib}/a/b", "dir"),
            lambda: Link(f"{lib}/link", "x", "").put(root, -1),
            lambda: Link(f"{lib}/dangling", "libx.so.535", "").put(root, -1),
        ):
            try:
                attempt()
            except KernelError as error:
                errors.append("would have to be created on the host" in error.message)
        return errors

    assert ns_util.in_child(body) == [True] * 4
    assert ns_util.snapshot(lib) == before


def test_refused_layer_is_one_line(lib: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(lower: str, upper: str, work: str) -> int:
        raise syscalls.SyscallError("fsconfig", lower, 22)

    monkeypatch.setattr(syscalls, "detached_overlay", refused)
    with pytest.raises(AssertionError, match=rf"cannot put a private layer over \"{lib}\": Invalid argument"):
        _in_own_namespace(lib.parent / "scratch", (mount(lib.parent / "shim", lib / "new"),), lambda: 0)


def test_only_other_gpus_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-caps").mkdir()
    for name, major, minor in (("nvidia0", 195, 0), ("nvidia1", 195, 1), ("nvidiactl", 195, 255)):
        os.mknod(tmp_path / name, 0o020666, os.makedev(major, minor))
    os.mknod(tmp_path / "nvidia-caps" / "nvidia-cap7", 0o020666, os.makedev(240, 7))
    (tmp_path / "nvidia2").write_text("no device")
    monkeypatch.setattr(hostroot, "_DEV", str(tmp_path))
    granted = DeviceNode("/dev/nvidia0", f"{tmp_path}/nvidia0", 195, 0, False)
    hidden = {f"{tmp_path}/nvidia1": (195, 1), f"{tmp_path}/nvidia-caps/nvidia-cap7": (240, 7)}
    assert hostroot.hidden_nodes((granted,)) == hidden


def _verdict(program: bpf.Program, kind: int, access: int, major: int, minor: int) -> int:
    """The return value of a program, limited to the instructions that gpushare uses, for one device access."""
    context, registers, at = {0: kind | access << 16, 4: major, 8: minor}, [0] * 11, 0
    while True:
        code, pair, offset, value = program[at]
        target, at = pair & 15, at + 1
        if code == 0x61:
            registers[target] = context[offset]
        elif code == 0x57:
            registers[target] &= value
        elif code == 0xB7:
            registers[target] = value
        elif code == 0x55:
            at += offset if registers[target] != value else 0
        else:
            assert code == 0x95
            return registers[0]


def test_device_program_denies_only_listed_devices() -> None:
    rules = ((195, 1), (195, 3), (240, 7))
    for listed in ((), rules[:1], rules):
        program = bpf.denying(listed)
        for numbers in (*rules, (195, 0), (195, 255), (1, 3), (1, 1)):
            for access in (1, 2, 4, 7):
                assert _verdict(program, 2, access, *numbers) == int(numbers not in listed)
                assert _verdict(program, 1, access, *numbers) == 1  # a block device
    with pytest.raises(KernelError, match="too many"):
        bpf.denying(tuple((195, minor) for minor in range(600)))
