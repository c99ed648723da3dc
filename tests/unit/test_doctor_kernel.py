"""gpushare doctor: rights, kernel, cgroups."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpushare.doctor import FAIL, OK, SKIP, WARN, Machine, Result, kernel
from gpushare.system import bpf, mountns, rootless, syscalls

from tests.unit.doctorhost import ask, machine, root

__all__ = ["machine", "root"]  # fixtures


def test_rights_report_root_or_rootless(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask("rights", machine) == Result(OK, "root")
    monkeypatch.setattr(rootless, "is_rootless", lambda: True)
    told = ask("rights", machine)
    assert told.result == WARN and "cooperative only: no device cgroup, and shares of other users" in told.detail
    assert ask("library loads", machine).result == SKIP


def failing(number: int) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise syscalls.SyscallError("call", "/", number)

    return call


def test_kernel_of_this_machine_passes(machine: Machine) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert ask("kernel", machine).result == OK
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "call", ["open_tree", "detached_tmpfs", "pidfd_open", "openat2", "mount_setattr", "move_mount"]
)
def test_kernel_without_system_call_fails(machine: Machine, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(syscalls, call, failing(errno.ENOSYS))
    result = ask("kernel", machine)
    assert result.result == FAIL and "lacks" in result.detail and "5.12" in result.hint
    monkeypatch.setattr(syscalls, call, failing(errno.EPERM))
    result = ask("kernel", machine)
    assert result.result == FAIL and "not permitted" in result.detail
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert ask("kernel", machine).result == SKIP


def overlay(directory: Path) -> Path:
    """Mount an overlay, which cannot hide the owner of files from a container.

    The mount namespace is private (conftest.py).
    """
    for name in ("lower", "upper", "work", "root"):
        (directory / name).mkdir()
    options = ",".join(f"{name}dir={directory / name}" for name in ("lower", "upper", "work"))
    subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", directory / "root"], check=True)
    return directory / "root"


def test_file_system_without_idmapped_mounts_is_named(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.config is not None
    (tmp_path / "shim").mkdir()
    machine = machine._replace(config=machine.config._replace(shim_dir=str(tmp_path / "shim")))
    before = len(os.listdir("/proc/self/fd"))
    assert ask("file leases", machine).result == OK
    assert len(os.listdir("/proc/self/fd")) == before
    (tmp_path / "disk").mkdir()
    place = overlay(tmp_path / "disk")
    try:
        machine = machine._replace(config=machine.config._replace(shim_dir=str(place)))
        result = ask("file leases", machine)
        assert result.result == WARN and f"{place} (overlay) cannot hide" in result.detail, result
        assert "fs.leases-enable=0" in result.hint
        monkeypatch.setattr(kernel, "short_read", lambda path: "0\n")
        assert ask("file leases", machine).result == OK
    finally:
        subprocess.run(["umount", place], check=True)


def hierarchy(kind: str, options: str = "") -> mountns.MountEntry:
    (one, *_) = mountns.read_mounts()
    return one._replace(fstype=kind, super_options=options)


@pytest.mark.parametrize(
    ("mounts", "load", "result", "words"),
    [
        ((), None, FAIL, "no cgroup"),
        ((("cgroup", "rw,cpu"),), None, FAIL, "no cgroup"),
        ((("cgroup", "rw,devices"),), None, OK, "v1,"),
        ((("cgroup", "rw,devices"), ("cgroup2", "rw")), None, OK, "hybrid"),
        ((("cgroup2", "rw"),), None, OK, "the kernel loads device programs"),
        ((("cgroup2", "rw"),), failing(errno.EPERM), WARN, "cannot be loaded"),
    ],
)
def test_cgroup_hierarchies_are_checked(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, mounts: Any, load: Any, result: str, words: str
) -> None:
    found = [hierarchy(*one) for one in mounts]
    monkeypatch.setattr(mountns, "read_mounts", lambda: found)
    monkeypatch.setattr(bpf, "load", load or (lambda *_: os.open("/", os.O_RDONLY)))
    said = ask("cgroups", machine)
    assert said.result == result and words in said.detail
