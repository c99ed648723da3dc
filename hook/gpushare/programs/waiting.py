"""The createRuntime hook of a start, left waiting by its runtime, which has in memory all that it needs (start path).

    leave(state_dir, container_id, words)   before the runtime becomes the low-level one; `words` are the hook's options

The launcher, called as the hook, hands over the state and passes on what is said (hook/launcher/waiting.c). So Python
starts once for a container, not twice. Whoever waits ends with the low-level runtime. Where nobody waits (it was
killed, there was no memory for it) the launcher starts the hook like any other. A snapshot leaves nobody: it starts
in less time than this takes.
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

SOCKET = "hook"  # in containers/<id>, which is root's alone
BEGUN = b"\n"  # said first: until then whoever asks may start the hook instead
WAIT_S = 60  # a low-level runtime calls it after some 20 ms


def leave(state_dir: str, container_id: str, words: Sequence[str]) -> None:
    """Never raises for what only costs time."""
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
            _as_nobody_s_child(fds[1], fds[2], words, f"{directory}/{SOCKET}")
        os.waitpid(child, 0)
    except (OSError, syscalls.SyscallError):
        pass
    for fd in fds:
        os.close(fd)


def _as_nobody_s_child(listener: int, runtime: int, words: Sequence[str], path: str) -> None:
    """A low-level runtime that stays, as for `run`, would have a zombie."""
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
    """Nothing may be held of which an engine waits for the end."""
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for number in range(3):
        os.dup2(null, number)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in kept:
            _close(number)


def _close(number: int) -> None:
    try:
        os.close(number)
    except OSError:  # that of the list itself
        pass
