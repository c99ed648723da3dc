"""Locks that another process may never release."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from gpushare.core.errors import KernelError
from gpushare.system import filelock


def test_command_gives_up_on_unreleased_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "lock")
    monkeypatch.setattr(filelock, "WAIT_S", 0.0)
    first, second = filelock.open_own(path), filelock.open_own(path)
    try:
        filelock.take(first, path)
        with pytest.raises(KernelError, match="another process has held this lock for 0 s; find it: fuser -v "):
            filelock.take(second, path)
        fcntl.flock(first, fcntl.LOCK_UN)
        filelock.take(second, path)
    finally:
        os.close(first)
        os.close(second)


@pytest.mark.parametrize("kind", ["readable by others", "of two names", "a FIFO", "another's"])
def test_lock_file_of_other_user_or_kind_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "lock"
    if kind == "a FIFO":
        os.mkfifo(path, 0o600)
    else:
        path.touch(0o600)
    if kind == "readable by others":
        path.chmod(0o644)
    elif kind == "of two names":
        os.link(path, tmp_path / "other")
    elif kind == "another's":
        os.chown(path, 65534, 65534)
    with pytest.raises(KernelError, match="is not a file of uid 0 alone"):
        filelock.open_own(str(path))
