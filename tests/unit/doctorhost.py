"""A healthy host, made of files, for the tests of `gpushare doctor`."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpushare import doctor
from gpushare.core.model import Config, Inventory
from gpushare.doctor import CHECKS, Machine, Result
from gpushare.engines.base import Settings
from gpushare.engines.host import Host
from gpushare.state import storage

from tests.support.driverhost import elf_header
from tests.unit import pure


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of a host with docker and the programs of gpushare."""
    path = tmp_path / "root"
    ours = ("opt/gpushare-runtime", "opt/gpushare-runtime-cri", "opt/gpushare-hook")
    for name in ("usr/bin/dockerd", "usr/bin/docker", *ours):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("#!/bin/sh\n")
        (path / name).chmod(0o755)
    return path


@pytest.fixture
def machine(root: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A healthy host whose driver is a value."""
    storage.prepare(str(state_dir))
    settings = Settings("/opt/gpushare-runtime", "/opt/gpushare-hook", state_dir=str(state_dir))
    config = Config(driver_root=str(root), state_dir=str(state_dir), shim_dir=str(root / "shim"))
    inventory = Inventory(str(root), pure.VERSION, (pure.device(0),), simulated=True, cuda_version="12.2")
    return Machine("/none.yaml", str(state_dir), settings, Host(str(root)), config, inventory)


def put(root: Path, name: str, text: str = "") -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def put_elf(root: Path, name: str) -> Path:
    """A program or library for this machine."""
    path = put(root, name)
    path.write_bytes(elf_header())
    return path


def ask(name: str, machine: Machine) -> Result:
    (check,) = (check for check in CHECKS if check.name == name)
    return doctor.answer(check, machine)
