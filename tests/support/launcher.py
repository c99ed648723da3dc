"""The launchers in front of fake Python programs that report their start."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from gpushare.config import oci_runtime
from gpushare.core.model import Config

from .host import BUILD

PYTHON_RAN = 42
LOW_LEVEL_RAN = 43


class Installed(NamedTuple):
    """The launchers, installed in front of fake Python programs that report their start."""

    directory: Path

    def run(self, name: str, *words: str, stdin: bytes = b"", cwd: Path | None = None) -> tuple[int, bytes]:
        program = self.directory / "bin" / name
        done = subprocess.run([program, *words], input=stdin, capture_output=True, cwd=cwd or self.directory)
        return done.returncode, done.stdout

    def runtime(self, *words: str, cwd: Path | None = None, name: str = "gpushare-runtime") -> tuple[int, bytes]:
        state = f"--gpushare-state={self.directory / 'state'}"
        return self.run(name, f"--gpushare-config={self.config}", state, *words, cwd=cwd)

    def hook(self, stage: str, state: bytes, *words: str) -> int:
        return self.run("gpushare-hook", "--state", str(self.directory / "state"), *words, stage, stdin=state)[0]

    @property
    def config(self) -> Path:
        return self.directory / "config.yaml"

    def bundle(self, text: bytes) -> bytes:
        """Write a config.json and return the state that names it."""
        (self.directory / "bundle").mkdir(exist_ok=True)
        (self.directory / "bundle" / "config.json").write_bytes(text)
        return json.dumps({"id": "c", "pid": 1, "bundle": str(self.directory / "bundle")}).encode()


def script(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def install(directory: Path) -> Installed:
    directory.mkdir(exist_ok=True)
    for name in ("gpushare-hook", "gpushare-runtime"):
        script(directory / "libexec" / name, f"cat; exit {PYTHON_RAN}")
        (directory / "bin").mkdir(exist_ok=True)
        shutil.copy(BUILD / "bin" / name, directory / "bin" / name)
    (directory / "bin" / "gpushare-runtime-cri").symlink_to("gpushare-runtime")
    script(directory / "low-level", f"printf '%s\\n' \"$@\"; exit {LOW_LEVEL_RAN}")
    one = Installed(directory)
    (directory / "state").mkdir()
    one.config.write_text("version: 1\n")
    oci_runtime.remember(str(one.config), str(directory / "state"), Config(runtime=str(directory / "low-level")))
    return one


def require_no_python(directory: Path, spec: dict[str, Any]) -> None:
    """The launcher must see that an engine's own device rules cannot open a GPU, so that an ordinary container never
    waits for Python."""
    assert spec["linux"]["resources"]["devices"]
    installed = install(directory)
    spec.pop("hooks", None)  # gpushare's own hooks, whose paths can contain a trigger
    installed.bundle(json.dumps(spec, separators=(",", ":")).encode())
    assert installed.runtime("create", "c", cwd=directory / "bundle")[0] == LOW_LEVEL_RAN
