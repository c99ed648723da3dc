"""tools/english.py: banned constructions are found, and commit subjects are checked."""

from __future__ import annotations

import pytest

from tools import english


@pytest.mark.parametrize(
    "text",
    [
        "# Who finds no room adds nothing\n",
        '"""Whose turn it is."""',
        "/* Nobody reads this */",
        "the process ends. Who waits goes on",
        "the file is made anew",
        "what the law allows",
        "his share ends",
        "a shim of before",
        "the container hears of it",
        "# What others need\n",
        '"""Which backend enforces which limit."""',
        "the file is read. Whatever is in it counts",
        "those that wait",
        "3Gi was asked, policy allows less",
        "the variable says which device it is",
        "the dead are looked at",
        "programs that go around the shim",
        "the engine knows nothing of gpushare",
        "def test_exports_that_nobody_opens():",
    ],
)
def test_banned_construction_is_found(text: str) -> None:
    assert english.problems(text)


@pytest.mark.parametrize(
    "text",
    [
        "# Check first: a reservation that is bound to fail would make concurrent ones fail too.\n",
        "who = 1",
        "# Who may write here? See state.md\n",
        "this is the theme of the page",
        "the socket listens at a path",
        "# Which of these wins? See merge.py\n",
        "**What is in the file.** The static program",
        "## What the program sees\n",
        "they cannot be told apart",
        "a look-up in the kernel",
        "a file of user nobody: nobody:65536",
    ],
)
def test_plain_sentence_passes(text: str) -> None:
    assert english.problems(text) == []


@pytest.mark.parametrize(
    ("subject", "wrong"),
    [
        ("shim: stop querying events of a destroyed context", False),
        ("core, system: describe each function in plain words", False),
        ("gpushare run: a share of a GPU", False),
        ("Leases, storage and the hook: reserve, apply", True),
        ("fix it", True),
        ("shim: " + "x " * 40, True),
    ],
)
def test_commit_subjects(subject: str, wrong: bool) -> None:
    assert bool(english.wrong_subjects([subject])) is wrong


def test_this_tree_keeps_its_bounds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["english.py"])
    assert english.main() == 0, capsys.readouterr().out
