"""A host's root with docker's configuration, and `gpushare runtime configure` against it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpushare.cli import main

HAND = '{\n  "log-driver": "json-file",\n  "dns": ["1.1.1.1", "8.8.8.8"],\n  "default-runtime": "runc"\n}\n'


def tree(root: Path) -> dict[str, Any]:
    """Map every file and folder below `root` to its mode and bytes."""
    found = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(root))] = (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, content)
    return found


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """An installation: bin/gpushare-runtime and bin/gpushare-hook."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("gpushare-runtime", "gpushare-runtime-cri", "gpushare-hook"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "etc").mkdir(parents=True)
    return tmp_path / "root"


@pytest.fixture
def cli(root: Path, programs: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """cli(*arguments of `runtime configure`) -> (exit code, standard output, standard error)."""

    def run(*args: str) -> tuple[int, str, str]:
        where = ("--root", str(root), "--program", str(programs / "gpushare-runtime"))
        code = main(["runtime", "configure", *args, *where])
        return (code, *capfd.readouterr())

    return run


@pytest.fixture
def daemon_json(root: Path) -> Path:
    (root / "etc/docker").mkdir()
    path = root / "etc/docker/daemon.json"
    path.write_text(HAND)
    return path
