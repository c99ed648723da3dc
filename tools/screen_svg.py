"""Render a terminal's screen (pyte) as SVG: plain text in one of the reader's fonts, no script, no web font.

Every run of characters of one style is a <text> with a fixed width, so columns stay aligned in any font. Block
characters of bars are drawn as rectangles, because fonts leave gaps between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import groupby
from typing import NamedTuple

import pyte

CELL_WIDTH, CELL_HEIGHT, FONT_SIZE, BASELINE, MARGIN = 8.4, 19, 14, 14, 14
BACKGROUND, FOREGROUND = "#161b22", "#e6edf3"
COLOURS = {
    "black": "#484f58", "red": "#ff7b72", "green": "#56d364", "brown": "#e3b341",  # pyte calls yellow brown
    "blue": "#79c0ff", "magenta": "#d2a8ff", "cyan": "#56d4dd", "white": "#b1bac4",
}  # fmt: skip
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
BLOCKS = {"█": 1.0, "░": 0.25}  # character -> opacity of its colour
SPARKS = {char: (at + 1) / 8 for at, char in enumerate("▁▂▃▄▅▆▇")}  # character -> height, in heights of a block


class Style(NamedTuple):
    colour: str
    background: str
    bold: bool
    block: float  # 0 unless the character is one of BLOCKS or SPARKS
    height: float


def _colour(name: str, default: str) -> str:
    """Convert pyte's colour names, or six hexadecimal digits for one of the 256 colours."""
    if name == "default":
        return default
    name = name.replace("bright", "")
    return COLOURS.get(name, f"#{name}")


def _style(cell: pyte.screens.Char) -> Style:
    colour, background = _colour(cell.fg, FOREGROUND), _colour(cell.bg, BACKGROUND)
    if cell.reverse:
        colour, background = background, colour
    height = SPARKS.get(cell.data, 0.0)
    return Style(colour, background, cell.bold, BLOCKS.get(cell.data, float(height > 0)), height or 1.0)


def _line(row: int, cells: list[pyte.screens.Char]) -> Iterator[str]:
    """Yield the elements of one line of the screen."""
    y, column = MARGIN + row * CELL_HEIGHT, 0
    for style, group in groupby(cells, _style):
        text = "".join(cell.data for cell in group)
        x, width = MARGIN + column * CELL_WIDTH, len(text) * CELL_WIDTH
        column += len(text)
        box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{CELL_HEIGHT}"'
        if style.background != BACKGROUND:
            yield f'<rect {box} fill="{style.background}"/>'
        if style.block:
            height = (CELL_HEIGHT - 6) * style.height
            bar = f'x="{x:.1f}" y="{y + CELL_HEIGHT - 3 - height:g}" width="{width:.1f}" height="{height:g}"'
            yield f'<rect {bar} fill="{style.colour}" opacity="{style.block}"/>'
        elif text.strip():
            # word by word, so that a font of another width shifts no word
            yield from _words(text, x, y + BASELINE, style)


def _words(text: str, x: float, y: float, style: Style) -> Iterator[str]:
    weight = ' font-weight="bold"' if style.bold else ""
    at = 0
    while at < len(text):
        end = text.find("  ", at)
        end = len(text) if end < 0 else end
        word = text[at:end]
        if word.strip():
            first = len(word) - len(word.lstrip())
            shown = word.strip()
            place = f'x="{x + (at + first) * CELL_WIDTH:.1f}" y="{y}" textLength="{len(shown) * CELL_WIDTH:.1f}"'
            yield f'<text {place} fill="{style.colour}"{weight}>{escape(shown, quote=False)}</text>'
        at = end + 1


def lines(screen: pyte.Screen) -> list[list[pyte.screens.Char]]:
    """Return the rows of cells without empty rows at the top and bottom."""
    used = [row for row, text in enumerate(screen.display) if text.strip()]
    rows = range(used[0], used[-1] + 1) if used else range(0)
    return [[screen.buffer[row][column] for column in range(screen.columns)] for row in rows]


def rows(screen: pyte.Screen) -> list[str]:
    """Return the elements of each row, without the empty rows at the top and bottom."""
    return ["\n".join(_line(row, cells)) for row, cells in enumerate(lines(screen))]


def svg(screen: pyte.Screen, title: str) -> str:
    return _framed("\n".join(filter(None, rows(screen))), screen.columns, len(lines(screen)), title)


def film(shots: list[tuple[float, list[str]]], columns: int, title: str) -> str:
    """Return an SVG that plays forever. `shots`: (seconds, `rows` of a screen). A row that stays is written once.

    A viewer that plays no animations shows the shot that lasts longest.
    """
    whole = sum(seconds for seconds, _ in shots)
    longest = max(range(len(shots)), key=lambda number: shots[number][0])
    still = sum(seconds for seconds, _ in shots[:longest]) / whole
    parts: list[str] = []
    for row in range(max(len(shown) for _, shown in shots)):
        begin, text = 0.0, ""
        at = 0.0
        for seconds, shown in [*shots, (0.0, [])]:
            now = shown[row] if row < len(shown) else ""
            if now != text:
                parts += [_between(text, begin / whole, at / whole, whole, still)] if text else []
                begin, text = at, now
            at += seconds
    return _framed("\n".join(parts), columns, max(len(shown) for _, shown in shots), title)


def _between(text: str, begin: float, end: float, seconds: float, still: float) -> str:
    """Show elements from `begin` to `end`, and in a still picture those of the time `still`: parts of the whole
    time."""
    times = [(0.0, "hidden")] * (begin > 0) + [(begin, "visible")] + [(end, "hidden")] * (end < 1)
    values = ";".join(value for _, value in times)
    keys = ";".join(f"{time:.4f}".rstrip("0").rstrip(".") for time, _ in times)
    play = (
        f'<animate attributeName="visibility" values="{values}" keyTimes="{keys}" calcMode="discrete"'
        f' dur="{seconds:.1f}s" repeatCount="indefinite"/>'
    )
    shown = "visible" if begin <= still < end else "hidden"
    return f'<g visibility="{shown}">{play}\n{text}\n</g>'


def _framed(body: str, columns: int, count: int, title: str) -> str:
    width = round(2 * MARGIN + columns * CELL_WIDTH)
    height = 2 * MARGIN + count * CELL_HEIGHT
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        f' font-family="{FONTS}" font-size="{FONT_SIZE}" xml:space="preserve">'
    )
    frame = f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>'
    return f"{head}\n<title>{escape(title)}</title>\n{frame}\n{body}\n</svg>\n"
