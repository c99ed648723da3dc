#!/usr/bin/env python3
"""Check the English of sources and commits: english.py [--write]. Part of `make lint`.

BANNED lists constructions that a reader has to read twice. tools/english.txt has their number in each file; a file that
is not listed has none. No number may grow; `--write` updates the list after numbers fell. Subjects of commits since
FIRST must be `area: verb the thing`, at most 72 characters.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]
BOUNDS = TREE / "tools" / "english.txt"
FIRST = "b9ab0e3"  # the first commit that this rule applies to
SUBJECT_LENGTH = 72
BANNED = {
    r"\b(?:nobody(?![\":])|somebody|everybody|whoever|whomever)\b": "name the process, container or user",
    r"(?:^|[.!?:;]\s+|\"\"\"|#\s*|/\*\s*)(?-i:Who|Whose|Whom) (?![^.]*\?)": "do not start with Who",
    r"(?:\"\"\"|(?<!#)#\s+|/\*\s*|(?<!\*)[.!;:]\s+)"
    r"(?-i:What|Whatever|Which|Whichever|That which) (?![^.]*\?)": "name the thing",
    r"\b(?:those|these) (?:that|which|who|whose)\b": "repeat the noun",
    r"\b(?:is|are|was|were|be|been) (?:said|told(?! apart)|asked)\b": "set, reported, requested",
    r"\bsays? (?:it|so|which|what|nothing|that|who|how|whether)\b": "sets, reports, names, describes",
    r"\blook(?:s|ed|ing)? at\b|\ba look\b(?!-up)": "read, check, probe",
    r"\b(?:goes|go|going|went|gone) (?:round|around)\b": "bypass",
    r"\bknows? (?:of|nothing)\b": "depends on, contains, detects",
    r"\b(?:anew)\b": "again",
    r"\b(?:he|him|his)\b": "repeat the noun",
    r"\b(?:hears?|heard|hearing|listens? to|speaks?|spoken|lies|liars?)\b": "parses, accepts, reports, spoofs",
    r"\bthe law\b": "the rate limiter",
    r"\bof before\b": "earlier, previous",
    r"\bof ours\b": "gpushare's, our",
    r"\bas it is had\b|\bis had\b|\bare had\b": "exists, is available",
}
_PATTERNS = [(re.compile(pattern, re.IGNORECASE | re.MULTILINE), use) for pattern, use in BANNED.items()]
_SOURCES = re.compile(
    r"\.(py|c|h|mk|sh)$|(^|/)Makefile$|^simulator/README\.md$|^(CHANGELOG|CONTRIBUTING|README|SECURITY)\.md$"
    r"|^(docs|packaging)/.*\.md$"
)
# These contain such words on purpose
_SKIPPED = re.compile(r"(^|/)(test_)?english\.py$|^tests/(fuzz/corpus|schemas|golden/[a-z]+/)")


def problems(text: str) -> list[tuple[int, str, str]]:
    """Return (line, text, suggestion) for each banned construction, also in names of tests."""
    text = re.sub(r"\bdef test_\w+", lambda match: match.group().replace("_", " "), text)
    found = [
        (text.count("\n", 0, match.start()) + 1, match.group().strip(), use)
        for pattern, use in _PATTERNS
        for match in pattern.finditer(text)
    ]
    return sorted(found)


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=TREE, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


def wrong_subjects(subjects: list[str]) -> list[str]:
    """Return one line for each commit subject that breaks the rule."""
    shape = re.compile(r"[a-z0-9][\w ,./+-]*: [a-z][\w-]* \S.*")
    wrong = [f"{subject!r} is not `area: verb the thing`" for subject in subjects if not shape.fullmatch(subject)]
    long = [one for one in subjects if len(one) > SUBJECT_LENGTH]
    return wrong + [f"{one!r} has {len(one)} characters, not {SUBJECT_LENGTH} at most" for one in long]


def main() -> int:
    files = [name for name in _git("ls-files") if _SOURCES.search(name) and not _SKIPPED.search(name)]
    found = {name: problems((TREE / name).read_text()) for name in files if (TREE / name).is_file()}
    counts = {name: len(items) for name, items in found.items() if items}
    if "--write" in sys.argv[1:]:
        BOUNDS.write_text("".join(f"{count} {name}\n" for name, count in sorted(counts.items())))
        return 0
    rows = (line.split() for line in BOUNDS.read_text().splitlines())
    bounds = {file: int(number) for number, file in rows}
    failed = False
    for name, count in sorted(counts.items()):
        if count > bounds.get(name, 0):
            failed = True
            for line, text, use in found[name]:
                print(f"{name}:{line}: {text!r}: write: {use}")
            print(f"{name}: {count} banned constructions, {bounds.get(name, 0)} at most")
    for subject in wrong_subjects(_git("log", "--format=%s", "--no-merges", f"{FIRST}..HEAD")):
        failed = True
        print(f"commit {subject}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
