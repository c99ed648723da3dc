"""Print the demo's output: text, with colour on a terminal."""

from __future__ import annotations

from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

COLOURS = ("cyan", "magenta")

console = Console(highlight=False, soft_wrap=True)


class Row(NamedTuple):
    """One container's request and results, in bytes."""

    name: str
    asked: str
    limit_bytes: int
    context_bytes: int  # taken before the first allocation
    got_bytes: int  # successfully allocated by the program
    ledger_bytes: int  # peak that the simulated GPU counted
    verdict: str  # "" if the limit was reached and not exceeded


def size(count: int) -> str:
    """A size in GiB or MiB, like in gpushare's output. Less than 1 MiB is shown in bytes, because even a few bytes over
    the limit count."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if count >= unit:
            return f"{count // unit} {name}" if count % unit == 0 else f"{count / unit:.2f} {name}"
    return f"{count} bytes"


def step(text: str) -> None:
    console.print(Text(f"\n{text}", style="bold"))


def remark(text: str) -> None:
    console.print(Text(f"  {text}"))


def tenant(number: int, name: str, text: str) -> None:
    console.print(Text.assemble((f"  {name:<5} ", f"bold {COLOURS[number % len(COLOURS)]}"), text))


def seen(number: int, name: str, event: dict[str, Any]) -> None:
    tenant(number, name, f"sees {event['gpus']} GPU, {event['name']}")
    for library in ("nvml", "cuda"):
        total, free = event[f"{library}_total_bytes"], event[f"{library}_free_bytes"]
        call = {"nvml": "nvmlDeviceGetMemoryInfo", "cuda": "cuMemGetInfo"}[library]
        tenant(number, name, f"  {call + ':':<25}{size(free)} free of {size(total)}")


def full(number: int, name: str, event: dict[str, Any]) -> None:
    tenant(number, name, f"allocated {size(event['got_bytes'])}, then {event['refusal']}")


def output(text: str) -> None:
    for line in text.rstrip().splitlines():
        console.print(Text(f"  {line}"))


def verdict(rows: list[Row]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("container", "requested", "limit", "context", "allocated", "on the GPU", ""):
        left = heading in ("container", "requested", "")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        mark = Text(row.verdict or "exact", style="bold red" if row.verdict else "bold green")
        sizes = (row.limit_bytes, row.context_bytes, row.got_bytes, row.ledger_bytes)
        table.add_row(row.name, row.asked, *map(size, sizes), mark)
    console.print(Padding(table, (0, 0, 0, 2), expand=False))
