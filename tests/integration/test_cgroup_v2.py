"""Device access on a pure cgroup v2 view: the attached eBPF program is replaced, with real runc and real nodes."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare.core.errors import KernelError
from gpushare.system import bpf, cgroup, syscalls

from tests.integration import access, device_matrix
from tests.integration.access import Container
from tests.integration.device_matrix import GRANTED, View, allow, matrix

image, container = access.image, access.container
test_exactly_the_granted_devices_become_accessible = access.exactly_the_granted_devices_become_accessible


@pytest.fixture(scope="module")
def view() -> Iterator[View]:
    made = View("umount -R /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup")
    yield made
    made.close()


def programs(view: View, pid: int) -> tuple[list[int], list[bpf.Program]]:
    """(ids, instructions) of the programs attached to the cgroup of `pid`."""

    def body() -> Any:
        path = cgroup.find_cgroups(pid)[1]
        ids, _ = bpf._attached(os.open(path, os.O_RDONLY), path)
        return [ids, [bpf._read(bpf._program(i, path), path) for i in ids]]

    ids, found = view.run(body)
    return ids, [tuple(bpf.Instruction(*i) for i in program) for program in found]


def join(directory: str) -> None:
    with open(f"{directory}/cgroup.procs", "w") as control:
        control.write(str(os.getpid()))


def test_rules_are_a_prefix_of_the_runtime_s_program(view: View, container: Container) -> None:
    """Repeated rules change nothing, and new ones are added."""
    v1, v2 = view.run(lambda: cgroup.find_cgroups(container[2]))
    assert v1 == "" and v2.endswith(container[0].id)
    pid = container[2]
    ids, (original,) = programs(view, pid)
    allow(view, pid)
    new_ids, (program,) = programs(view, pid)
    assert len(new_ids) == 1 and new_ids != ids
    assert bpf.split(program) == (GRANTED, original)
    allow(view, pid, GRANTED[:1])
    assert programs(view, pid)[0] == new_ids
    allow(view, pid, ((510, 0), (195, 0)))
    (program,) = programs(view, pid)[1]
    assert bpf.split(program)[0] == (*GRANTED, (510, 0))


def test_undo_and_another_process_remove_access(view: View, container: Container) -> None:
    """Undo restores the same program."""
    runc, rootfs, pid = container
    before, attached = matrix(runc, rootfs), programs(view, pid)
    view.run(lambda: cgroup.allow_devices(pid, GRANTED)())
    assert programs(view, pid) == attached
    assert matrix(runc, rootfs) == before
    allow(view, pid)
    view.run(lambda: cgroup.revoke(pid, GRANTED[:1]))
    half = matrix(runc, rootfs)
    assert half["nvidia0 rw"] == device_matrix.EPERM
    assert half["nvidiactl rw"] == device_matrix.ENXIO
    view.run(lambda: cgroup.revoke(pid, GRANTED))
    assert matrix(runc, rootfs) == before
    assert programs(view, pid)[1] == attached[1]


def test_each_program_of_a_cgroup_is_extended(view: View, container: Container) -> None:
    """The kernel requires all programs to allow an access: an unextended program of another manager would still deny
    it."""
    runc, rootfs, pid = container
    _, (original,) = programs(view, pid)

    def add() -> None:
        path = cgroup.find_cgroups(pid)[1]
        second = bpf.load((*original[:-2], *original[-2:]), "second")
        attr = bpf._attr("IIIII", os.open(path, os.O_RDONLY), second, 6, 2, 0)
        syscalls.bpf(8, attr, "attach second")

    view.run(add)
    assert len(programs(view, pid)[0]) == 2
    before = matrix(runc, rootfs)
    allow(view, pid)
    device_matrix.check_granted(before, matrix(runc, rootfs))


def test_concurrently_replaced_program_is_read_again(view: View, container: Container) -> None:
    runc, rootfs, pid = container
    before = matrix(runc, rootfs)

    def body() -> int:
        path = cgroup.find_cgroups(pid)[1]
        directory = os.open(path, os.O_RDONLY)
        real, raced = bpf._exchange, [0]

        def racing(directory_fd: int, old: int, new: int, flags: int, what: str) -> None:
            if not raced[0]:
                raced[0] += 1
                other = bpf.load(bpf.reusable(bpf._read(old, path), path), path)
                real(directory, old, other, flags, what)  # the runtime was faster: `old` is gone
            real(directory_fd, old, new, flags, what)

        bpf._exchange = racing
        cgroup.allow_devices(pid, GRANTED)
        return raced[0]

    assert view.run(body) == 1
    device_matrix.check_granted(before, matrix(runc, rootfs))


def test_program_that_cannot_be_reused_is_refused_and_kept(view: View, container: Container) -> None:
    runc, rootfs, pid = container
    before = matrix(runc, rootfs)

    def body() -> str:
        path = cgroup.find_cgroups(pid)[1]
        directory = os.open(path, os.O_RDONLY)
        (identity,), flags = bpf._attached(directory, path)
        call = bpf.Instruction(0x85, 0, 0, 15)  # bpf_get_current_uid_gid()
        save, restore = bpf.Instruction(0xBF, 0x16, 0, 0), bpf.Instruction(0xBF, 0x61, 0, 0)  # r6 = r1; r1 = r6
        old = bpf._program(identity, path)
        other = bpf.load((save, call, restore, *bpf._read(old, path)), path)
        bpf._exchange(directory, old, other, flags, path)
        try:
            cgroup.allow_devices(pid, GRANTED)
        except KernelError as error:
            return str(error)
        return ""

    message = view.run(body)
    assert "(0x85) that gpushare cannot load again" in message
    assert "gpushare-runtime" in message
    assert matrix(runc, rootfs) == before


def test_cgroup_without_rules_is_not_changed(view: View, tmp_path: Path) -> None:
    def body() -> list[int]:
        path = f"/sys/fs/cgroup/gs-open-{os.getpid()}"
        os.mkdir(path)
        try:
            bpf.allow(path, GRANTED)()
            return bpf._attached(os.open(path, os.O_RDONLY), path)[0]
        finally:
            os.rmdir(path)

    assert view.run(body) == []


def test_mknod_is_never_granted(view: View, tmp_path: Path) -> None:
    """Runtimes allow mknod of any device by default, so this test uses a program that denies all."""
    deny = (bpf.Instruction(0xB7, 0, 0, 0), bpf.Instruction(0x95, 0, 0, 0))
    node, other = str(tmp_path / "node"), str(tmp_path / "other")
    os.mknod(node, 0o020666, os.makedev(195, 0))

    def attempt(call: Any) -> int:
        try:
            call()
        except OSError as error:
            return error.errno or 0
        return 0

    def body() -> list[int]:
        path = f"/sys/fs/cgroup/gs-deny-{os.getpid()}"
        os.mkdir(path)
        try:
            directory = os.open(path, os.O_RDONLY)
            syscalls.bpf(8, bpf._attr("IIIII", directory, bpf.load(deny, path), 6, 2, 0), "attach")
            join(path)
            answers = [attempt(lambda: os.open(node, os.O_RDWR))]
            bpf.allow(path, GRANTED)
            answers.append(attempt(lambda: os.open(node, os.O_RDWR)))
            answers.append(attempt(lambda: os.mknod(other, 0o020666, os.makedev(195, 0))))
            answers.append(attempt(lambda: os.open("/dev/null", os.O_RDWR)))
            return answers
        finally:
            join("/sys/fs/cgroup")
            os.rmdir(path)

    assert view.run(body) == [errno.EPERM, errno.ENXIO, errno.EPERM, errno.EPERM]


def test_pinned_program_is_replaced(view: View) -> None:
    """crun 1.28 gives systemd the pin of a scope's program, which systemd attaches at each daemon-reload. The pin of
    another program stays."""

    def body() -> list[list[bool]]:
        path, pins = f"/sys/fs/cgroup/gs-{os.getpid()}.scope", "/sys/fs/bpf/crun"
        subprocess.run(["mount", "-t", "bpf", "gpushare-test", "/sys/fs/bpf"], check=True)
        os.mkdir(pins)
        os.mkdir(path)
        try:
            directory = os.open(path, os.O_RDONLY)
            bpf.attach(path, bpf.denying(GRANTED))
            (first,), _ = bpf._attached(directory, path)
            own, other = f"{pins}/gs-{os.getpid()}_scope", f"{pins}/gs-{os.getpid()}"
            bpf._pin(bpf._program(first, path), own)
            bpf._pin(bpf.load(bpf.denying(GRANTED), path), other)
            kept = bpf._id_of_pinned(other)
            seen = []
            undo = bpf.allow(path, GRANTED)
            for change in (undo, lambda: None):
                (now,), _ = bpf._attached(directory, path)
                seen.append([now == first, bpf._id_of_pinned(own) == now, bpf._id_of_pinned(other) == kept])
                change()
            return seen
        finally:
            os.rmdir(path)
            subprocess.run(["umount", "/sys/fs/bpf"], check=True)

    assert view.run(body) == [[False, True, True], [True, True, True]]


# Programs as values


def test_only_a_complete_prefix_is_recognised() -> None:
    program = (bpf.Instruction(0xB7, 0, 0, 0), bpf.Instruction(0x95, 0, 0, 0))
    extended = bpf.with_rules(program, GRANTED)
    assert bpf.split(extended) == (GRANTED, program)
    assert bpf.split(program) == ((), program)
    for index in range(len(extended) - len(program)):
        changed = (*extended[:index], extended[index]._replace(code=0x05), *extended[index + 1 :])
        assert bpf.split(changed) == ((), changed)
    assert bpf.split(extended[:-2]) == ((), extended[:-2])
    assert bpf.with_rules(program, ()) == program


@pytest.mark.parametrize("rule", [(-1, 0), (4096, 0), (195, 1 << 20), (195, -1)])
def test_invalid_device_numbers_are_refused(rule: tuple[int, int]) -> None:
    with pytest.raises(KernelError, match="out of range"):
        bpf.with_rules((), [rule])


@pytest.mark.parametrize(
    "bad",
    [(0x85, 0, 0, 1), (0x18, 0x11, 0, 3), (0xDB, 0x12, 0, 0), (0xBF, 0x0B, 0, 0), (0x30, 0, 0, 0), (0x8D, 0, 0, 0)],
    ids=["call", "map", "atomic", "hidden register", "old load", "indirect call"],
)  # fmt: skip
def test_instructions_rewritten_by_the_verifier_are_refused(bad: tuple[int, int, int, int]) -> None:
    with pytest.raises(KernelError, match="cannot load again"):
        bpf.reusable((bpf.Instruction(*bad), bpf.Instruction(0, 0, 0, 0)), "the program")


def test_plain_64_bit_constant_is_reusable() -> None:
    program = (bpf.Instruction(0x18, 3, 0, -1), bpf.Instruction(0, 0, 0, 7), bpf.Instruction(0x95, 0, 0, 0))
    assert bpf.reusable(program, "x") == program
