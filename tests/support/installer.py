"""Run install.py of the installer's image as its pod does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from .host import TREE

FOLDER = TREE / "packaging" / "kubernetes" / "installer"


class Pod:
    """One run of the image, whose root is `image`. `setup`: shell commands in the pod's own mount namespace, which
    leave the node visible only at /host."""

    def __init__(self, image: Path, setup: str, *arguments: str, **variables: str) -> None:
        self.image = image
        dockerfile = (FOLDER / "Dockerfile").read_text()
        (entry,) = (line for line in dockerfile.splitlines() if line.startswith("ENTRYPOINT "))
        words = json.loads(entry[len("ENTRYPOINT ") :])
        own = ["/usr/bin/unshare", "--mount", "--propagation", "unchanged", "/bin/sh", "-ec"]
        environment = {"LC_ALL": "C", "PATH": os.environ["PATH"], **variables}
        self.process = subprocess.Popen(
            [*own, f'{setup}\nexec /usr/sbin/chroot "$@"', "sh", str(image), *words, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []

    @property
    def ready(self) -> bool:
        """Whether the readiness probe succeeds."""
        return (self.image / "ready").exists()

    def until(self, end: str) -> None:
        """Read lines of the log up to one that begins so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if self.lines[-1].startswith(end):
                return
        pytest.fail(f"no {end!r} in {self.lines}")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        self.process.wait(timeout=60)
        return self.process.returncode

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=60)

    def close(self) -> None:
        """Kill the pod if it still runs."""
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
