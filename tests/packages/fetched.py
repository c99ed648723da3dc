"""Programs of the distribution's packages, each unpacked once into build/fetched; nothing is installed."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from tests.support.host import BUILD
from tests.support.rootfs import run


def program(package: str, path: str) -> Path:
    """Return `path` of that package. It uses this machine's libraries."""
    target = BUILD / "fetched" / Path(path).name
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as work:
            fetch = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", package]
            if subprocess.run(fetch, cwd=work, capture_output=True).returncode:  # missing or outdated package lists
                run("apt-get", "-q", "update")
                run(*fetch, cwd=Path(work))
            (file,) = Path(work).glob(f"{package}_*.deb")
            run("dpkg-deb", "-x", file, Path(work) / "root")
            (Path(work) / "root" / path).rename(target)
    return target


def call(program: Path, *args: str | Path, text: str = "") -> tuple[int, str]:
    """(exit status, all output)"""
    command = [str(word) for word in (program, *args)]
    done = subprocess.run(command, input=text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    return done.returncode, done.stdout
