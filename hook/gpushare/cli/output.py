"""Tables and values on standard output: plain aligned text, with bars on a terminal, and JSON for programs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

_BAR_CELLS = 10


class Column(NamedTuple):
    """`only_tty`: on a terminal only, if it is wide enough (a bar means nothing to awk)."""

    title: str
    right: bool = False
    only_tty: bool = False


def is_tty() -> bool:
    return sys.stdout.isatty()


def printable(text: str) -> str:
    """Names can come from a tenant: control characters never reach a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def write_json(value: Any) -> None:
    """One JSON document."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def write_line(text: str = "") -> None:
    sys.stdout.write(printable(text) + "\n")


def write_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """`rows` hold a text for each column, also for those that are not shown. Two spaces between columns and nothing at
    the end of a line; no cell is ever folded or cut, so that what is shown can be copied and searched for."""
    lines = [[column.title.upper() for column in columns], *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(columns))]
    shown = _shown(columns, widths)
    for line in lines:
        cells = (line[n].rjust(widths[n]) if columns[n].right else line[n].ljust(widths[n]) for n in shown)
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def _shown(columns: Sequence[Column], widths: Sequence[int]) -> list[int]:
    """All of them on a terminal that has room for them."""
    everything = list(range(len(columns)))
    if is_tty() and sum(widths) + 2 * (len(columns) - 1) <= shutil.get_terminal_size().columns:
        return everything
    return [n for n in everything if not columns[n].only_tty]


def bar(used: int, limit: int) -> str:
    """A bar and a percentage; the bar is full only when nothing is left."""
    if limit <= 0:
        return ""
    filled = min(_BAR_CELLS, used * _BAR_CELLS // limit)
    return "█" * filled + "░" * (_BAR_CELLS - filled) + f" {used * 100 // limit:3d}%"


def age(seconds: float) -> str:
    """The largest unit: 5s, 3m, 2h, 4d."""
    whole = max(0, int(seconds))
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if whole >= size:
            return f"{whole // size}{unit}"
    return f"{whole}s"
