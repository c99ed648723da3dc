"""Interfaces that must stay: promises.txt, made from 0.1.0."""

from __future__ import annotations

from pathlib import Path

from tests.golden.promises import promises

KEPT = Path(__file__).with_name("promises.txt")


def test_nothing_that_users_rely_on_is_gone() -> None:
    gone = set(KEPT.read_text().splitlines()) - set(promises())
    assert not gone, "\n".join(sorted(gone))


def test_promises_have_every_kind() -> None:
    """If promises() lost a whole kind, a later addition of that kind would not be noticed."""
    kinds = {line.partition(" ")[0] for line in KEPT.read_text().splitlines()}
    assert kinds == {
        "annotation", "applied", "command", "configuration", "exit", "file", "held", "hook", "json", "layout",
        "lease.json", "metric", "runtime", "variable",
    }  # fmt: skip
