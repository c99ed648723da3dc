"""Processes for the tests: orphans become children of the test, and exits are events, without polling."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>, prctl(2)

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """A container's first process is orphaned when `runc create` ends; from now on such orphans are children of this
    process."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl PR_SET_CHILD_SUBREAPER")


def wait_exit(pid: int, timeout_s: float) -> int | None:
    """Reap child `pid`: its exit code, 128 + signal if killed; None if it still runs after `timeout_s`."""
    fd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return None
        info = os.waitid(os.P_PIDFD, fd, os.WEXITED)
        assert info is not None
        return info.si_status if info.si_code == os.CLD_EXITED else 128 + info.si_status
    finally:
        os.close(fd)


def parent(pid: int) -> int:
    """The parent of a process. Raises OSError."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill_and_reap(pid: int) -> None:
    """End child `pid` if it still runs."""
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


@contextmanager
def slow_to_exit() -> Iterator[tuple[int, Callable[[], None]]]:
    """(pid, let_end): the first process of a pid namespace. When it gets SIGKILL it begins to exit, and it has ended
    only after let_end(): until then the parent of a second process there does not reap that."""
    words = ["sh", "-c", "echo; exec sleep inf"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(["unshare", "--pid", "--fork", *words], **pipes) as outer:
        assert outer.stdout and outer.stdout.readline()
        first = int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text())
        with subprocess.Popen(["nsenter", "-t", str(first), "-p", *words], **pipes) as parent:
            try:
                assert parent.stdout and parent.stdout.readline()
                parent.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, parent.pid, os.WSTOPPED)  # before that it could still reap
                yield first, lambda: parent.send_signal(signal.SIGCONT)
            finally:
                parent.send_signal(signal.SIGCONT)
                with suppress(ProcessLookupError):
                    os.kill(first, signal.SIGKILL)


def reap_zombies() -> None:
    """Reap all children that have ended, including adopted ones."""
    try:
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG):
            pass
    except ChildProcessError:
        pass  # no children


def children() -> dict[int, str]:
    """Live children, including adopted ones, without zombies: pid -> command line."""
    found = {}
    for stat in (Path("/proc", name, "stat") for name in os.listdir("/proc") if name.isdecimal()):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            words = (stat.parent / "cmdline").read_bytes()  # empty during an exec
        except (OSError, IndexError):
            continue  # it has exited meanwhile
        if state not in "ZX" and int(parent) == os.getpid():
            found[int(stat.parent.name)] = words.replace(b"\0", b" ").decode(errors="replace").strip()
    return found
