"""gpushare usage."""

from __future__ import annotations

import csv
import datetime
import io
import re
import time
from typing import Any

import click

from ..config import node
from ..core.errors import GpushareError, RequestError, what_to_do
from ..core.quantity import human
from ..core.quoting import printable, shown
from ..monitor import usage as sums
from ..state import log
from .options import Paths, given, with_no_color
from .output import Column, user_name, write, write_json, write_table

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SINCE_HINT = "write 24h, 90m, 7d, or a date such as 2026-11-01 or 2026-11-01T08:00"
_COLUMNS = tuple(
    Column(title, right=title != "name")
    for title in ("name", "containers", "gpu granted", "gpu used", "memory granted", "memory used", "peak", "refused")
    + ("throttled", "suspended", "running", "end unknown")
)


@click.command()
@click.option(
    "--since",
    callback=given,
    default="24h",
    show_default=True,
    metavar="TIME",
    help="A duration until now, or a date or time.",
)
@click.option("--by", type=click.Choice([*sums.BY]), default=sums.USER, show_default=True, help="What to sum by.")
@click.option(
    "--format",
    "output",
    type=click.Choice(["table", "json", "csv"]),
    default="table",
    show_default=True,
    help="Output format.",
)
@with_no_color
@click.pass_obj
def usage(paths: Paths, since: str, by: str, output: str) -> None:
    """Sum what containers were granted and used.

    Sums device time, and memory multiplied by time, of all containers that run or have ended since TIME, from the usage
    journal (usage.journal in the configuration). A container that began earlier counts with the part since then.
    """
    config = node.load_config_only(*paths)
    since_s = _since(since)
    try:
        report = sums.collect(config, paths.state_dir, since_s, by)
    except OSError as error:
        raise GpushareError(
            f"cannot read the usage journal {shown(str(error.filename))}: {error.strerror}", what_to_do(error)
        ) from None
    if output == "json":
        write_json(_plain(report, by))
        return
    if output == "csv":
        write(_csv(report, by))
    else:
        write_table(_COLUMNS, [_cells(one, by) for one in report.groups])
    for line in _notes(report):
        log.to_stderr(f"gpushare: {line}")


def _since(text: str) -> float:
    """Return unix seconds. Raise RequestError."""
    found = re.fullmatch(r"([0-9]{1,9})([smhdw])", text.strip())
    now = time.time()
    if found:
        return max(0.0, now - int(found[1]) * _UNITS[found[2]])
    try:
        then = datetime.datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        raise RequestError(f"--since {shown(text)}: not a duration and not a date", _SINCE_HINT) from None
    if then > now:
        raise RequestError(f"--since {shown(text)} is in the future", _SINCE_HINT)
    return max(0.0, then)


def _name(group: sums.Group, by: str) -> str:
    return user_name(int(group.name)) if by == sums.USER and group.name else printable(group.name)


def _cells(group: sums.Group, by: str) -> tuple[str, ...]:
    total = group.total
    return (
        _name(group, by) or "-",
        str(group.containers),
        f"{total.granted_ns / 1e9:.1f} s",
        f"{total.used_ns / 1e9:.1f} s",
        f"{total.granted_byte_ns / 2**30 / 3.6e12:.3f} GiB h",
        f"{total.used_byte_ns / 2**30 / 3.6e12:.3f} GiB h",
        human(group.peak_bytes),
        str(total.refused),
        f"{total.throttled_ns / 1e9:.1f} s",
        f"{total.suspended_ns / 1e9:.1f} s",
        str(group.running),
        str(group.unreported),
    )


def _values(group: sums.Group, by: str) -> dict[str, Any]:
    total = group.total
    return {
        "name": _name(group, by) or None,
        "containers": group.containers,
        "running": group.running,
        "end_unknown": group.unreported,
        "use_unknown": group.unmeasured,
        "gpu_seconds_granted": round(total.granted_ns / 1e9, 3),
        "gpu_seconds_used": round(total.used_ns / 1e9, 3),
        "memory_byte_seconds_granted": total.granted_byte_ns // 10**9,
        "memory_byte_seconds_used": total.used_byte_ns // 10**9,
        "memory_peak_bytes": group.peak_bytes,
        "refused": total.refused,
        "throttled_seconds": round(total.throttled_ns / 1e9, 3),
        "suspended_seconds": round(total.suspended_ns / 1e9, 3),
    }


def _plain(report: sums.Report, by: str) -> dict[str, Any]:
    return {
        "since": round(report.since_s, 3),
        "until": round(report.until_s, 3),
        "by": by,
        "journal": report.path or None,
        "journal_since": report.first_s,
        "unreadable_lines": report.unreadable,
        "groups": [_values(one, by) for one in report.groups],
    }


def _csv(report: sums.Report, by: str) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_values(sums.Group("", 0, 0, 0, 0, 0, sums.Total()), by))
    for one in report.groups:
        writer.writerow("" if value is None else value for value in _values(one, by).values())
    return text.getvalue()


def _notes(report: sums.Report) -> list[str]:
    """Return a line for each part that the sums lack."""
    notes = []
    if not report.path:
        notes.append("there is no usage journal (usage.journal): only running containers are counted")
    elif report.first_s is None:
        notes.append(f"the usage journal {shown(report.path)} has no entries: only running containers are counted")
    elif report.first_s > report.since_s:
        first = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report.first_s))
        notes.append(f"the usage journal begins at {first}")
    if report.unreadable:
        lines = "1 line" if report.unreadable == 1 else f"{report.unreadable} lines"
        notes.append(
            f"{lines} of the usage journal could not be read and {'is' if lines[:2] == '1 ' else 'are'} left out"
        )
    return notes
