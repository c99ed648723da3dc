"""`make fuzz`: every target for SECONDS (60), or TARGET alone. Exit code 1 on any finding, 130 after Ctrl-C.

python -m tests.fuzz [--seconds N] [--list] [TARGET]...
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.fuzz.runner import Outcome, processors, run
from tests.fuzz.targets import PROGRAMS, TARGETS, Target
from tests.support.host import TREE

WORK = PROGRAMS / "work"


def fuzz(targets: Sequence[Target], seconds: float, console: Console) -> list[Outcome]:
    """Run targets in parallel, one per processor, and print a line for each that ends."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.completed}/{task.total}"))
    outcomes = []
    with (
        Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bars,
        ThreadPoolExecutor(processors()) as pool,
    ):
        bar = bars.add_task("targets", total=len(targets))
        running = [pool.submit(run, target, seconds, WORK / target.name) for target in targets]
        try:
            for done in as_completed(running):
                outcome = done.result()
                outcomes.append(outcome)
                bars.advance(bar)
                console.print(
                    f"{outcome.target.name}: {outcome.executions} inputs; {outcome.problem or 'nothing found'}"
                )
        except BaseException:
            for future in running:
                future.cancel()
            raise
    return sorted(outcomes, key=lambda outcome: targets.index(outcome.target))


def table(outcomes: Sequence[Outcome]) -> Table:
    shown = Table("target", "reads", box=None)
    for title in ("inputs", "coverage", "new", "findings"):
        shown.add_column(title, justify="right")
    for one in outcomes:
        numbers = (
            one.executions,
            one.after,
            one.after - one.before,
            len(one.findings) or ("failed" if one.problem else 0),
        )
        shown.add_row(one.target.name, one.target.reads, *map(str, numbers))
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="for each target")
    parser.add_argument("--list", action="store_true", help="show the targets")
    parser.add_argument("target", nargs="*", choices=[*TARGETS, []], help="all, unless named")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True)
    targets = [TARGETS[name] for name in options.target] or list(TARGETS.values())
    if options.list:
        for target in targets:
            print(f"{target.name:12} {target.reads}")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        outcomes = fuzz(targets, options.seconds, console)
    except KeyboardInterrupt:
        return 130
    except subprocess.TimeoutExpired as error:
        console.print(f"fuzz: {error.cmd[0]} does not end", markup=False)
        return 1
    console.print(table(outcomes))
    wrong = [outcome for outcome in outcomes if outcome.problem or outcome.findings]
    for outcome in wrong:
        console.print(f"\n{outcome.target.name}: {outcome.problem}", markup=False)
        for command in outcome.reproduce():
            console.print(f"  again, in {TREE}: PYTHONPATH=hook:. {command}", markup=False)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
