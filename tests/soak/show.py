"""Progress of a soak: a bar for each phase on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

PLAIN_EVERY_S = 10.0


class Show:
    """phase(name, total), then advance(text) for each step. One thread at a time, or under the caller's lock."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        name = TextColumn("{task.description}", table_column=Column(min_width=16, no_wrap=True))
        columns = (name, BarColumn(bar_width=10), TextColumn("{task.fields[said]}"))
        self._bars = Progress(*columns, TimeElapsedColumn(), console=self._console)
        self._plain = not self._console.is_terminal
        self._name, self._done, self._next = "", 0.0, 0.0

    def __enter__(self) -> Show:
        if not self._plain:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not self._plain:
            self._bars.stop()

    def phase(self, name: str, total: float) -> None:
        self._name, self._done, self._next = name, 0.0, time.monotonic() + PLAIN_EVERY_S
        self._task = self._bars.add_task(name, total=total, said="")
        if self._plain:
            self._console.print(f"{name} ...")

    def advance(self, text: str, by: float = 1) -> None:
        """Advance by so much of the total; `text` is the progress so far."""
        self._done += by
        self._bars.update(self._task, advance=by, said=text)
        if self._plain and time.monotonic() >= self._next:
            self._next = time.monotonic() + PLAIN_EVERY_S
            self._console.print(f"  {self._name}: {text}")

    def end(self, text: str) -> None:
        self._bars.update(self._task, completed=self._bars.tasks[self._task].total, said=text)
        if self._plain:
            self._console.print(f"  {self._name}: {text}")

    def note(self, line: str) -> None:
        self._console.print(f"  ! {line}", markup=False)
