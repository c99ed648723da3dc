"""Run one target for some time, and report its coverage and findings."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.fuzz import words
from tests.fuzz.targets import CORPUS, PROGRAMS, Target
from tests.support.host import TREE

FOUND = PROGRAMS / "found"
HANGS_S = 25  # for one input
_COVERAGE = re.compile(r"^#\d+\s+(\S+)\s+cov: (\d+)", re.MULTILINE)
_COUNT = re.compile(r"^#(\d+)\s", re.MULTILINE)
_FAILURE = re.compile(
    r"(?:does not hold: .*|runtime error: .*|(?:Address|Leak|Memory)Sanitizer: [a-zA-Z-]+.*|"
    r"libFuzzer: (?:timeout|out-of-memory)[^\n]*|^\w*(?:Error|Exception)(?:: .*)?$)",
    re.MULTILINE,
)


class Outcome(NamedTuple):
    """`before`: edges that the corpus reaches; `after`: edges including the new inputs."""

    target: Target
    executions: int
    before: int
    after: int
    findings: tuple[Path, ...]  # inputs, each with a file of its output beside it
    problem: str  # "" when nothing is wrong

    def reproduce(self) -> list[str]:
        """A command line that reproduces each finding."""
        return [shlex.join([*self.target.command(), os.path.relpath(path, TREE)]) for path in self.findings]


def environment() -> dict[str, str]:
    """The targets' environment; -m imports this tree's modules."""
    paths = os.pathsep.join((str(TREE), str(TREE / "hook")))
    return {**os.environ, "PYTHONPATH": paths, "ASAN_OPTIONS": "allow_addr2line=1", "PYTHONHASHSEED": "0"}


def run(target: Target, seconds: float, work: Path, corpus: Path = CORPUS, inputs: int = -1) -> Outcome:
    """Run the corpus, then new inputs until `seconds` are over or there were so many `inputs`, with the corpus. Inputs
    with new coverage stay in `work`, which also counts as corpus. The run ends at the first finding."""
    FOUND.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    known = set(FOUND.iterdir())
    options = {
        "max_total_time": max(1, round(seconds)),
        "runs": inputs,  # -1: any number
        "max_len": target.longest,
        "timeout": HANGS_S,
        "artifact_prefix": f"{FOUND}/{target.name}-",
        **({"dict": words.write(PROGRAMS / "words.dict")} if target.words else {}),
    }
    folders = [str(work), str(corpus / target.name)]
    command = [*target.command(), *(f"-{name}={value}" for name, value in options.items()), *folders]
    done = subprocess.run(
        command,
        cwd=TREE,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=seconds + 4 * HANGS_S,
    )
    output = done.stdout.decode("utf-8", "replace")
    findings = tuple(sorted(set(FOUND.iterdir()) - known))
    findings = tuple(path for path in findings if path.name.startswith(f"{target.name}-"))
    for path in findings:
        path.with_suffix(".log").write_text(output)
    steps = {word: int(edges) for word, edges in _COVERAGE.findall(output)}
    counts = [int(count) for count in _COUNT.findall(output)] or [0]
    return Outcome(
        target, max(counts), steps.get("INITED", 0), max(steps.values(), default=0), findings, _problem(done, output)
    )


def _problem(done: subprocess.CompletedProcess[bytes], output: str) -> str:
    if done.returncode == 0:
        return "" if "INITED" in output else f"it did not begin: {output[-300:].strip()}"
    failure = _FAILURE.search(output)
    return failure.group(0).strip() if failure else f"exit code {done.returncode}: {output[-300:].strip()}"


def processors() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
