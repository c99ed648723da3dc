"""Tables and values on standard output: drawn on a terminal, plain aligned text in a pipe, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

_BAR_CELLS = 10


class Column(NamedTuple):
    """`only_tty`: drawn on a terminal only (a bar means nothing to awk)."""

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
    """`rows` hold a text for each column, also for those that only a terminal shows."""
    texts = [[printable(cell) for cell in row] for row in rows]
    (_draw if is_tty() else _align)(columns, texts)


def _align(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Two spaces between columns, nothing at the end of a line."""
    shown = [number for number, column in enumerate(columns) if not column.only_tty]
    lines = [[columns[n].title.upper() for n in shown], *([row[n] for n in shown] for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(shown))]
    for line in lines:
        cells = (
            cell.rjust(width) if columns[n].right else cell.ljust(width) for n, cell, width in zip(shown, line, widths)
        )
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def _draw(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


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
