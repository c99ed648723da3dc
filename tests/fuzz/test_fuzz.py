"""Every target runs its corpus, and some new inputs. `make fuzz` runs longer."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fuzz import runner
from tests.fuzz.targets import CORPUS, TARGETS, Target
from tests.support import host
from tests.support.host import TREE

SECONDS, INPUTS = 60, 400
pytestmark = pytest.mark.timeout(900)  # the first test waits for the compiler


@pytest.fixture(scope="module")
def built() -> None:
    host.make(f"-j{runner.processors()}", "fuzz-programs")


@pytest.fixture(scope="module")
def outcomes(built: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[runner.Outcome]]]:
    """All targets, one per processor at a time."""
    work = tmp_path_factory.mktemp("fuzz")
    with ThreadPoolExecutor(runner.processors()) as pool:
        yield {name: pool.submit(runner.run, one, SECONDS, work / name, inputs=INPUTS) for name, one in TARGETS.items()}


@pytest.mark.parametrize("name", TARGETS)
def test_target_finds_nothing(outcomes: dict[str, Future[runner.Outcome]], name: str) -> None:
    outcome = outcomes[name].result()
    assert not outcome.problem, "\n".join([outcome.problem, *outcome.reproduce()])
    seeds = len(list((CORPUS / name).iterdir()))
    assert outcome.executions > seeds and outcome.before > 0


def test_corpus_matches_targets() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    large = [path for path in CORPUS.rglob("*") if path.is_file() and path.stat().st_size > 4096]
    assert not large
    assert all(any(folder.iterdir()) for folder in CORPUS.iterdir())


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        (Target("planted", "C"), "AddressSanitizer: heap-buffer-overflow"),
        (Target("planted", "Python", "planted:fails"), "ValueError: planted"),
    ],
    ids=lambda value: getattr(value, "reads", None),
)
def test_planted_bug_is_found_kept_and_reproduced(
    built: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: Target, problem: str
) -> None:
    monkeypatch.setattr(runner, "FOUND", tmp_path / "found")
    (tmp_path / "corpus" / "planted").mkdir(parents=True)
    (tmp_path / "corpus" / "planted" / "once").write_bytes(b"bad")
    outcome = runner.run(target, 1, tmp_path / "work", tmp_path / "corpus")
    assert problem in outcome.problem
    (path,) = outcome.findings
    assert path.read_bytes() == b"bad" and problem in path.with_suffix(".log").read_text()
    (command,) = outcome.reproduce()
    again = subprocess.run(command, shell=True, cwd=TREE, env=runner.environment(), capture_output=True, text=True)
    assert again.returncode != 0 and problem in again.stdout + again.stderr
