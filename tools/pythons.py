"""Run the unit tests with other versions of Python: make pythons.

python -m tools.pythons [--record] [PYTHON]...

PYTHON is an interpreter; by default each python3.N of PATH and of pyenv. Each gets a virtual environment in
build/pythons, which is kept. The programs that the tests start are those of `make build`. Results go to
build/pythons/pythons.json, where each version replaces its earlier result; --record copies the file to
tests/matrix/pythons.json, from which docs/versions.md is made. The exit code is 1 if a test has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.host import BUILD, TREE
from tests.support.rootfs import run
from tools.matrix import RECORDS, count, outcomes, say

FOLDER = BUILD / "pythons"
NAME = "pythons.json"
TESTS = ("tests/unit", "tests/golden")
OLDEST = (3, 9)
# Tests that a version does not run, with the reason, for docs/versions.md; pytest ignores the names that are files
LEFT_OUT = {
    "3.9": {
        "tests/unit/test_kubernetes.py": "cel-python needs google-re2, which has no wheel for Python 3.9",
        "the case of `match` in tests/unit/test_backends.py": "Python 3.9 has no `match`",
    }
}


def found() -> list[Path]:
    """The interpreters of PATH and pyenv, one for each minor version."""
    folders = [Path(name) for name in os.environ["PATH"].split(":")]
    folders += [path / "bin" for path in Path.home().glob(".pyenv/versions/*")]
    names: dict[int, Path] = {}
    for folder in folders:
        for path in folder.glob("python3.*"):
            minor = re.fullmatch(r"python3\.(\d+)", path.name)
            if minor and (3, int(minor[1])) >= OLDEST and ".pyenv/shims" not in str(path):
                names.setdefault(int(minor[1]), path)
    return [names[minor] for minor in sorted(names)]


def version(python: Path) -> str:
    return run(python, "-c", "import platform; print(platform.python_version())").strip()


def environment(python: Path, number: str) -> Path:
    """Make or update the virtual environment; return its interpreter."""
    inside = FOLDER / number / "bin" / "python"
    if not inside.exists():
        run(python, "-m", "venv", FOLDER / number)
    words = (inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--editable", ".[dev]")
    with open(FOLDER / f"{number}.pip.log", "wb") as log:
        done = subprocess.run(words, cwd=TREE, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"gpushare: pip could not install what pyproject.toml asks for: {log.name}")
    return inside


def run_tests(python: Path, number: str) -> dict[str, Any]:
    """Return the version's entry in the JSON."""
    xml = FOLDER / f"{number}.xml"
    xml.unlink(missing_ok=True)
    words = [str(python), "-m", "pytest", "-q", "--junitxml", str(xml), "-o", f"cache_dir={FOLDER}/{number}.cache"]
    left_out = LEFT_OUT.get(number.rpartition(".")[0], {})
    words += [*TESTS, *(f"--ignore={name}" for name in left_out if (TREE / name).exists())]
    entry: dict[str, Any] = {"python": number, "when": time.strftime("%Y-%m-%d"), "commit": _commit()}
    if left_out:
        entry["left_out"] = left_out
    with open(FOLDER / f"{number}.log", "wb") as log:
        code = subprocess.run(words, cwd=TREE, stdin=subprocess.DEVNULL, stdout=log, stderr=log).returncode
    if code not in (0, 1) or not xml.exists():
        return {**entry, "broken": f"exit code {code}"}
    results = outcomes(xml)
    failures = [test for test, result in results if result == "failed"]
    return {**entry, **count([result for _, result in results]), "failures": failures}


def _commit() -> str:
    dirty = run("git", "status", "--porcelain", "--untracked-files=no", cwd=TREE).strip()
    return run("git", "rev-parse", "--short=8", "HEAD", cwd=TREE).strip() + "+" * bool(dirty)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make pythons")
    parser.add_argument("--record", action="store_true", help="copy the results to tests/matrix")
    parser.add_argument("python", nargs="*", type=Path, metavar="PYTHON", help="default: those of PATH and pyenv")
    options = parser.parse_args(argv)
    FOLDER.mkdir(parents=True, exist_ok=True)
    file = FOLDER / NAME
    rows = {row["python"]: row for row in json.loads(file.read_text())} if file.exists() else {}
    bad = False
    for python in options.python or found():
        number = version(python)
        say(f"Python {number}; {FOLDER}/{number}.log")
        entry = run_tests(environment(python, number), number)
        rows[number] = entry
        file.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
        say(f"Python {number}: {entry.get('broken') or '{passed} passed, {failed} failed'.format(**entry)}")
        bad = bad or bool(entry.get("failed", 1))
    if options.record and file.exists():
        RECORDS.mkdir(exist_ok=True)
        shutil.copy(file, RECORDS)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
