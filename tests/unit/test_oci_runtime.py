"""The low-level runtime that gpushare-runtime executes: configured, or found once, always by absolute path."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from gpushare.config import oci_runtime
from gpushare.core.errors import ConfigError
from gpushare.core.model import Config


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """put(name) makes a program below the searched directories, `first` and `second`."""
    monkeypatch.setattr(oci_runtime, "_DIRECTORIES", (str(tmp_path / "first"), str(tmp_path / "second")))

    def program(name: str, mode: int = 0o755) -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(mode)
        return str(path)

    return program


def test_runtime_is_found_in_system_directories_not_in_path(
    put: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.path.dirname(put("elsewhere/runc")))
    put("runc")
    with pytest.raises(ConfigError, match=r"no runc or crun in .*/first:.*/second; install runc, or set runtime\.path"):
        oci_runtime.find(Config())
    crun = put("first/crun")
    assert oci_runtime.find(Config()) == crun
    put("first/runc", mode=0o644)  # not executable
    runc = put("second/runc")
    assert oci_runtime.find(Config()) == runc  # runc precedes crun in any directory
    assert oci_runtime.find(Config(runtime=crun)) == crun
    assert all(os.path.isabs(path) for path in oci_runtime._DIRECTORIES)


def test_gpushare_runtime_is_never_its_own_low_level_runtime(put: Callable[..., str], tmp_path: Path) -> None:
    """An administrator put gpushare-runtime in runc's place, as other runtimes are."""
    ours = put("elsewhere/gpushare-runtime")
    (tmp_path / "first").mkdir()
    (tmp_path / "first/runc").symlink_to(ours)
    crun = put("second/crun")
    assert oci_runtime.find(Config()) == crun


def test_runtime_is_searched_once(put: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later calls, also of the launcher, read the result until the configuration changes or the program is gone."""
    config, state, runc = tmp_path / "config.yaml", tmp_path / "state", put("second/runc")
    config.write_text("version: 1\n")
    state.mkdir()
    assert oci_runtime.runtime_of(str(config), str(state)) == runc
    assert f"runtime {runc}" in (state / oci_runtime.FILE).read_text().splitlines()
    better = put("first/runc")
    with monkeypatch.context() as patched:
        patched.setattr(oci_runtime, "find", None)
        assert oci_runtime.runtime_of(str(config), str(state)) == runc
    os.unlink(runc)
    assert oci_runtime.runtime_of(str(config), str(state)) == better
    config.write_text(f"version: 1\nruntime: {{path: {put('third/crun')}}}\n")
    assert oci_runtime.runtime_of(str(config), str(state)) == str(tmp_path / "third/crun")
