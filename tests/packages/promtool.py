"""Prometheus' own tool, of the distribution's package, unpacked once into build/promtool; nothing is installed."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from tests.lib.host import BUILD
from tests.lib.rootfs import run


def program() -> Path:
    target = BUILD / "promtool"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=BUILD) as work:
            fetch = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", "prometheus"]
            if subprocess.run(fetch, cwd=work, capture_output=True).returncode:  # no package lists, or old ones
                run("apt-get", "-q", "update")
                run(*fetch, cwd=Path(work))
            (package,) = Path(work).glob("prometheus_*.deb")
            run("dpkg-deb", "-x", package, Path(work) / "root")
            (Path(work) / "root/usr/bin/promtool").rename(target)
    return target


def promtool(*words: str | Path, text: str = "") -> tuple[int, str]:
    """(exit status, all that it says)"""
    command = [str(word) for word in (program(), *words)]
    done = subprocess.run(command, input=text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    return done.returncode, done.stdout
