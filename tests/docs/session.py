"""A shell in the playground that runs one command after the other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import TracebackType
from typing import NamedTuple, Optional

from tests.support.host import TREE

_END = "--end of the command--"
# Text that differs between runs or hosts, and its replacement
_MASKS = (
    (r"\b[0-9a-f]{64}\b|\b[0-9a-f]{12}\b", "ID"),
    (r"(?<![\w.])(?:/[\w.+-]+)+", "PATH"),
    (r"\b\d+[smhd]\b", "0s"),
    (r"\d+(?:[.:,]\d+)*", "0"),
    (r"\b(?:[KMG]i)?B\b", "B"),
    (r"[█░]+", "BAR"),
    (r"\s+", " "),
)


class Done(NamedTuple):
    code: int
    out: str  # standard output and standard error, interleaved as on a terminal


class Session:
    """A `with` block; its end removes everything."""

    def __init__(self, *options: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "demo.playground", *options, "bash", "--norc"],
            cwd=TREE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "LC_ALL": "C.UTF-8", "COLUMNS": "120"},
        )

    def run(self, command: str) -> Done:
        """Raises AssertionError when the shell has exited. A test's time limit ends a shell that hangs."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{{ {command}\n}} </dev/null 2>&1; printf '\\n{_END} %d\\n' $?\n")
        self._process.stdin.flush()
        lines: list[str] = []
        for line in self._process.stdout:
            if line.startswith(_END):
                return Done(int(line.split()[-1]), "".join(lines).rstrip("\n"))
            lines.append(line)
        raise AssertionError(f"the playground is gone after {command!r}:\n{''.join(lines)}")

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._process.communicate()  # end of input ends the shell


def masked(line: str, sizes: bool = False) -> str:
    """`sizes`: keep whole GiB; only limits have this form."""
    if sizes:
        line = re.sub(r"(?<![\d.])(\d+) GiB", lambda found: "gib" * int(found[1]), line)
    for pattern, word in _MASKS:
        line = re.sub(pattern, word, line)
    return line.strip()


def agrees(output: str, written: tuple[str, ...], sizes: bool) -> bool:
    """Whether the output matches the page, except for figures (see `masked`), ids, paths and columns."""
    pattern = ""
    for line in written:
        pattern += "(?:.*\n)*?" if line == "..." else re.escape(masked(line, sizes)).replace(r"\.\.\.", ".*") + "\n"
    return re.fullmatch(pattern, "".join(f"{masked(line, sizes)}\n" for line in output.splitlines())) is not None
