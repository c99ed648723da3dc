"""Ending processes of MPS: daemons that are told to, and servers that a daemon left behind. Not on the start path.

Only processes that are known by pid and start time are killed.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator, Sequence

from ..core.errors import DeviceError, GpushareError, KernelError
from ..core.quoting import shown
from ..system import procs, syscalls
from . import mpscontrol
from .mpscontrol import Control
from .mpswords import WORDS

_QUIT_S = 10


def end_orphans(pipe: str) -> None:
    """Servers whose daemon has died hold the GPU and serve nobody new: they go. A daemon of ours whose directory is
    gone, with the state directory, can still have clients, and nobody can talk to it. Raises DeviceError."""
    servers, places = [], {pipe, *(os.path.join(pipe, words.folder) for words in WORDS.values() if words.folder)}
    variables = {os.fsencode(f"CUDA_MPS_PIPE_DIRECTORY={place}") for place in places}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as environ, open(f"/proc/{name}/cmdline", "rb") as command:
                mine = not variables.isdisjoint(environ.read().split(b"\0"))
                kind = _kind(name, command.read().split(b"\0")) if mine else ""
        except OSError:  # gone, or a kernel thread's
            continue
        process = procs.find(int(name)) if kind else None
        if process is not None and kind == mpscontrol.NAME:
            raise DeviceError(
                f"an MPS daemon whose directory {shown(pipe)} was lost runs (pid {name})",
                "kill it when the containers that have it have ended",
            )
        servers += [process] if process is not None else []
    for process in servers:
        kill(process)


def _kind(name: str, words: Sequence[bytes]) -> str:
    """mpscontrol.SERVER, NAME for a control daemon, or "" for whoever has the variable besides: a person's shell, and
    what it starts, or a program in a container, that of a tenant who wants no daemon to start. Raises OSError."""
    if not os.path.samestat(os.stat(f"/proc/{name}/ns/pid"), os.stat("/proc/self/ns/pid")):
        return ""
    programs = [os.path.basename(os.fsdecode(word)) for word in words[:2]]  # the second one of a script
    if programs[0] == mpscontrol.SERVER:
        return mpscontrol.SERVER
    with open(f"/proc/{name}/status", encoding="utf-8", errors="replace") as file:
        uids = next(line.split()[1:] for line in file if line.startswith("Uid:"))
    is_daemon = mpscontrol.NAME in programs and {b"-d", b"-f"} & set(words)
    return mpscontrol.NAME if is_daemon and str(os.geteuid()) in uids else ""


def end(control: Control, pid: int) -> None:
    """`quit`, and SIGKILL for whoever does not: servers that hang on a kernel that never ends keep their daemon. Only
    processes that are known by pid and start time are killed."""
    family = [found for found in (procs.find(one) for one in (*_children(pid), pid)) if found is not None]
    try:
        control.ask(control.words.quit.format(_QUIT_S), 2.0 * _QUIT_S)
    except GpushareError:
        pass
    for one in family:
        _wait(one, 1000)
        kill(one)


def _wait(process: procs.Process, milliseconds: int, send: int = 0) -> None:
    """Until that very process is gone; with `send`, this signal first."""
    try:
        fd = syscalls.pidfd_open(process.pid)
    except KernelError:  # gone
        return
    try:
        if procs.alive(process.pid, process.start):
            if send:
                signal.pidfd_send_signal(fd, send)
            _gone(fd, milliseconds)
    finally:
        os.close(fd)


def kill(process: procs.Process) -> None:
    _wait(process, 5000, signal.SIGKILL)


def _gone(pidfd: int, milliseconds: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(milliseconds))


def _children(pid: int) -> Iterator[int]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == pid:
                    yield int(name)
        except (OSError, IndexError, ValueError):
            continue
