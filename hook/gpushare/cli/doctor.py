"""gpushare doctor."""

from __future__ import annotations

import click

from .. import doctor as checks
from . import output
from .options import Paths, with_format
from .output import Column, is_tty, state_style, write_json, write_line, write_table
from .runtime import settings_of

_COLUMNS = (
    Column("check"),
    Column("result", style=state_style),
    Column("detail", folds=True),
    Column("what to do"),
)


@click.command()
@with_format
@click.pass_obj
def doctor(paths: Paths, output: str) -> int:
    """Check this host for problems.

    Checks the driver, devices, kernel, cgroups, engines, leases, and whether gpushare's library works with the driver.
    Changes nothing. The exit code is 1 if a check fails, 0 if there are only warnings.
    """
    found = _examined(paths)
    failures = sum(result.result == checks.FAIL for _, result in found)
    warnings = sum(result.result == checks.WARN for _, result in found)
    if output == "json":
        rows = [{"name": check.name, **result._asdict()} for check, result in found]
        write_json({"checks": rows, "failures": failures, "warnings": warnings})
        return int(failures > 0)
    if is_tty():
        write_table(_COLUMNS[:3], [row for check, result in found for row in _rows(check, result)])
    else:
        write_table(_COLUMNS, [line for check, result in found for line in _lines(check, result)])
    write_line()
    write_line(f"{_count(failures, 'failure')}, {_count(warnings, 'warning')}, {len(found)} checks")
    return int(failures > 0)


def _rows(check: checks.Check, result: checks.Result) -> list[tuple[str, str, str]]:
    """The rows of one check on a terminal. The hint has a row of its own, because a terminal lacks room for a
    column."""
    rows = [line[:3] for line in _lines(check, result)]
    return [*rows, ("", "", f"what to do: {result.hint}")] if result.hint else rows


def _lines(check: checks.Check, result: checks.Result) -> list[tuple[str, str, str, str]]:
    """The lines of one check in a pipe."""
    return [(check.name, *result[:3]), *(("", "", line, "") for line in result.more)]


def _examined(paths: Paths) -> list[tuple[checks.Check, checks.Result]]:
    settings = settings_of(paths, "")
    with output.Progress() as progress:
        progress.say("querying the driver")
        machine = checks.probe(paths.config, paths.state_dir, settings)
        return list(checks.examine(machine, lambda name: progress.say(f"checking {name}")))


def _count(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"
