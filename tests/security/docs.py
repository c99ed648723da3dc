"""The text of docs/attacks.md, generated from the table of attacks: a row of tools/generated.py."""

from __future__ import annotations

from . import table

HEAD = """\
# Tested attacks

Generated from `tests/security/table.py` by `make docs`; a test fails if the page is out of date.

```sh
make test-attacks
```

This command tries each attack with a real container, once with the hook and once with the runtime. After each attack,
the checksums of its possible targets and the host's mount table must be unchanged. No trace of the container may
remain, and the whole device must be free.

* Share: the container starts. A program in it allocates until it is refused; CUDA, NVML and the simulated device's
  ledger all show exactly the container's limit.
* Refused: the container does not start, and one line gives the reason.

[Security](security.md) lists the promises and their limits.

| attack | with the hook | with the runtime | related CVEs |
|---|---|---|---|
"""

RACES = """
## Races

A second container swaps a path component in a loop while the first is started repeatedly. Each start must end in a
share or a refusal. `GPUSHARE_RACES=1000 make test-attacks` runs 1000 starts for each race.

| race | related CVEs |
|---|---|
"""

ELSEWHERE = """
## Attacks in other tests

| attack | related CVEs | tests |
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
