"""Requirements of the check `containers`, and reports of missing ones. test_gpu_check.py starts containers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.hardware import checks_containers, checks_memory, fakes, processes
from tests.hardware.session import Result, Session


def test_runc_can_be_carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(checks_containers, "CARRIED", tmp_path)
    with pytest.raises(processes.Absent, match="no runc, neither in PATH nor in build/gpu"):
        checks_containers.runc()
    (tmp_path / "runc").touch(0o755)
    assert checks_containers.runc() == str(tmp_path / "runc")


def test_bundle_can_be_carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_containers, "TREE", tmp_path)
    monkeypatch.setattr(checks_containers, "BUNDLED", tmp_path / "gpushare-runtime")
    with pytest.raises(processes.Absent, match="make dist"):
        checks_containers.runtime_program()
    (tmp_path / "gpushare-runtime").touch(0o755)
    assert checks_containers.runtime_program() == (str(tmp_path / "gpushare-runtime"), False)


def test_files_that_a_container_would_not_see_are_mounted(tmp_path: Path) -> None:
    assert checks_containers.mounted_apart((str(tmp_path),)) == [os.path.realpath(tmp_path)], "below /tmp"
    assert checks_containers.mounted_apart(("/",)) == []
    assert checks_containers.mounted_apart(("/proc/self/..", "/proc")) == ["/proc"]
    mounts = checks_containers.spec(Path("/root"), ["true"], {"A": "b"}, "name")["mounts"]
    assert {"/proc", "/dev", "/tmp"} <= {one["destination"] for one in mounts}


def session(tmp_path: Path) -> Session:
    machine = fakes.namespace(simhost=None, uuid="GPU-0", shim=tmp_path, total_bytes=1 << 34)
    return Session(machine, time.monotonic() + 60, True, tmp_path, None, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("of_memory", "of_compute"), [("held", "held"), ("missed", "held"), ("held", "missed")])
def test_containers_hold_if_every_part_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_memory: str, of_compute: str
) -> None:
    class Engine:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Engine:
            return self

        def __exit__(self, *_: object) -> None: ...
        def container(self, **request: str) -> dict[str, str]:
            assert request["devices"] == "GPU-0"
            return request

    def fill(_: Session, container: Any, way: str, limit: int) -> Result:
        assert (container["memory"], way) == (str(limit), "plain")
        return Result(of_memory, "of memory", {"got_bytes": 1})

    monkeypatch.setattr(checks_containers, "Engine", Engine)
    monkeypatch.setattr(checks_memory, "fill_in", fill)
    monkeypatch.setattr(checks_containers, "has_torch", lambda: True)
    shared = iter([Result(of_compute, "of compute", {}), Result("held", "of PyTorch", {})])
    monkeypatch.setattr(checks_containers, "shared", lambda *_: next(shared))
    result = checks_containers.containers(session(tmp_path))
    held = of_memory == of_compute == "held"
    assert result.verdict == ("held" if held else "missed")
    assert list(result.values) == ["memory", "compute", "PyTorch"] and result.values["memory"]["got_bytes"] == 1
    assert result.note == (
        "memory: of memory; compute: of compute; PyTorch: of PyTorch"
        if held
        else "memory: of memory"
        if of_memory == "missed"
        else "compute: of compute"
    )


def test_container_needs_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(processes.Absent, match="needs root"):
        checks_containers.containers(session(tmp_path))
