"""Print docs/attacks.md, generated from the table of attacks. `make docs` writes it; a test compares.

python3 -m tests.security.docs
"""

from __future__ import annotations

from . import table

HEAD = """\
# Attacks that are tried

Generated from `tests/security/table.py` by `make docs`; a test compares them.

    make test-attacks

tries each of these with a real container, by the hook and by the runtime. After each, a checksum walk of what the
attack aims at and the host's mount table must be as before, nothing may be left of the container, and the whole device
must be free. "Share" means: a program in the container that takes all it can get has exactly its limit, by CUDA, by
NVML and by the device's own books. "Refused" means: the container does not start, and one line says why.
What is promised, and what is not, is in [security.md](security.md).

| attack | by the hook | by the runtime | as in |
|---|---|---|---|
"""

RACES = """
## Races

A second container swaps a component in a loop while the first is started again and again. Each start is a share or a
refusal. `GPUSHARE_RACES=1000 make test-attacks` makes each loop 1000 starts long.

| race | as in |
|---|---|
"""

ELSEWHERE = """
## Tried by other tests

| attack | as in | tests |
|---|---|---|
"""


def _words(expected: table.Verdict) -> str:
    if expected is None:
        return "share"
    if isinstance(expected, table.Other):
        return expected.words
    return "refused" if expected.by == "gpushare" else "refused by runc"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def text() -> str:
    """Return the whole page."""
    attacks = [
        f"| {_cell(one.name)} | {_words(one.hook)} | {_words(one.runtime)} | {', '.join(one.cves)} |"
        for one in table.ATTACKS
    ]
    races = [f"| {_cell(one.name)} | {', '.join(one.cves)} |" for one in table.RACES]
    elsewhere = [
        f"| {_cell(one.name)} | {', '.join(one.cves)} | {', '.join(f'`{test}`' for test in one.tests)} |"
        for one in table.ELSEWHERE
    ]
    return HEAD + "\n".join(attacks) + "\n" + RACES + "\n".join(races) + "\n" + ELSEWHERE + "\n".join(elsewhere) + "\n"


if __name__ == "__main__":
    print(text(), end="")
