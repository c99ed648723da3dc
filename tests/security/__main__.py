"""make test-attacks: run every attack of the table, print each outcome, write build/attacks.json.

python -m tests.security [--runtime runc|crun] [--format table|json] [pytest's arguments]

With crun the result is build/attacks-crun.json, beside that of runc.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console
from rich.table import Table

from tests.support.host import BUILD, TREE

from . import table


class Row(NamedTuple):
    """The report of one attack. `outcome`: share, refused, a count of both, held (elsewhere), failed, not run."""

    kind: str
    name: str
    way: str
    outcome: str
    words: str
    seconds: float
    facts: tuple[str, ...]
    cves: tuple[str, ...]

    @property
    def failed(self) -> bool:
        return self.outcome in ("failed", "not run")


class Recorder:
    """A pytest plugin that records each test's result by node id."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.failures: dict[str, str] = {}
        self.words: dict[str, str] = {}
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        node = report.nodeid
        self.seconds[node] = self.seconds.get(node, 0.0) + report.duration
        self.words.update((node, str(value)) for key, value in report.user_properties if key == "outcome")
        if report.failed or (report.skipped and not hasattr(report, "wasxfail")):
            self.failures[node] = str(report.longrepr).strip().splitlines()[-1]
        elif report.when == "call":
            self.passed.add(node)

    def outcome(self, node: str) -> str:
        if node in self.failures:
            return "failed"
        if node not in self.passed:
            return "not run"
        words = self.words.get(node, "held")
        whole = words in ("share", "held", table.NO_GPU.words, table.ENDS.words) or "shares, " in words
        return words if whole else "refused"

    def row(self, kind: str, one: Any, way: str, nodes: list[str]) -> Row:
        outcomes = [self.outcome(node) for node in nodes] or ["not run"]
        bad = [outcome for outcome in ("failed", "not run") if outcome in outcomes]
        outcome = bad[0] if bad else (f"{len(nodes)} tests" if kind == "elsewhere" else outcomes[0])
        said = [self.failures.get(node) or self.words.get(node, "") for node in nodes]
        words = "" if kind == "elsewhere" and not bad else next((text for text in said if text), "")
        seconds = sum(self.seconds.get(node, 0.0) for node in nodes)
        return Row(kind, one.name, way, outcome, words, round(seconds, 2), one.facts, one.cves)


def collected(recorder: Recorder, elsewhere: tuple[table.Elsewhere, ...]) -> list[Row]:
    """Return a row for each attack and way, and one for each attack that other tests cover."""
    here = "tests/security/test_attacks.py::"
    found: list[Row] = []
    for kind, test, some in (("attack", "test_attack", table.ATTACKS), ("race", "test_race", table.RACES)):
        for one in some:
            for way in ("hook", "runtime"):
                node = f"{here}{test}[{way}-{one.name.replace('/', '|')}]"
                found.append(recorder.row(kind, one, way, [node]))
    for row in elsewhere:
        nodes = [node for node in recorder.seconds if node.partition("[")[0] in {f"tests/{test}" for test in row.tests}]
        missing = [test for test in row.tests if not any(node.startswith(f"tests/{test}") for node in nodes)]
        found.append(recorder.row("elsewhere", row, "", [*nodes, *missing]))
    return found


def show(rows: list[Row], runtime: str, path: Path) -> None:
    shown = Table(title=f"Attacks on the host, with {runtime}", title_justify="left")
    for column in ("attack", "way", "outcome", "CVEs or conditions"):
        shown.add_column(column, overflow="fold")
    for row in rows:
        style = "red" if row.failed else ""
        about = row.words if row.failed else ", ".join(row.cves or row.facts)
        shown.add_row(row.name, row.way, row.outcome, about, style=style)
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False)
    console.print(shown)
    bad = sum(row.failed for row in rows)
    console.print(f"{len(rows)} attacks, {bad} failed or not run; build/{path.name} has the message of each refusal")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make test-attacks")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--runtime", choices=("runc", "crun"), default="runc")
    options, others = parser.parse_known_args(argv)
    recorder = Recorder()
    elsewhere = table.elsewhere(options.runtime)
    tests = [str(Path(__file__).parent), *(f"{TREE}/tests/{test}" for row in elsewhere for test in row.tests)]
    quiet = ["-q", "--no-header"]
    stdout = sys.stdout
    if options.format == "json":
        sys.stdout = sys.stderr  # only the JSON goes to standard output
    low_level = ["--low-level", options.runtime]
    code = pytest.main([*quiet, *low_level, "--rootdir", str(TREE), *others, *dict.fromkeys(tests)], plugins=[recorder])
    sys.stdout = stdout
    rows = collected(recorder, elsewhere)
    text = json.dumps([row._asdict() for row in rows], indent=1)
    path = BUILD / ("attacks.json" if options.runtime == "runc" else f"attacks-{options.runtime}.json")
    path.write_text(text + "\n")
    print(text) if options.format == "json" else show(rows, options.runtime, path)
    return int(bool(code) or any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
