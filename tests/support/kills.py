"""The points at which tests kill a program: some in `make test`, all in `make test-kills`.

With GPUSHARE_EVERY_POINT=n in the environment each such test becomes n tests with every nth point each, so that all
workers stay busy. Each survived point is recorded in build/kills/<digest of the programs>/<test>/, and an interrupted
run resumes there. Changed programs start over, and so does the run after a successful one (`forget`).
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from .host import BUILD, TREE

PARTS = int(os.environ.get("GPUSHARE_EVERY_POINT") or 0)
PLACE = BUILD / "kills"


@functools.cache
def tried() -> Path:
    """The directory of records for the current programs; create it and remove the directories of others."""
    digest = hashlib.sha256()
    sources = (TREE / "hook").rglob("*.py"), (TREE / "hook" / "launcher").glob("*.[ch]"), [BUILD / "bin/gpushare-hook"]
    for source in sorted(path for paths in sources for path in paths):
        digest.update(source.read_bytes())
    place = PLACE / digest.hexdigest()[:16]
    for other in PLACE.glob("*") if PLACE.is_dir() else ():
        if other != place:
            shutil.rmtree(other, ignore_errors=True)
    place.mkdir(parents=True, exist_ok=True)
    return place


def forget() -> None:
    """Called after a complete run."""
    shutil.rmtree(PLACE, ignore_errors=True)


class Kills:
    """The kill points of one test. The test adds to `left` the remains of each kill; at its end some kill must have
    left any."""

    def __init__(self, test: str, part: int) -> None:
        self.left = 0
        self._part = part
        self._record: Path | None = None
        if PARTS:
            place = tried() / test.rpartition("::")[2].partition("[")[0]
            place.mkdir(exist_ok=True)
            self._record = place / f"part-{part}"

    def some(self, first: int, end: int, step: int, kind: str = "") -> Iterator[int]:
        """Kill points from `first` to before `end`: every `step`th, or each point of this part that no earlier run has
        survived. A test with two series gives each a `kind` if a number may be in both."""
        if self._record is None:
            yield from range(first, end, step)
            return
        done = self._done(kind)
        for at in range(first + (self._part - first) % PARTS, end, PARTS):
            if at in done:
                continue
            before = self.left
            yield at
            with open(self._record, "a") as file:
                file.write(f"{kind}:{at} {self.left - before}\n")

    def some_left_something(self) -> None:
        """Require that some kill left remains; otherwise the test did not test its claim. For a test in parts this
        holds for all parts together: see `whole`."""
        if self._record is None:
            assert self.left > 0
        else:
            (self._record.parent / "leaves").touch()

    def _done(self, kind: str) -> set[int]:
        assert self._record is not None
        found = set()
        for line in self._record.read_text().splitlines() if self._record.exists() else ():
            point, left = line.split()
            name, _, at = point.partition(":")
            if name == kind:
                found.add(int(at))
                self.left += int(left)
        return found


def whole(place: Path) -> int:
    """After all parts of the test with this directory, return the number of kill points."""
    lines = [line for part in place.glob("part-*") for line in part.read_text().splitlines()]
    left = sum(int(line.split()[1]) for line in lines)
    assert left > 0 or not (place / "leaves").exists(), f"{place.name}: no kill left anything behind"
    return len(lines)


if __name__ == "__main__":
    for place in sorted(tried().iterdir()):
        print(f"{whole(place):5} points  {place.name}")
    forget()
