"""Run `gpushare agent` for tests, wait until it lends, and kill it at a system call."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpushare.monitor.eviction import HOLD_S
from gpushare.state import shm_abi, storage

from .host import BIN, Node


def start_agent(node: Node) -> subprocess.Popen[str]:
    """Start an agent, and return when it lends."""
    words = [str(BIN / "gpushare"), "--config", str(node.config), "--state", str(node.state), "agent"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("lending memory"), process.communicate()[1]
    return process


@contextmanager
def agent(node: Node, said: list[str]) -> Iterator[None]:
    """Run an agent until the end of the block; its standard error is then in `said`."""
    with start_agent(node) as process:
        try:
            yield
        finally:
            process.terminate()
            said.append(process.communicate()[1])


def wait_until_lent(node: Node) -> None:
    """Wait for the agent's next round, which lends again some time after the last need."""
    end = time.monotonic() + HOLD_S + 10
    for path in node.state.glob("containers/*/share/limits"):
        while not storage.read_limits(str(path)).devices[0].flags & shm_abi.DEVICE_LENDING:
            assert time.monotonic() < end, f"{path}: not lent"
            time.sleep(0.02)


@contextmanager
def killed(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """Kill a process and its children at the end of the block, also after an error."""
    with process:
        try:
            yield process
        finally:
            for pid in children(process.pid) if process.poll() is None else ():
                os.kill(pid, signal.SIGKILL)
            process.kill()


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def calls_in(log: Path) -> list[str]:
    """The system calls that strace wrote, without signals and exits."""
    return [line for line in log.read_text(errors="replace").splitlines() if not line.startswith(("---", "+++"))]


def inject(signal_name: str, names: Sequence[str], at: int) -> tuple[str, str]:
    """Options of strace that send a signal to a program at the call with the number `at` of the calls `names`."""
    return "-e", f"inject={names[at]}:signal={signal_name}:when={names[: at + 1].count(names[at])}"


class Strace:
    """Agents that strace kills at a system call, and the calls of one that completes its work."""

    def __init__(self, config: Path, state: Path, log: Path) -> None:
        self._words = [str(BIN / "gpushare"), "--config", str(config), "--state", str(state), "agent"]
        self._log = log
        self._names: list[str] = []
        self._first = self._end = 0  # the calls from the first search for waiting containers to the end of the borrower

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        words = ["strace", "-qq", *(options or ("-o", str(self._log))), *self._words]
        return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def start_to_be_killed(self, part: int, parts: int) -> subprocess.Popen[bytes]:
        """Start an agent that is killed after `part` of `parts` of its work."""
        return self.start("-o", "/dev/null", *self._inject("KILL", part, parts))

    def start_to_be_stopped(self, part: int, parts: int) -> subprocess.Popen[bytes]:
        """Start an agent that is stopped there: see `is_stopped`."""
        self._log.write_text("")
        return self.start("-o", str(self._log), *self._inject("STOP", part, parts))

    def is_stopped(self) -> bool:
        return "--- stopped by SIGSTOP ---" in self._log.read_text(errors="replace")

    def has_killed(self) -> bool:
        """Whether that agent has sent SIGKILL."""
        return re.search(r"pidfd_send_signal\(\d+, SIGKILL", self._log.read_text(errors="replace")) is not None

    def _inject(self, signal_name: str, part: int, parts: int) -> tuple[str, str]:
        return inject(signal_name, self._names, self._first + 1 + part * (self._end - self._first) // parts)

    def record(self, completed: Callable[[], None]) -> None:
        """Run an agent until its work is completed, and read its calls."""
        with self.start() as agent:
            try:
                completed()
            finally:
                for pid in children(agent.pid):
                    os.kill(pid, signal.SIGTERM)
            assert agent.wait() == 0
        calls = calls_in(self._log)
        self._names = [line.partition("(")[0] for line in calls]
        self._first = next(n for n, line in enumerate(calls) if line.startswith('write(1, "lending memory'))
        self._end = 1 + next(n for n, line in enumerate(calls) if line.startswith("pidfd_send_signal("))
        assert self._end - self._first > 100
