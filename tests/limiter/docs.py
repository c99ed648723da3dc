"""The tables in docs/internals/limiter.md: how many cells of each kind hold, and the keys of `make bench`. A row of
tools/generated.py."""

from __future__ import annotations

import json

from tests.limiter.ablation import COLUMNS
from tests.limiter.ablation import TABLE as ABLATIONS
from tests.limiter.cells import TREE
from tests.limiter.matrix import FIGURES, Cell, cells, misses

PAGE = TREE / "docs" / "internals" / "limiter.md"
BEGIN, END = "<!-- cells: make docs -->\n", "<!-- end of cells -->\n"
KERNELS = {
    "5us": "5 us to 1 ms",
    "50us": "5 us to 1 ms",
    "1ms": "5 us to 1 ms",
    "lognormal": "irregular",
    "bimodal": "irregular",
    "20ms": "20 ms",
}


def company(cell: Cell) -> str:
    """Return the table row of a cell."""
    if len(cell.tenants) == 1:
        return "alone"
    if cell.world:
        return "other slices and switch costs"
    if "/" in cell.name and "beside" not in cell.name and "unequal" not in cell.name:
        full = sum(tenant.limit for tenant in cell.tenants) >= 100
        return "2 to 8 containers, all of the device" if full else "2 to 8 containers, less than all of it"
    return "other programs, other kernels, several processes beside a container"


def table() -> str:
    """Return the tables as Markdown."""
    columns = list(dict.fromkeys(KERNELS.values()))
    missed = misses()
    counts: dict[tuple[str, str], list[int]] = {}
    for cell in cells():
        held_of = counts.setdefault((company(cell), KERNELS[cell.tenants[0].kernel]), [0, 0])
        held_of[0] += cell.name not in missed
        held_of[1] += 1
    lines = ["| cells held | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in dict.fromkeys(row for row, _ in counts):
        lines.append(f"| {row} | " + " | ".join("{} of {}".format(*counts[row, column]) for column in columns) + " |")
    lines += ["", "| `make bench` | median | worst |", "|---|---|---|"]
    lines += [
        f"| `{key}` | {middle:g} | {worst:g} |" for key, (middle, worst) in json.loads(FIGURES.read_text()).items()
    ]
    held = len(cells()) - len(missed)
    lines += ["", "| without | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for part, values in json.loads(ABLATIONS.read_text()).items():
        lines.append(f"| {part} | " + " | ".join(f"{value:+.1f}" for value in values) + " |")
    return "\n".join(lines) + f"\n\n{held} of {len(cells())} cells are held with each of three seeds.\n"


def page() -> str:
    """Return the page with the current tables."""
    head, rest = PAGE.read_text().split(BEGIN)
    return head + BEGIN + table() + END + rest.split(END)[1]
