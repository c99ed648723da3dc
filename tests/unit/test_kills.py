"""Kill points: every point is tried once, in one part, also after an interruption; a run without findings fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import kills
from tests.support.kills import Kills


class Interrupted(Exception):
    """A test failed, or the run was stopped."""


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run in three parts; the fixture's value is the folder of its records."""
    monkeypatch.setattr(kills, "PARTS", 3)
    monkeypatch.setattr(kills, "PLACE", tmp_path / "kills")
    kills.tried.cache_clear()
    yield kills.tried()
    kills.tried.cache_clear()


def play(part: int, end: int = 20, stop: int = 0, left: int = 0) -> list[int]:
    """Run a test that is interrupted at `stop`; return the points that it tried."""
    one, seen = Kills(f"tests/integration/test_x.py::test_x[part {part}]", part), []
    for at in one.some(2, end, 7):
        seen.append(at)
        if at == stop:
            raise Interrupted
        one.left += left
    one.some_left_something()
    return seen


def test_parts_cover_every_point_once(parts: Path) -> None:
    seen = [at for part in range(3) for at in play(part, left=1)]
    assert sorted(seen) == list(range(2, 20))
    assert kills.whole(parts / "test_x") == 18


def test_next_run_resumes_at_failed_point(parts: Path) -> None:
    with pytest.raises(Interrupted):
        play(1, stop=10, left=1)
    assert play(1) == [10, 13, 16, 19]
    assert play(1) == []
    assert kills.whole(parts / "test_x") == 6


def test_run_without_leftovers_fails(parts: Path) -> None:
    play(0)
    with pytest.raises(AssertionError, match="test_x: no kill left anything behind"):
        kills.whole(parts / "test_x")
    play(1, left=1)
    assert kills.whole(parts / "test_x") == 12


def test_changed_programs_start_over(parts: Path) -> None:
    other = parts.parent / "0123"
    other.mkdir()
    kills.tried.cache_clear()
    assert kills.tried() == parts and not other.exists()
    kills.forget()
    assert not parts.exists()


def test_without_parts_only_some_points_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "PARTS", 0)
    assert play(0, left=1) == [2, 9, 16]
    with pytest.raises(AssertionError):
        play(0)
