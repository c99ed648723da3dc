"""The low-level runtime that gpushare-runtime executes: configured, or found once, always by absolute path."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from gpushare.config import oci_runtime
from gpushare.config.config import load_config
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


def test_runtime_path_that_is_gpushare_is_refused(put: Callable[..., str], tmp_path: Path) -> None:
    """It would execute itself for ever (shared/cases/engines/08): refused by `config check`, by each start, and when an
    earlier version has already remembered it."""
    ours, config, state = put("elsewhere/gpushare-runtime"), tmp_path / "config.yaml", tmp_path / "state"
    (tmp_path / "runc").symlink_to(ours)
    state.mkdir()
    for path in (ours, str(tmp_path / "runc")):
        with pytest.raises(ConfigError, match="runtime.path .* is gpushare itself; set it to runc or crun"):
            oci_runtime.find(Config(runtime=path))
        config.write_text(f"version: 1\nruntime: {{path: {path}}}\n")
        wrong = f"{config}:2: runtime.path: .* is gpushare itself; set it to runc or crun, or leave it empty"
        with pytest.raises(ConfigError, match=wrong):
            load_config(str(config))
        former = {"version": "2", "config": str(config), "identity": oci_runtime.identity(str(config)), "runtime": path}
        (state / oci_runtime.FILE).write_text("".join(f"{key} {value}\n" for key, value in former.items()))
        with pytest.raises(ConfigError, match=wrong):
            oci_runtime.runtime_of(str(config), str(state))


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


@pytest.mark.parametrize(
    ("version", "gives"),
    [
        ("runc version 1.1.5+ds1", False),
        ("runc version 1.1.2", False),
        ("runc version 1.1.15+ds1", True),
        ("runc version 1.3.6+ds1", True),
        ("crun version 1.8.1", False),
        ("crun version 1.21", True),
        ("crun version 1.28", True),
        ("runsc version release-20250101.0", False),
    ],
)
def test_refresh_remembers_runtimes_that_give_systemd_the_rules(
    put: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, gives: bool
) -> None:
    config, state, runc = str(tmp_path / "config.yaml"), str(tmp_path / "state"), put("second/runc")
    os.mkdir(state)
    Path(config).write_text("version: 1\n")
    monkeypatch.setattr(oci_runtime, "version", lambda path: version)
    assert not oci_runtime.gives_rules(config, state)
    oci_runtime.remember(config, state, Config())
    oci_runtime.remember_scopes(config, state)
    assert not oci_runtime.gives_rules(config, state)  # a script may run another program tomorrow
    Path(runc).write_bytes(b"\x7fELF")
    oci_runtime.remember_scopes(config, state)
    assert oci_runtime.gives_rules(config, state) == gives
    assert oci_runtime.runtime_of(config, state) == runc
    assert not oci_runtime.gives_rules(f"{config}2", state)


@pytest.mark.parametrize("changed", ["second/runc", "config.yaml"])
def test_changed_runtime_or_configuration_is_unknown(
    put: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    config, state = str(tmp_path / "config.yaml"), str(tmp_path / "state")
    os.mkdir(state)
    Path(config).write_text("version: 1\n")
    Path(put("second/runc")).write_bytes(b"\x7fELF")
    monkeypatch.setattr(oci_runtime, "version", lambda path: "runc version 1.3.6")
    oci_runtime.remember(config, state, Config())
    oci_runtime.remember_scopes(config, state)
    assert oci_runtime.gives_rules(config, state)
    (tmp_path / changed).write_bytes((tmp_path / changed).read_bytes() + b"\n# edited\n")
    assert not oci_runtime.gives_rules(config, state)


def test_runtime_without_a_version_is_unknown(put: Callable[..., str], tmp_path: Path) -> None:
    """Neither a program that cannot run, nor a state directory without a runtime, fails the refresh."""
    config, state = str(tmp_path / "config.yaml"), str(tmp_path / "state")
    os.mkdir(state)
    oci_runtime.remember_scopes(config, state)
    Path(put("second/runc")).write_bytes(b"\x7fELF")
    oci_runtime.remember(config, state, Config())
    oci_runtime.remember_scopes(config, state)
    assert not oci_runtime.gives_rules(config, state)
