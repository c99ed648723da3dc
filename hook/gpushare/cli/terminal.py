"""The full-screen terminal of `gpushare top`, with its key presses and signals in order.

The terminal is restored at the end of the program, also after an error or signal. There is no thread: one poll(2) waits
for the keyboard and for the pipe to which Python's signal handler writes.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import tty
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Optional

from . import output

if TYPE_CHECKING:
    from rich.console import RenderableType

RESIZED, STOPPED = "resized", "stopped"
_SIGNALS = {signal.SIGWINCH: RESIZED, signal.SIGTSTP: STOPPED, signal.SIGCONT: RESIZED}
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A key is one byte or an escape sequence of the terminal; xterm(1), "Cursor keys"
_KEY = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_NAMES = {
    b"A": "up",
    b"B": "down",
    b"C": "right",
    b"D": "left",
    b"H": "home",
    b"F": "end",
    b"5~": "page up",
    b"6~": "page down",
    b"1~": "home",
    b"4~": "end",
}


class Ended(Exception):
    """A signal ends the program, or its terminal is gone (SIGHUP). `number` is the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


class Screen:
    """A `with` block that takes over the terminal. If standard input is no terminal, it reads signals but no keys."""

    def __init__(self) -> None:
        from rich.live import Live

        self._live = Live(
            console=output.console(), screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._keyboard = sys.stdin.fileno() if sys.stdin.isatty() else -1
        self._before: list[Any] = []
        self._handlers: dict[signal.Signals, Any] = {}
        self._poll = select.poll()
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll.register(self._wake, select.POLLIN)
        if self._keyboard >= 0:
            self._poll.register(self._keyboard, select.POLLIN)

    def __enter__(self) -> Screen:
        self._handlers = {number: signal.signal(number, _note) for number in (*_SIGNALS, *_ENDING)}
        self._former = signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        self._take()
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._give_back()
        signal.set_wakeup_fd(self._former)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._wake)
        os.close(self._woken)

    def _take(self) -> None:
        if self._keyboard >= 0:
            self._before = termios.tcgetattr(self._keyboard)
            tty.setcbreak(self._keyboard, termios.TCSADRAIN)
        self._live.start()

    def _give_back(self) -> None:
        try:
            self._live.stop()
        finally:
            if self._keyboard >= 0:
                try:
                    termios.tcsetattr(self._keyboard, termios.TCSADRAIN, self._before)
                except termios.error:  # the terminal is gone
                    pass

    def show(self, content: RenderableType) -> None:
        self._live.update(content, refresh=True)

    def wait(self, seconds: float) -> list[str]:
        """Wait for keys and RESIZED, and return them in their order; an empty list after the timeout. Stops on SIGTSTP
        until the shell continues the program. Raises Ended."""
        ready = dict(self._poll.poll(max(0, seconds) * 1000))
        found = self._signals() if self._wake in ready else []
        if self._keyboard in ready:
            found += self._keys()
        return found

    def _signals(self) -> list[str]:
        found = []
        for number in os.read(self._wake, 512):
            if number in _ENDING:
                raise Ended(number)
            if _SIGNALS.get(signal.Signals(number)) == STOPPED:
                self._stop()
            found.append(RESIZED)
        return found

    def _stop(self) -> None:
        """Handle Ctrl-Z: restore the terminal for the shell, stop, and take the terminal over again."""
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take()

    def _keys(self) -> list[str]:
        try:
            data = os.read(self._keyboard, 1024)
        except OSError:
            data = b""
        if not data:
            raise Ended(signal.SIGHUP)
        return [_name(key) for key in _KEY.findall(data)]


def _note(number: int, frame: Optional[FrameType]) -> None:
    """Do nothing: Python writes the signal's number to the wakeup pipe, and `wait` reads it there."""


def _name(key: bytes) -> str:
    if len(key) > 1:
        return _NAMES.get(key[2:], "")
    return key.decode("ascii", "ignore").lower()
