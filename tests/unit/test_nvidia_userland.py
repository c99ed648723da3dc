"""Packages of the archive, when it cannot be reached."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tools import nvidia_userland

APT_GET = """#!/bin/sh
case "$*" in
*indextargets*) printf 'Debian\\tmain\\thttp://archive.invalid/\\thttp://archive.invalid/dists/sid/\\t\\t\\n' ;;
*" update") echo 'Get:1 lists'; echo 'W: Failed to fetch http://archive.invalid/dists/sid/InRelease  Timeout' ;;
*Dir::State::status=/dev/null*) echo 'E: no source'; exit 100 ;;
*) echo 'E: a package of this machine'; exit 100 ;;
esac
"""


def test_failed_update_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """apt-get update succeeds when it could fetch nothing; only then the download shows that a package is missing."""
    program = tmp_path / "bin" / "apt-get"
    program.parent.mkdir()
    program.write_text(APT_GET)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    (tmp_path / "work").mkdir()
    with pytest.raises(nvidia_userland.UserlandError) as caught:
        nvidia_userland.fetch(tmp_path / "work", nvidia_userland.Source("", "", ("runc",)))
    assert str(caught.value) == (
        "apt-get download failed: E: no source; W: Failed to fetch http://archive.invalid/dists/sid/InRelease  Timeout"
    )
