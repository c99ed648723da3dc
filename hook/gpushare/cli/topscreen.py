"""The screen of `gpushare top`, computed from a sample, the user's view and the terminal's size. Has no side
effects."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from ..core import constants
from ..core.quantity import human
from ..core.quoting import printable
from ..gpu.selectors import device_name
from . import facts
from .containers import borrowed_text, compute_text, limit_text
from .output import BAR, BAR_CELLS, Column, age, bar, bar_column, bar_style, sparkline, state_style, table
from .sample import Line, Sample

if TYPE_CHECKING:
    from rich.console import Group

_GAP = 2  # between columns
_FEWEST_ROWS = 3  # of containers, even if there are many devices
_SHORT, _LONG = 5, 30  # least and greatest number of cells of a bar
_LONGEST_NAME = 24  # characters on a terminal
_PERCENT = len(" 100%")  # after a bar
_SAME = 10  # added to `leaves` of a dull column whose rows are all equal
# Help texts for keys; the first that fits is shown
_HELP = (
    "q quit   h help   m memory  p percent  c compute  t throttled  a age  n name   r reverse   up down scroll",
    "q quit   h help   m p c t a n sort   r reverse   up down scroll",
    "q quit   h help",
    "q quit",
)
# The help of `h` and `?`
_KEYS = (
    ("q", "quit"),
    ("h ?", "show this help; any key closes it"),
    ("m", "sort by memory in use"),
    ("p", "sort by memory in use, in percent of the limit"),
    ("c", "sort by compute in use"),
    ("t", "sort by the time that threads waited for the compute limit"),
    ("a", "sort by age"),
    ("n", "sort by name, or by ID without a name"),
    ("left right", "sort by the previous or next column"),
    ("r", "reverse the order"),
    ("up down", "scroll; also page up, page down, home and end"),
    ("space", "take a sample now"),
)
_COLUMNS = (
    ("COMPUTE", "percent of the device's time used in the last second, and the limit"),
    ("TREND", "compute use in the last samples; a full block is the whole device"),
    ("THROTTLED", "how long threads waited for the compute limit; 200% is two threads all the time"),
    ("REFUSED", "allocations that the memory limit refused"),
    ("BORROWED", "memory above the request, which can be taken back"),
)


class View(NamedTuple):
    """The settings that keys change. `first`: index of the first visible row of containers."""

    sort: str = "memory"
    reverse: bool = False
    first: int = 0
    help: bool = False


class Cell(NamedTuple):
    """A column and the function that makes its text, given a value and the length of bars. On a narrow terminal columns
    with the highest `leaves` are hidden first. A `dull` column is hidden before all others if its rows are equal. A
    `spare` column stands in for the bar after it where that is hidden."""

    column: Column
    text: Callable[[Any, int], str]
    leaves: int = 0
    dull: bool = False
    spare: bool = False


def _memory(line: Line) -> int:
    return line.use.used_bytes if line.use else -1


def _of_limit(line: Line) -> float:
    """Memory in use in percent of the limit."""
    return 100 * line.use.used_bytes / line.use.limit_bytes if line.use and line.use.limit_bytes else -1.0


def _percent(line: Line) -> float:
    return line.use.compute.recent_percent if line.use and line.use.compute else -1.0


def _created(line: Line) -> float:
    return line.container.lease.created if line.container.lease else 0.0


# name -> (key on the keyboard, sort key)
SORTS: dict[str, tuple[str, Callable[[Line], Any]]] = {
    "memory": ("m", lambda line: -_memory(line)),
    "percent": ("p", lambda line: -_of_limit(line)),
    "compute": ("c", lambda line: -_percent(line)),
    "throttled": ("t", lambda line: -(line.throttled_percent or 0.0)),
    "age": ("a", _created),
    "name": ("n", lambda line: line.container.name.shown or line.container.id),
}


def _memory_text(line: Line) -> str:
    """Used memory and limit in one text, like compute_text."""
    if line.use is None:
        return "-"
    used, limit = human(line.use.used_bytes), line.use.share.ceiling_bytes
    return used if limit is None else f"{used} of {limit_text(line.use)}"


def _memory_bar(line: Line, cells: int) -> str:
    return bar(line.use.used_bytes, line.use.limit_bytes, cells) if line.use else ""


def _cut(name: str) -> str:
    """A name that leaves room for the other columns: its begin and its end, both of which can tell it from another."""
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME // 2 - 2]}..{name[-_LONGEST_NAME // 2 :]}"


def _memory_percent(line: Line, _: int) -> str:
    return f"{int(_of_limit(line))}%" if _of_limit(line) >= 0 else "-"


def _compute_bar(line: Line, cells: int) -> str:
    """The used part of the compute limit, or of the whole device if there is no limit."""
    if line.use is None or line.use.compute is None:
        return ""
    return bar(round(10 * line.use.compute.recent_percent), 10 * (line.use.share.compute_percent or 100), cells)


def _device_memory(one: dict[str, Any]) -> str:
    used = human(one["memory_used_bytes"])
    return f"{used} of {human(one['memory_bytes'])}" if one["memory_bytes"] else used


def _pace(_: str) -> str:
    """The style of compute bars: one colour, because reaching a compute limit is normal."""
    return "cyan"


def _throttled(line: Line) -> str:
    return "-" if line.throttled_percent is None else f"{line.throttled_percent:.0f}%"


def _age(line: Line) -> str:
    return age(time.time() - _created(line)) if line.container.lease else "-"


_ID = Cell(Column("container"), lambda line, _: constants.short(line.container.id))
_NAME = Cell(Column("name"), lambda line, _: line.container.name.shown or "-", 1)
_CUT_NAME = _NAME._replace(text=lambda line, _: _cut(line.container.name.shown) or "-")
_DEVICE = Cell(Column("device", True), lambda line, _: device_name(line.use.share.device) if line.use else "-", 3, True)
_BORROWED = Cell(Column("borrowed", True), lambda line, _: borrowed_text(line.use), 6)
_COMPUTE = Cell(Column("compute", True), lambda line, _: compute_text(line.use) if line.use else "-")
_THROTTLED = Cell(Column("throttled", True), lambda line, _: _throttled(line), 4)
_REST = (
    Cell(Column("refused", True), lambda line, _: str(line.use.refused) if line.use else "-", 8),
    Cell(Column("processes", True), lambda line, _: str(len(line.container.slots)), 9),
    Cell(Column("state", style=state_style), lambda line, _: line.container.state, 2, True),
    Cell(Column("age", True), lambda line, _: _age(line), 7),
)
# Columns on a terminal, and in a pipe, where each column holds one value
CONTAINERS = (
    *(_ID, _CUT_NAME, _DEVICE, Cell(Column("memory", True), lambda line, _: _memory_text(line))),
    *(Cell(Column("mem%", True, style=bar_style), _memory_percent, 4, spare=True), Cell(BAR, _memory_bar, 5)),
    *(_BORROWED, _COMPUTE, Cell(bar_column("used/limit", _pace), _compute_bar, 7), _THROTTLED, *_REST),
)
PLAIN = (
    *(_ID, _NAME, _DEVICE),
    Cell(Column("memory used", True), lambda line, _: human(line.use.used_bytes) if line.use else "-"),
    Cell(Column("limit", True), lambda line, _: limit_text(line.use) if line.use else "-"),
    *(_BORROWED, _COMPUTE, _THROTTLED, *_REST),
)

DEVICES = (
    Cell(Column("device", True), lambda one, _: str(one["name"])),
    Cell(Column("model"), lambda one, _: str(one["model"]), 6),
    Cell(Column("memory", True), lambda one, _: _device_memory(one)),
    Cell(bar_column("used/total"), lambda one, cells: bar(one["memory_used_bytes"], one["memory_bytes"], cells), 4),
    Cell(Column("granted", True), lambda one, _: human(one["granted_bytes"]), 7),
    Cell(Column("compute", True), lambda one, _: f"{one['compute_used_percent']:.0f}%"),
    Cell(
        bar_column("used/total", _pace),
        lambda one, cells: bar(round(one["compute_used_percent"]), 100, cells + _PERCENT, False),
        5,
    ),
    Cell(Column("containers", True), lambda one, _: str(one["containers"]), 8),
    Cell(Column("state", style=state_style), lambda one, _: str(one["state"]), 2, True),
)
_TREND = bar_column("trend", _pace)


def _with_trend(cells: tuple[Cell, ...], text: Callable[[Any, int], str]) -> tuple[Cell, ...]:
    """The columns of the full screen, which has earlier samples, too."""
    at = 1 + max(n for n, cell in enumerate(cells) if cell.column.only_tty)
    return (*cells[:at], Cell(_TREND, text, 6), *cells[at:])


SCREEN_CONTAINERS = _with_trend(CONTAINERS, lambda line, cells: sparkline(line.compute_history, cells))
SCREEN_DEVICES = _with_trend(DEVICES, lambda one, cells: sparkline(one["trend"], cells))


def without_empty(cells: tuple[Cell, ...], lines: Sequence[Line]) -> tuple[Cell, ...]:
    """The columns without NAME if no container has one, as where `gpushare run` starts all programs, and without
    BORROWED if none can borrow."""
    named = any(line.container.name.shown for line in lines)
    lent = any(line.use is not None and line.use.share.lending for line in lines)
    hidden = {cell.column for cell, wanted in ((_NAME, named), (_BORROWED, lent)) if not wanted}
    return tuple(cell for cell in cells if cell.column not in hidden)


def in_order(sample: Sample, view: View) -> list[Line]:
    """Lines in the user's order; equal lines stay in the order of `gpushare list`."""
    lines = sorted(sample.lines, key=SORTS[view.sort][1])
    return lines[::-1] if view.reverse else lines


def rows_of(cells: Sequence[Cell], values: Sequence[Any], length: int = BAR_CELLS) -> list[list[str]]:
    """The texts of the cells for each value, with bars of `length` cells."""
    return [[printable(cell.text(value, length)) for cell in cells] for value in values]


def fitting(cells: Sequence[Cell], values: Sequence[Any], columns: int) -> tuple[list[int], int]:
    """Indices of the cells that fit into `columns` characters, and the length of bars."""
    rows = rows_of(cells, values, _SHORT)
    widths = [max(len(cell.column.title), *(len(row[n]) for row in rows), 0) for n, cell in enumerate(cells)]
    leaves = [
        cell.leaves + (_SAME if cell.dull and len({row[n] for row in rows}) < 2 else 0) for n, cell in enumerate(cells)
    ]
    shown = [n for n, cell in enumerate(cells) if not cell.spare]
    while (free := columns - sum(widths[n] + _GAP for n in shown) + _GAP) < 0:
        hidden = max(shown, key=lambda n: leaves[n])
        if not leaves[hidden]:
            break
        shown.remove(hidden)
    for n, cell in enumerate(cells):
        if cell.spare and n + 1 not in shown and widths[n] + _GAP <= free:
            shown, free = sorted([*shown, n]), free - widths[n] - _GAP
    bars = sum(cells[n].column.only_tty for n in shown)
    return shown, min(_LONG, _SHORT + max(0, free) // max(1, bars))


def most_rows(sample: Sample, height: int) -> int:
    """The number of container lines that fit below the devices."""
    return max(_FEWEST_ROWS, height - 5 - (len(sample.devices) + 2 if sample.devices else 0))


def scrolled(view: View, sample: Sample, height: int) -> View:
    """The view with `first` limited to the existing lines."""
    last = max(0, len(sample.lines) - most_rows(sample, height))
    return view._replace(first=max(0, min(view.first, last)))


def draw(sample: Sample, view: View, interval_s: float, width: int, height: int) -> Group:
    """The whole screen in at most `height` lines: title, devices, containers, keys."""
    from rich.console import Group
    from rich.text import Text

    if view.help:
        return Group(*_help_lines(height))
    room = most_rows(sample, height)
    lines = in_order(sample, view)
    shown = lines[view.first : view.first + room]
    parts: list[Any] = [_title(sample, view, interval_s, width), Text()]
    used = 2
    if sample.devices:
        most = max(1, height - 5 - 2 - min(len(lines), _FEWEST_ROWS))
        devices = [{**one, "trend": sample.device_history.get(one["uuid"], ())} for one in sample.devices]
        parts += [_table(SCREEN_DEVICES, devices[:most], devices, width), Text()]
        used += 2 + min(len(sample.devices), most)
    if lines:
        parts.append(_table(without_empty(SCREEN_CONTAINERS, lines), shown, lines, width))
        used += 1 + len(shown)
    else:
        parts.append(Text(facts.NONE, "dim", no_wrap=True, overflow="crop"))
        used += 1
    notes = _notes(shown)[: max(0, height - used - 2)]
    if notes:
        parts += [Text(), *(Text(note, "yellow", no_wrap=True, overflow="ellipsis") for note in notes)]
        used += 1 + len(notes)
    parts += [Text()] * (height - used - 1)
    more = f"{view.first + 1}-{view.first + len(shown)} of {len(lines)}" if len(shown) < len(lines) else ""
    parts.append(_footer(more, width))
    return Group(*parts)


def _notes(lines: Sequence[Line]) -> list[str]:
    """Return the notes of containers, such as why one is over its limit."""
    found = {line.container.id: line.container for line in lines if line.container.note}
    return [printable(f"{constants.short(one.id)}: {one.note}") for one in found.values()]


def _help_lines(height: int) -> list[Any]:
    from rich.text import Text

    lines = ["keys", "", *(f"  {key:<12}{what}" for key, what in _KEYS)]
    lines += ["", "columns", "", *(f"  {title:<12}{what}" for title, what in _COLUMNS)]
    return [Text(line, no_wrap=True, overflow="crop") for line in lines[: max(1, height)]]


def _footer(more: str, width: int) -> Any:
    """The line of keys. `more`: which rows are visible, if not all fit."""
    from rich.text import Text

    keys = next((keys for keys in _HELP if len(keys) + 3 + len(more) <= width), _HELP[-1])
    return Text(keys + (f"   {more}" if more else ""), "dim", no_wrap=True, overflow="crop")


def _table(cells: Sequence[Cell], shown: Sequence[Any], everything: Sequence[Any], width: int) -> Any:
    """A table of the `shown` rows. Column widths are those of all rows, so that scrolling does not change them."""
    keep, length = fitting(cells, everything, width)
    kept = [cells[n] for n in keep]
    widest = [max(map(len, column)) for column in zip(*rows_of(kept, everything, length))]
    return table([cell.column for cell in kept], rows_of(kept, shown, length), widest)


def _title(sample: Sample, view: View, interval_s: float, width: int) -> Any:
    from rich.text import Text

    count = len({line.container.id for line in sample.lines})
    many = "1 container" if count == 1 else f"{count} containers"
    order = f"by {view.sort}{', reversed' if view.reverse else ''}"
    clock = time.strftime("%H:%M:%S", time.localtime(sample.taken))
    text = f"gpushare top  {clock}  every {interval_s:g} s  {many}  {order}"
    text += f"  {sample.note}" if sample.note else ""
    return Text(printable(text), "bold", no_wrap=True, overflow="ellipsis")
