"""Run a program on a pseudo terminal and read its screen (pyte interprets the escape sequences)."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Optional

import pyte

KEYS = {"up": "\x1b[A", "down": "\x1b[B", "right": "\x1b[C", "left": "\x1b[D", "end": "\x1b[F", "ctrl-z": "\x1a"}


class Terminal:
    """A `with` block: the program is killed at its end. `raw` is every byte that it wrote."""

    def __init__(
        self, command: Sequence[object], columns: int = 100, lines: int = 24, env: Optional[Mapping[str, str]] = None
    ) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._ours, theirs = os.openpty()
        self._set_size(columns, lines)
        self.modes = termios.tcgetattr(theirs)
        environment = {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8", "TZ": "UTC", "PATH": os.environ["PATH"]}
        # its controlling terminal, so that Ctrl-C and a resize arrive as signals
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *map(str, command)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environment, **(env or {})},
        )
        self._theirs = theirs  # kept open, so that the last output can be read after the program's end

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def resize(self, columns: int, lines: int) -> None:
        self.screen.resize(lines, columns)
        self._set_size(columns, lines)

    def press(self, *keys: str) -> None:
        """Type characters, or names of KEYS."""
        for key in keys:
            os.write(self._ours, KEYS.get(key, key).encode())

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._ours], [], [], max(0, timeout_s))[0]:
            return False
        data = os.read(self._ours, 65536)
        self.raw += data
        self._stream.feed(data)
        return True

    @property
    def text(self) -> str:
        """The current screen, without spaces at line ends."""
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip() + "\n"

    def expect(self, wanted: str | Callable[[str], bool], timeout_s: float = 20) -> str:
        """The screen as soon as it has `wanted`; AssertionError with the screen otherwise."""
        deadline = time.monotonic() + timeout_s
        while not (wanted in self.text if isinstance(wanted, str) else wanted(self.text)):
            assert self._read(deadline - time.monotonic()), f"no {wanted!r} in\n{self.text}"
        return self.text

    def end(self, timeout_s: float = 20) -> int:
        """The exit code, once all output has been read."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it does not end:\n{self.text}"
            self._read(0.05)
        while self._read(0):
            pass
        return self.process.returncode

    def modes_now(self) -> list[object]:
        return termios.tcgetattr(self._theirs)
