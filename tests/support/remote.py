"""Another process that runs the driver: Python statements sent to it one at a time.

with Remote(root) as p:
    p.do("cuda.context()")
    address = p.get("cuda.alloc(1 << 20)")
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Optional

LIBDIR = "usr/lib/x86_64-linux-gnu"
REPOSITORY = Path(__file__).resolve().parents[2]

CHILD = """
import os, sys
sys.path.insert(0, sys.argv[2])
out = os.fdopen(os.dup(1), "w")
from tests.conformance.driver import Driver
names = {"cuda": Driver(sys.argv[1]), "os": os}
print("ready", file=out, flush=True)
for line in sys.stdin:
    kind, code = line[0], eval(line[1:])
    try:
        if kind == "x":
            exec(code, names)
            reply = (True, None)
        else:
            reply = (True, eval(code, names))
    except Exception as error:
        reply = (False, f"{type(error).__name__}: {error}")
    print(repr(reply), file=out, flush=True)
"""


class RemoteError(Exception):
    """The statement raised in the other process; the text is its error."""


class Remote:
    """A process with the simulated libcuda of a host root (or any libcuda, by path)."""

    def __init__(self, library: Path, env: Optional[dict[str, str]] = None, wrapper: tuple[str, ...] = ()) -> None:
        path = library if library.is_file() else library / LIBDIR / "libcuda.so.1"
        self.process = subprocess.Popen(
            [*wrapper, sys.executable, "-c", CHILD, str(path), str(REPOSITORY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        if self._read() != "ready\n":
            raise RemoteError("the process with the driver did not start")

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def _send(self, kind: str, code: str) -> Any:
        assert self.process.stdin is not None
        print(kind + repr(code), file=self.process.stdin, flush=True)
        line = self._read()
        if not line:
            raise RemoteError(f"the process ended with {self.process.wait()} at: {code}")
        ok, value = eval(line)
        if not ok:
            raise RemoteError(value)
        return value

    def do(self, code: str) -> None:
        """Execute statements."""
        self._send("x", code)

    def get(self, expression: str) -> Any:
        """The value of an expression of plain data."""
        return self._send("e", expression)

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """Send SIGKILL and wait until the process is gone."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
