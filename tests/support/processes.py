"""Processes as the tests need them: orphans come to us, and an exit is an event, not something to poll for."""

from __future__ import annotations

import ctypes
import os
import select
import signal
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>, prctl(2)

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """A container's first process is orphaned when `runc create` ends; from now on such orphans are our children."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl PR_SET_CHILD_SUBREAPER")


def wait_exit(pid: int, timeout_s: float) -> int | None:
    """Reap our child `pid`: its exit code, 128 + signal when killed; None when it lives on after `timeout_s`."""
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


def kill_and_reap(pid: int) -> None:
    """End our child `pid` if it still runs."""
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def reap_zombies() -> None:
    """Take the exit codes of all children that have ended, adopted ones too, which nobody else would ask for."""
    try:
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG):
            pass
    except ChildProcessError:
        pass  # no child at all


def children() -> dict[int, str]:
    """Our live children, adopted ones included, zombies not: pid -> command line."""
    found = {}
    for stat in (Path("/proc", name, "stat") for name in os.listdir("/proc") if name.isdecimal()):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            words = (stat.parent / "cmdline").read_bytes()
        except (OSError, IndexError):
            continue  # gone meanwhile
        if parent == os.getpid() and words:
            found[int(stat.parent.name)] = words.replace(b"\0", b" ").decode(errors="replace").strip()
    return found
