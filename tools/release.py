"""Check what a release needs before its packages are built: make release-check.

python -m tools.release [TREE]

One line for each fault, and exit code 1: a file that names another version than pyproject.toml, and a changelog whose
first heading is not this version with its date.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
# Names of packages and images, and keys of manifests
NAMED = re.compile(r"(?:\bgpushare(?:-[a-z]+)?[_:-]|\bnewTag: |^version: |^appVersion: )(\d+\.\d+\.\d+)", re.MULTILINE)
PLACES = ("*.md", "docs", "packaging", ".github")


def version(tree: Path) -> str:
    """The version in pyproject.toml."""
    found = re.search(r'^version = "(.*)"$', (tree / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    return found[1]


def faults(tree: Path = TREE) -> Iterator[str]:
    """Yield a line for each file with another version."""
    listed = subprocess.run(["git", "ls-files", "--", *PLACES], cwd=tree, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        text = (tree / name).read_bytes().decode(errors="replace")
        others = sorted(set(NAMED.findall(text)) - {version(tree)})
        if others:
            yield f"{name}: names version {', '.join(others)}, and pyproject.toml {version(tree)}"


def notes(tree: Path = TREE) -> str:
    """Return what is wrong with the changelog's first heading, or nothing."""
    heading = next(line for line in (tree / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    if re.fullmatch(rf"## {re.escape(version(tree))} \(\d{{4}}-\d\d-\d\d\)", heading):
        return ""
    return f"CHANGELOG.md: write `## {version(tree)} (YYYY-MM-DD)` with the date of the release in place of `{heading}`"


def main(words: list[str]) -> int:
    tree = Path(words[0]) if words else TREE
    lines = [*faults(tree), *filter(None, [notes(tree)])]
    print("\n".join(lines) or f"release: {version(tree)} is named everywhere, and the changelog has its date")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
