"""Draw docs/pictures/architecture.svg for README.md: python3 tools/architecture.py (`make pictures`)."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "architecture.svg"
WIDTH, HEIGHT = 860, 366
INK, MUTED, PAPER = "#1f2328", "#57606a", "#ffffff"
FONTS = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


class Box(NamedTuple):
    x: int
    y: int
    width: int
    height: int
    fill: str
    title: str
    lines: tuple[str, ...] = ()

    def svg(self) -> str:
        """A rounded rectangle with a bold title and lines below it."""
        at = f'x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}"'
        parts = [f'<rect {at} rx="8" fill="{self.fill}" stroke="{MUTED}"/>']
        parts.append(_text(self.x + 12, self.y + 22, self.title, INK, bold=True))
        parts += [_text(self.x + 12, self.y + 42 + 18 * row, line, MUTED) for row, line in enumerate(self.lines)]
        return "\n".join(parts)


class Arrow(NamedTuple):
    x1: int
    y1: int
    x2: int
    y2: int
    label: str = ""

    def svg(self) -> str:
        line = f'<path d="M{self.x1} {self.y1} L{self.x2} {self.y2}" stroke="{INK}" marker-end="url(#head)"/>'
        middle_x, middle_y = (self.x1 + self.x2) // 2, (self.y1 + self.y2) // 2
        level = self.y1 == self.y2
        at = (middle_x, middle_y - 7) if level else (middle_x + 8, middle_y + 4)
        label = _text(*at, self.label, MUTED, level)
        return f"{line}\n{label}" if self.label else line


BOXES = (
    Box(16, 40, 170, 84, "#ddf4ff", "Engine", ("docker, Podman,", "containerd, CRI-O")),
    Box(
        256,
        40,
        220,
        84,
        "#dafbe1",
        "gpushare runtime or hook",
        ("parse, check policy, reserve,", "place shim and limits"),
    ),
    Box(256, 196, 220, 84, "#fff8c5", "State in /run/gpushare", ("ledger, limits file,", "usage of every container")),
    Box(16, 196, 170, 84, "#dafbe1", "gpushare command", ("list, top, limit set,", "doctor, export")),
    Box(556, 20, 288, 270, "#f6f8fa", "Container"),
    Box(576, 56, 248, 66, "#ffffff", "Program", ("unchanged; calls CUDA and NVML",)),
    Box(
        576,
        164,
        248,
        106,
        "#dafbe1",
        "Shim: libcuda, libnvidia-ml",
        ("memory over the limit fails", "launches wait for their share", "reports a GPU of that size"),
    ),
    Box(556, 312, 288, 40, "#ffebe9", "NVIDIA driver and GPU"),
)
ARROWS = (
    Arrow(186, 82, 254, 82, "create"),
    Arrow(476, 82, 554, 82, "start"),
    Arrow(366, 124, 366, 194, "reserve"),
    Arrow(186, 238, 254, 238, "read, set"),
    Arrow(574, 238, 478, 238, "charge"),
    Arrow(700, 122, 700, 162, "calls"),
    Arrow(700, 270, 700, 310),
)


def _text(x: int, y: int, text: str, colour: str, centred: bool = False, bold: bool = False) -> str:
    anchor = ' text-anchor="middle"' if centred else ""
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x}" y="{y}" fill="{colour}"{anchor}{weight}>{escape(text)}</text>'


def svg() -> str:
    """Return the picture."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
        f' font-family="{FONTS}" font-size="13" fill="none">\n<title>Architecture of gpushare</title>\n'
        f'<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="{PAPER}"/>\n'
    )
    return head + "\n".join(part.svg() for part in (*BOXES, *ARROWS)) + "\n</svg>\n"


if __name__ == "__main__":
    PICTURE.write_text(svg())
