"""Run programs with a time limit and end all their processes: a hanging program must not stop the whole check."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Optional, Protocol

from tests.hardware.place import CANNOT, TREE

KILLED_WAIT_S = 5.0  # do not wait longer for a killed process: the driver may keep it in the kernel


# As faulthandler writes them: the first line, and then the innermost call first
CRASHED = "Fatal Python error: "
CRASHED_IN = re.compile(r'  File ".*?([^/]*)", line (\d+) in ')
MOST_STDERR = 4000  # characters of a failed program's stderr that are kept


class Failed(Exception):
    """A program failed; the text is for the table. `stderr`: the end of what the program printed there."""

    def __init__(self, text: str, stderr: str = "") -> None:
        super().__init__(text)
        self.stderr = stderr.strip()[-MOST_STDERR:]


class Absent(Exception):
    """This machine lacks what a check needs."""


class Inside(Protocol):
    """Where a program runs: a Place, or a container."""

    def command(self, args: list[str]) -> list[str]: ...


class Tenant:
    """A program of tests/hardware/tenants in its own session, which reads lines and prints lines of JSON.

    `place` None: it runs natively.
    """

    def __init__(
        self,
        what: str,
        deadline: float,
        place: Optional[Inside] = None,
        before: Sequence[str] = (),
        **arguments: Any,
    ) -> None:
        """`deadline`: the value of time.monotonic() at which it is killed. `before`: a command that executes it."""
        args = [*before, sys.executable, "-m", "tests.hardware.tenant", what, json.dumps(arguments)]
        self.what, self.deadline = what, deadline
        self._rest = b""
        self._errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            place.command(args) if place else args,
            cwd=TREE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )

    def __enter__(self) -> Tenant:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the program, whatever it is doing."""
        end(self.process)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass
        self._errors.close()

    def go(self, **what: Any) -> None:
        """Send the program a line."""
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps(what).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._failed() from None

    def receive(self) -> Any:
        """Return the program's next line. Raises Failed or Absent if there is none by the deadline."""
        assert self.process.stdout
        fd = self.process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                left_s = self.deadline - time.monotonic()
                if left_s <= 0 or not selector.select(left_s):
                    raise Failed(f"{self.what}: timed out; {self._said()}".rstrip("; "), self._stderr())
                data = os.read(fd, 65536)
                if not data:
                    raise self._failed()
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        answer = json.loads(line)
        if "absent" in answer:
            raise Absent(answer["absent"])
        if "failed" in answer:
            raise Failed(f"{self.what}: {answer['failed']}", self._stderr())
        return answer

    def _stderr(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()

    def _said(self) -> str:
        lines = self._stderr().splitlines()
        crash = next((at for at, line in enumerate(lines) if line.startswith(CRASHED)), len(lines))
        where = next((match for match in map(CRASHED_IN.match, lines[crash:]) if match), None)
        said = lines[crash - 1][:200] if crash else ""
        return f"{said} (in {where[1]}, line {where[2]})".strip() if where else said

    def _failed(self) -> Exception:
        try:
            code = self.process.wait(KILLED_WAIT_S)
        except subprocess.TimeoutExpired:
            code = 0
        if code == CANNOT:
            return Absent(f"no private mounts here ({self._said()})")
        return Failed(f"{self.what}: {ending(code)} {self._said()}".strip(), self._stderr())


def ending(code: int) -> str:
    """Describe an exit status of subprocess."""
    try:
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    except ValueError:
        return f"was killed by signal {-code}"


@contextlib.contextmanager
def time_limit(deadline: float) -> Iterator[None]:
    """Raise Failed in this thread at the deadline, whatever it waits for."""

    def ring(*_: Any) -> None:
        raise Failed("the check itself timed out")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(0.01, deadline - time.monotonic()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def ask(what: str, deadline: float, place: Optional[Inside] = None, **arguments: Any) -> Any:
    """Run a tenant and return its only answer."""
    with Tenant(what, deadline, place, **arguments) as tenant:
        return tenant.receive()


def end(process: subprocess.Popen[Any]) -> None:
    """Kill the whole session, and wait briefly."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    try:
        process.wait(KILLED_WAIT_S)
    except subprocess.TimeoutExpired:
        pass


def end_all() -> None:
    """Kill all running processes of this program, even one that was started just as a signal arrived."""
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in path.read_text().split():
            try:
                os.killpg(int(pid), signal.SIGKILL)
            except ProcessLookupError:  # it is not yet the leader of its session
                os.kill(int(pid), signal.SIGKILL)
            os.waitpid(int(pid), 0)


def run(command: Sequence[str | Path], deadline: float, env: Optional[dict[str, str]] = None) -> tuple[int, str, str]:
    """Return (exit code, stdout, stderr) of a command. Raises Failed when it takes too long."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=TREE,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=env,
            start_new_session=True,
        )
        try:
            code = process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            err.seek(0)
            said = err.read().decode(errors="replace")
            raise Failed(f"{Path(str(command[0])).name}: timed out", said) from None
        finally:
            end(process)
        out.seek(0)
        err.seek(0)
        return code, out.read().decode(errors="replace"), err.read().decode(errors="replace")
