"""gpushare top."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from typing import Any

import click

from . import facts, output, topscreen
from .options import Paths, with_format, with_interval
from .output import BAR_CELLS
from .sample import Sample, Sampler
from .topscreen import CONTAINERS, DEVICES, PLAIN, SORTS, Cell, View

_KEYS = {key: name for name, (key, _) in SORTS.items()}
_SCROLL = {"up": -1, "down": 1, "page up": -10, "page down": 10, "home": -(1 << 30), "end": 1 << 30}
_HELP = ("h", "?")
_SORT_STEP = {"left": -1, "right": 1}


@click.command()
@click.option("--once", is_flag=True, help="Print one sample and exit.")
@with_interval(2.0, "Time between two samples.")
@click.option("--sort", type=click.Choice(list(SORTS)), default="memory", show_default=True, help="Sort by this value.")
@with_format
@click.pass_obj
def top(paths: Paths, once: bool, interval: float, sort: str, output: str) -> int:
    """Watch how much of their shares containers use.

    Keys: h or ? shows all keys, q quits, m p c t a n sort, r reverses the order, up and down scroll. TREND shows the
    compute use of the last samples. `stats` is another name of this command.

    THROTTLED is the time for which threads waited for the compute limit, in percent of the time since the last sample:
    200% means two threads all the time. The first sample counts from the container's start. In a pipe samples are
    printed one below the other; as JSON each sample is one line.
    """
    sampler = Sampler(paths)
    if output == "table" and not once and _has_screen():
        return _watch(sampler, View(sort), interval)
    show = _print_json if output == "json" else _print
    while True:
        began = time.monotonic()
        show(sampler.take(), View(sort))
        if once:
            return 0
        time.sleep(max(0.0, began + interval - time.monotonic()))


def _has_screen() -> bool:
    return output.is_tty() and output.is_capable()


def _print_json(sample: Sample, _: View) -> None:
    output.write(json.dumps(sample.plain()) + "\n", now=True)


def _print(sample: Sample, view: View) -> None:
    """Print devices and containers on a terminal; in a pipe, all columns of containers except bars."""
    lines = topscreen.in_order(sample, view)
    if output.is_tty():
        write_cells(DEVICES, sample.devices)
        if sample.devices:
            output.write_line()
        if not lines:
            output.write_line(facts.none())
            return
    write_cells(topscreen.without_empty(CONTAINERS if output.is_tty() else PLAIN, lines), lines)
    output.write("", now=True)


def write_cells(cells: Sequence[Cell], values: Sequence[Any]) -> None:
    """Write a table: on a terminal the columns that fit, in a pipe all but bars."""
    if not values and output.is_tty():
        return
    keep, length = list(range(len(cells))), BAR_CELLS
    if output.is_tty():
        keep, length = topscreen.fitting(cells, values, shutil.get_terminal_size().columns)
    cells = [cells[n] for n in keep]
    output.write_table([cell.column for cell in cells], topscreen.rows_of(cells, values, length))


def _watch(sampler: Sampler, view: View, interval: float) -> int:
    """Show samples until the user presses q or a signal arrives. Returns the exit code."""
    from .terminal import RESIZED, Ended, Screen

    sample = sampler.take()  # before the screen is taken over, so that the user sees an error
    due = time.monotonic() + interval
    try:
        with Screen() as screen:
            while True:
                size = shutil.get_terminal_size()
                view = topscreen.scrolled(view, sample, size.lines)
                screen.show(topscreen.draw(sample, view, interval, size.columns, size.lines))
                for key in screen.wait(due - time.monotonic()):
                    if key == "q" and not view.help:
                        return 0
                    if key == " " and not view.help:
                        due = 0
                    elif key != RESIZED:
                        view = pressed(view, key)
                if time.monotonic() >= due:
                    sample = sampler.take()
                    due = time.monotonic() + interval
    except Ended as end:
        return 128 + end.number


def pressed(view: View, key: str) -> View:
    """The view after a key press; unchanged for an unknown key. Any key closes the help."""
    if view.help or key in _HELP:
        return view._replace(help=not view.help)
    if key in _KEYS:
        return view._replace(sort=_KEYS[key], first=0)
    if key in _SCROLL:
        return view._replace(first=view.first + _SCROLL[key])
    if key in _SORT_STEP:
        names = list(SORTS)
        return view._replace(sort=names[(names.index(view.sort) + _SORT_STEP[key]) % len(names)], first=0)
    return view._replace(reverse=not view.reverse) if key == "r" else view
