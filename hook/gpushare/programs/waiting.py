"""A waiting createRuntime hook: a fork of the runtime, which has all modules in memory (start path).

    leave(state_dir, container_id, words)   called before the runtime becomes runc or crun; `words`: the hook's options

The launcher, called as the hook, sends the state and forwards the output (hook/launcher/waiting.c), so that Python
starts once for a container and not twice. The waiting process ends with the low-level runtime. If there is none
(killed, out of memory), the launcher starts an ordinary hook. A snapshot leaves no process waiting: it starts faster.
"""

from __future__ import annotations

import _socket
import fcntl
import os
import select
from collections.abc import Sequence

from ..state import audit_log, storage
from ..system import syscalls
from . import hook

SOCKET = "hook"  # in containers/<id>, which only root can enter
BEGUN = b"\n"  # sent first: until then the launcher may start the hook itself
WAIT_S = 60  # a low-level runtime calls it after some 20 ms


def leave(state_dir: str, container_id: str, words: Sequence[str]) -> None:
    """Leave a process waiting. Never raise: without it the start only takes longer."""
    directory = storage.container_dir(state_dir, container_id)
    fds: list[int] = []
    try:
        fds.append(os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        listener.bind(f"/proc/self/fd/{fds[0]}/{SOCKET}")  # an address has 107 bytes at most
        listener.listen(1)
        fds.append(listener.detach())
        fds.append(syscalls.pidfd_open(os.getpid()))
        child = os.fork()
        if child == 0:
            _detached(fds[1], fds[2], words, f"{directory}/{SOCKET}")
        os.waitpid(child, 0)
    except (OSError, syscalls.SyscallError):
        pass
    for fd in fds:
        os.close(fd)


def _detached(listener: int, runtime: int, words: Sequence[str], path: str) -> None:
    """Fork twice: a low-level runtime that stays, as for `run`, would keep a zombie."""
    try:
        if os.fork() == 0:
            _wait(listener, runtime, words, path)
    finally:
        os._exit(0)


def _wait(listener: int, runtime: int, words: Sequence[str], path: str) -> None:
    listener, runtime = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in (listener, runtime))
    _close_all_but((listener, runtime))
    from ..inject import cachefile, proc_nvidia_mask  # noqa: F401, while the low-level runtime is at work
    from . import create_runtime_hook  # noqa: F401, while the low-level runtime is at work

    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(runtime, select.POLLIN)
    if listener not in dict(poll.poll(WAIT_S * 1000)):
        return
    connection: int = _socket.socket(fileno=listener)._accept()[0]  # type: ignore[attr-defined]
    os.unlink(path)
    os.dup2(connection, 2)
    os.write(connection, BEGUN)
    audit_log.begin()
    code = hook.main([*words, "adopt"], connection)
    os.write(connection, bytes([code]))


def _close_all_but(kept: Sequence[int]) -> None:
    """Close all other descriptors: an engine waits for the end of its pipes."""
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for number in range(3):
        os.dup2(null, number)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in kept:
            _close(number)


def _close(number: int) -> None:
    try:
        os.close(number)
    except OSError:  # the descriptor of the listing itself
        pass
