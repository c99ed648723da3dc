"""Print the tables of checks and assumptions, and write build/gpu-check.json."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.hardware.assumptions import CONFIRMED, REFUTED, UNCLEAR, Finding
from tests.hardware.session import Result

COLOURS = {
    "held": "green",
    "missed": "bold red",
    "failed": "red",
    "absent": "dim",
    "measured": "cyan",
    "not run": "dim",
}
VERBS = {CONFIRMED: "confirms", REFUTED: "REFUTES", UNCLEAR: "leaves open"}
WIDTH = 180


def write(path: Path, content: dict[str, Any]) -> None:
    """Write the file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(temporary, path)


def tell(findings: list[Finding]) -> None:
    """Print what each figure says of an assumption, and which file relies on a refuted one."""
    for row, verdict, figure in findings:
        relies = f"; {row.relies_on} relies on it" if verdict == REFUTED else ""
        print(f"  {VERBS[verdict]} {row.id}: {row.sentence} {figure}{relies}", flush=True)


def show(rows: list[tuple[str, str, Result]]) -> None:
    """Print the table; with rich if installed. `rows`: name, description, result."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        _plain(rows)
        return
    table = Table(box=box.SIMPLE, show_edge=False)
    for heading in ("check", "what", "", "s"):
        table.add_column(heading, no_wrap=True, justify="right" if heading == "s" else "left")
    table.add_column("result", overflow="fold")
    for name, what, result in rows:
        mark = Text(result.verdict, style=COLOURS[result.verdict])
        table.add_row(name, what, mark, f"{result.seconds:.1f}", Text(result.note))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH  # a log has no line limit
    console.print(table)


def _plain(rows: list[tuple[str, str, Result]]) -> None:
    width = max(len(name) for name, _, _ in rows)
    for name, what, result in rows:
        print(f"{name:<{width}}  {result.verdict:<8}  {result.seconds:6.1f} s  {what}: {result.note}")
