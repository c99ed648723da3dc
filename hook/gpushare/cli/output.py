"""Write tables and values to standard output: aligned text in a pipe, colour and bars on a terminal, JSON for programs.

This module alone decides whether to use colour: on a terminal that supports it, unless --no-color or NO_COLOR
(https://no-color.org) is set. rich is imported for a terminal only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional

import click

from ..core.quoting import printable
from .options import NO_COLOR

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

BAR_CELLS = 10
_FOLDED = 20  # least width of a column that folds, in characters
_FULL, _HIGH = 90, 75  # a bar is red from _FULL percent, yellow from _HIGH percent
_STATES = {
    **dict.fromkeys(("running", "open", "ok", "configured", "valid"), "green"),
    **dict.fromkeys(("starting", "paused", "suspending", "suspended", "resuming"), "yellow"),
    **dict.fromkeys(("exclusive", "divided", "warn", "not configured", "incomplete", "kept"), "yellow"),
    "ended": "dim",
    **dict.fromkeys(("dead", "damaged", "unknown use", "fail", "refused"), "bold red"),
}
_TRAILING = re.compile(r" +((?:\x1b\[[0-9;]*m)*)$")  # spaces at the end of a line, and colour codes after them


def _no_style(_: str) -> str:
    return ""


class Column(NamedTuple):
    """A column of a table.

    only_tty   shown on a terminal only, if it is wide enough (bars are of no use to programs)
    folds      cells may take several lines on a narrow terminal
    style      returns the style of a cell from its text
    leaves     on a narrow terminal columns with the highest number are hidden first, and their values are printed below
               the table; 0: never hidden
    """

    title: str
    right: bool = False
    only_tty: bool = False
    folds: bool = False
    style: Callable[[str], str] = _no_style
    leaves: int = 0


def state_style(text: str) -> str:
    """The style of a state, which is the text before the colon in "dead: its init is gone"."""
    return _STATES.get(text.partition(":")[0], "")


def bar_style(text: str) -> str:
    """The style of a bar, by the percentage at its end."""
    digits = text.rstrip("%").rpartition(" ")[2]
    percent = int(digits) if digits.isdigit() else 0
    return "red" if percent >= _FULL else "yellow" if percent >= _HIGH else "green"


def bar_column(title: str, style: Callable[[str], str] = bar_style) -> Column:
    """A column of bars. `title` names the two numbers of the ratio: used/limit."""
    return Column(title, only_tty=True, style=style)


BAR = bar_column("used/limit")


def is_tty() -> bool:
    return sys.stdout.isatty()


def is_capable() -> bool:
    """Whether the terminal supports escape sequences."""
    return os.environ.get("TERM", "dumb") not in ("", "dumb")


def has_colour() -> bool:
    """Whether escape sequences may be written to the terminal."""
    context = click.get_current_context(silent=True)
    wanted = not (os.environ.get("NO_COLOR") or (context and context.meta.get(NO_COLOR)))
    return wanted and is_tty() and is_capable()


def write(text: str, now: bool = False) -> None:
    """Write text unchanged; `now`: flush it. Raises OSError, which `main` handles."""
    encoding = sys.stdout.encoding
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    if now:
        sys.stdout.flush()


def write_json(value: Any) -> None:
    """Write one JSON document."""
    write(json.dumps(value, indent=2) + "\n")


def write_line(text: str = "") -> None:
    write(printable(text) + "\n")


def write_now(text: str) -> None:
    """Write a line and flush it, for a program that keeps running."""
    write(printable(text) + "\n", now=True)


def write_text(text: str, indent: int) -> None:
    """Write lines that start with a label. On a terminal, wrap long lines and indent the rest by `indent`. Lines are
    broken between words only, so that paths can be copied. In a pipe lines are not wrapped."""
    import textwrap

    columns = shutil.get_terminal_size().columns if is_tty() and is_capable() else 0
    for line in text.splitlines():
        if len(line) > columns > 2 * indent:
            line = textwrap.fill(
                line,
                columns,
                subsequent_indent=" " * indent,
                break_long_words=False,
                break_on_hyphens=False,
                replace_whitespace=False,
            )
        write(line + "\n")


def write_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Write a table with two spaces between columns. `rows` hold a text for each column, including hidden ones. No cell
    is cut, and only columns with `folds` are wrapped on a terminal, so that texts can be copied and searched for."""
    lines = [[column.title.upper() for column in columns], *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(columns))]
    if is_tty() and is_capable():
        shown = _fitting(columns, widths)
        _write_to_terminal([columns[n] for n in shown], [[line[n] for n in shown] for line in lines[1:]])
        _write_hidden_columns(lines, [n for n, column in enumerate(columns) if n not in shown and not column.only_tty])
        return
    for line in lines:
        shown = [n for n, column in enumerate(columns) if not column.only_tty]
        cells = (line[n].rjust(widths[n]) if columns[n].right else line[n].ljust(widths[n]) for n in shown)
        write("  ".join(cells).rstrip() + "\n")


def _write_hidden_columns(lines: Sequence[Sequence[str]], hidden: Sequence[int]) -> None:
    """Below the table, write the values of hidden columns, one line for each row that has any."""
    titles = [title.lower() for title in lines[0]]
    rest = []
    for line in lines[1:]:
        values = [f"{titles[n]} {line[n]}" for n in hidden if line[n] not in ("", "-")]
        rest += [f"{titles[0]} {line[0]}: {', '.join(values)}"] if values else []
    for text in dict.fromkeys(["", *rest] if rest else []):
        write(text + "\n")


def _fitting(columns: Sequence[Column], widths: Sequence[int]) -> list[int]:
    """Indices of the columns that fit the terminal, with folding columns at their least width. Bars are hidden
    first."""
    needed = [min(width, _FOLDED) if column.folds else width for column, width in zip(columns, widths)]
    leaves = [column.leaves or 1000 * column.only_tty for column in columns]
    shown = list(range(len(columns)))
    while sum(needed[n] + 2 for n in shown) - 2 > shutil.get_terminal_size().columns and any(leaves[n] for n in shown):
        shown.remove(max(shown, key=lambda n: leaves[n]))
    return shown


def _write_to_terminal(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    width = shutil.get_terminal_size().columns
    if not any(column.folds for column in columns):
        lines = [[column.title for column in columns], *rows]
        width = max(width, sum(max(len(line[n]) for line in lines) + 2 for n in range(len(columns))))
    screen = console(width)
    with screen.capture() as captured:
        screen.print(table(columns, rows))
    write("".join(_TRAILING.sub(r"\1", line) + "\n" for line in captured.get().splitlines()))


def console(width: Optional[int] = None) -> Console:
    """A rich console for standard output. It gets colour and width from this module and does not detect them itself."""
    from rich.console import Console

    colours: Any = "auto" if has_colour() else None
    return Console(
        file=sys.stdout,
        width=width,
        force_terminal=True,
        color_system=colours,
        highlight=False,
        markup=False,
        emoji=False,
    )


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], widths: Sequence[int] = ()) -> Table:
    """A table for a terminal, without borders. `widths`: the least width of each column."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column, width in zip(columns, widths or [0] * len(columns)):
        justify: Any = "right" if column.right else "left"
        made.add_column(
            column.title.upper(), justify=justify, no_wrap=not column.folds, overflow="fold", min_width=width or None
        )
    for row in rows:
        made.add_row(*(Text(cell, column.style(cell)) for column, cell in zip(columns, row)))
    return made


def bar(used: int, limit: int, cells: int = BAR_CELLS, percent: bool = True) -> str:
    """A bar and, with `percent`, its percentage. The bar is full only if the whole limit is used."""
    if limit <= 0:
        return ""
    filled = min(cells, used * cells // limit)
    full, empty = _bar_cells()
    return full * filled + empty * (cells - filled) + (f" {used * 100 // limit:3d}%" if percent else "")


def _bar_cells() -> tuple[str, str]:
    try:
        "█░".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "#", "."
    return "█", "░"


def sparkline(percents: Sequence[float], cells: int) -> str:
    """The last values, one character each, the newest at the right; a full block is 100 percent."""
    levels = "▁▂▃▄▅▆▇█" if _bar_cells()[0] == "█" else "_.:-=+*#"
    last = percents[-cells:] if cells > 0 else ()
    return "".join(levels[min(len(levels) - 1, int(max(0.0, one) * len(levels) / 100))] for one in last).rjust(cells)


class Progress:
    """A `with` block that shows the current step on the terminal and erases it at the end. It has no thread, because
    the steps may fork."""

    def __enter__(self) -> Progress:
        self._shown = sys.stderr.isatty() and is_capable()
        return self

    def say(self, text: str) -> None:
        if self._shown:
            sys.stderr.write(f"\r{text} ...\x1b[K")
            sys.stderr.flush()

    def __exit__(self, *_: object) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def user_name(uid: int) -> str:
    """The name of a user of this host, or the number."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)


def age(seconds: float) -> str:
    """A duration in its largest unit: 5s, 3m, 2h, 4d."""
    whole = max(0, int(seconds))
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if whole >= size:
            return f"{whole // size}{unit}"
    return f"{whole}s"
