"""Build tests/integration/programs/busy.c, and run it on a simulated host without shim or container."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from .host import BUILD, TREE

PROGRAMS = TREE / "tests" / "integration" / "programs"
SOURCES = tuple(PROGRAMS / name for name in ("busy.c", "busy_cuda.c", "busy_random.c", "busy_work.c"))
LIBDIR = "usr/lib/x86_64-linux-gnu"


def build(output: Path = BUILD / "busy") -> Path:
    """Build the program if a source is newer, and return its path. Needs gcc."""
    newest = max(path.stat().st_mtime for path in (*SOURCES, PROGRAMS / "busy.h"))
    if not output.exists() or output.stat().st_mtime < newest:
        made = output.with_name(f"{output.name}.{os.getpid()}")
        flags = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror")
        subprocess.run(["gcc", *flags, "-o", made, *SOURCES, "-ldl", "-lpthread"], check=True)
        made.replace(output)  # a running old program keeps its file
    return output


def words(**options: Any) -> list[str]:
    """The options as arguments: words(mode="sync", mark=0)."""
    return [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]


class Busy:
    """The program on a simulated host, ready to begin. `wrapper` precedes its command line."""

    def __init__(self, simhost: Path, wrapper: tuple[str, ...] = (), **options: Any) -> None:
        self.process = subprocess.Popen(
            [*wrapper, str(build()), *words(**options, wait=1)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "LD_LIBRARY_PATH": str(simhost / LIBDIR)},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line != "ready\n":
            self.close()
            raise RuntimeError(f"busy printed {line!r}")

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def result(self, timeout_s: float = 60) -> dict[str, Any]:
        """Wait for the program and return its result."""
        out, _ = self.process.communicate(timeout=timeout_s)
        report: dict[str, Any] = json.loads(out)
        return report

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Busy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
