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


def svg(screen: pyte.Screen, title: str) -> str:
    shown = lines(screen)
    width = round(2 * MARGIN + screen.columns * CELL_WIDTH)
    height = 2 * MARGIN + len(shown) * CELL_HEIGHT
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        f' font-family="{FONTS}" font-size="{FONT_SIZE}" xml:space="preserve">'
    )
    body = "\n".join(part for row, cells in enumerate(shown) for part in _line(row, cells))
    frame = f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>'
    return f"{head}\n<title>{escape(title)}</title>\n{frame}\n{body}\n</svg>\n"
