"""How `gpushare top` looks: a sample, what the person chose and the size of the terminal -> what is drawn. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from .. import names
from ..dialects import device_name
from ..quantity import human
from .containers import compute_text, limit_text
from .output import BAR, Column, age, bar, printable, state_style, table
from .sample import Line, Sample

if TYPE_CHECKING:
    from rich.console import Group

_GAP = 2  # between columns
_FEWEST_ROWS = 3  # of containers, however many devices there are
# keys, the longest text that fits
_HELP = (
    "q quit   m memory  c compute  t throttled  a age  n name   r reverse   up down scroll   left right sort",
    "q quit   m c t a n sort   r reverse   up down scroll",
    "q quit",
)


class View(NamedTuple):
    """What keys change. `first`: of the rows of containers, the first one that is shown."""

    sort: str = "memory"
    reverse: bool = False
    first: int = 0


class Cell(NamedTuple):
    """A column and its text. Those with the highest `leaves` leave first where the terminal is too narrow."""

    column: Column
    text: Callable[[Any], str]
    leaves: int = 0


def _memory(line: Line) -> int:
    return line.use.used_bytes if line.use else -1


def _percent(line: Line) -> float:
    return line.use.compute.recent_percent if line.use and line.use.compute else -1.0


def _created(line: Line) -> float:
    return line.container.lease.created if line.container.lease else 0.0


# word -> (key, what comes first is smallest)
SORTS: dict[str, tuple[str, Callable[[Line], Any]]] = {
    "memory": ("m", lambda line: -_memory(line)),
    "compute": ("c", lambda line: -_percent(line)),
    "throttled": ("t", lambda line: -(line.throttled_percent or 0.0)),
    "age": ("a", _created),
    "name": ("n", lambda line: line.container.id),
}


def _of_limit(line: Line) -> str:
    """The bar of compute: what it had of its limit, or of the whole device."""
    if line.use is None or line.use.compute is None:
        return ""
    return bar(round(10 * line.use.compute.recent_percent), 10 * (line.use.share.compute_percent or 100))


def _throttled(line: Line) -> str:
    return "-" if line.throttled_percent is None else f"{line.throttled_percent:.0f}%"


def _age(line: Line) -> str:
    return age(time.time() - _created(line)) if line.container.lease else "-"


CONTAINERS = (
    Cell(Column("container"), lambda line: names.short(line.container.id)),
    Cell(Column("device", True), lambda line: device_name(line.use.share.device) if line.use else "-", 3),
    Cell(Column("memory used", True), lambda line: human(line.use.used_bytes) if line.use else "-"),
    Cell(Column("limit", True), lambda line: limit_text(line.use) if line.use else "-", 1),
    Cell(BAR, lambda line: bar(line.use.used_bytes, line.use.limit_bytes) if line.use else "", 5),
    Cell(Column("compute", True), lambda line: compute_text(line.use) if line.use else "-"),
    Cell(BAR, _of_limit, 9),
    Cell(Column("throttled", True), _throttled, 4),
    Cell(Column("refused", True), lambda line: str(line.use.refused) if line.use else "-", 8),
    Cell(Column("processes", True), lambda line: str(len(line.container.slots)), 7),
    Cell(Column("state", style=state_style), lambda line: line.container.state, 2),
    Cell(Column("age", True), _age, 6),
)

DEVICES = (
    Cell(Column("device", True), lambda one: str(one["name"])),
    Cell(Column("model"), lambda one: str(one["model"]), 6),
    Cell(Column("memory used", True), lambda one: human(one["memory_used_bytes"])),
    Cell(Column("memory", True), lambda one: human(one["memory_bytes"]) if one["memory_bytes"] else "unknown", 1),
    Cell(BAR, lambda one: bar(one["memory_used_bytes"], one["memory_bytes"]), 5),
    Cell(Column("granted", True), lambda one: human(one["granted_bytes"]), 7),
    Cell(Column("compute", True), lambda one: f"{one['compute_used_percent']:.0f}%"),
    Cell(BAR, lambda one: bar(round(one["compute_used_percent"]), 100), 9),
    Cell(Column("containers", True), lambda one: str(one["containers"]), 8),
    Cell(Column("state", style=state_style), lambda one: str(one["state"]), 2),
)


def in_order(sample: Sample, view: View) -> list[Line]:
    """Lines as the person sorts them; equal ones stay in the order of `gpushare list`."""
    lines = sorted(sample.lines, key=SORTS[view.sort][1])
    return lines[::-1] if view.reverse else lines


def rows_of(cells: Sequence[Cell], values: Sequence[Any]) -> list[list[str]]:
    return [[printable(cell.text(value)) for cell in cells] for value in values]


def fitting(cells: Sequence[Cell], rows: Sequence[Sequence[str]], columns: int) -> list[int]:
    """The cells for which there is room."""
    widths = [max(len(cell.column.title), *(len(row[n]) for row in rows), 0) for n, cell in enumerate(cells)]
    shown = list(range(len(cells)))
    while sum(widths[n] + _GAP for n in shown) - _GAP > columns:
        leaving = max(shown, key=lambda n: cells[n].leaves)
        if not cells[leaving].leaves:
            break
        shown.remove(leaving)
    return shown


def most_rows(sample: Sample, height: int) -> int:
    """How many lines of containers fit under the devices."""
    return max(_FEWEST_ROWS, height - 5 - (len(sample.devices) + 2 if sample.devices else 0))


def scrolled(view: View, sample: Sample, height: int) -> View:
    """Within what there is."""
    last = max(0, len(sample.lines) - most_rows(sample, height))
    return view._replace(first=max(0, min(view.first, last)))


def draw(sample: Sample, view: View, interval_s: float, width: int, height: int) -> Group:
    """Everything, at most `height` lines: a title, devices, containers, and which keys there are."""
    from rich.console import Group
    from rich.text import Text

    room = most_rows(sample, height)
    lines = in_order(sample, view)
    shown = lines[view.first : view.first + room]
    parts: list[Any] = [_title(sample, view, interval_s, width), Text()]
    used = 2
    if sample.devices:
        most = max(1, height - 5 - 2 - min(len(lines), _FEWEST_ROWS))
        parts += [_table(DEVICES, sample.devices[:most], sample.devices, width), Text()]
        used += 2 + min(len(sample.devices), most)
    if lines:
        parts.append(_table(CONTAINERS, shown, lines, width))
        used += 1 + len(shown)
    else:
        parts.append(Text("no container has a share of a GPU", "dim", no_wrap=True, overflow="crop"))
        used += 1
    parts += [Text()] * (height - used - 1)
    more = f"{view.first + 1}-{view.first + len(shown)} of {len(lines)}" if len(shown) < len(lines) else ""
    parts.append(_footer(more, width))
    return Group(*parts)


def _footer(more: str, width: int) -> Any:
    """`more`: which rows of how many, where not all fit."""
    from rich.text import Text

    keys = next((keys for keys in _HELP if len(keys) + 3 + len(more) <= width), _HELP[-1])
    return Text(keys + (f"   {more}" if more else ""), "dim", no_wrap=True, overflow="crop")


def _table(cells: Sequence[Cell], shown: Sequence[Any], everything: Sequence[Any], width: int) -> Any:
    """Widths are those of all rows, so that scrolling moves nothing sideways."""
    keep = fitting(cells, rows_of(cells, everything), width)
    rows = rows_of(cells, shown)
    return table([cells[n].column for n in keep], [[row[n] for n in keep] for row in rows])


def _title(sample: Sample, view: View, interval_s: float, width: int) -> Any:
    from rich.text import Text

    count = len({line.container.id for line in sample.lines})
    many = "1 container" if count == 1 else f"{count} containers"
    order = f"by {view.sort}{', reversed' if view.reverse else ''}"
    clock = time.strftime("%H:%M:%S", time.localtime(sample.taken))
    text = f"gpushare top  {clock}  every {interval_s:g} s  {many}  {order}"
    text += f"  {sample.note}" if sample.note else ""
    return Text(printable(text), "bold", no_wrap=True, overflow="ellipsis")
