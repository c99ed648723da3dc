"""Planted faults: changes of the product that a test must notice. The table is faults.yaml.

    NAME:
      breaks:  what a user would notice, in a line
      file:    where the fault is
      old:     text that occurs once in that file
      new:     the fault
      test:    the test that must fail (its node id)

A fault is a text to replace and not a diff, so that it survives changes nearby; tests/unit/test_planted.py fails if the
text or the test is gone. `make planted` plants each fault in a copy of the tree and runs its test.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import yaml

TREE = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("faults.yaml")
# Areas, and how many faults each must have
AREAS = {
    "hook/gpushare/": 40,
    "hook/launcher/": 3,
    "hook/snapshot/": 2,
    "shim/": 13,
    "packaging/kubernetes/": 3,
    "packaging/scripts/": 1,
}


class Fault(NamedTuple):
    """One row of the table."""

    name: str
    breaks: str
    file: str
    old: str
    new: str
    test: str

    def planted_in(self, text: str) -> str:
        """Return the file's text with the fault. Raise ValueError if the fault does not apply."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(f"{self.name}: `old` must occur once in {self.file}, and occurs {found} times")
        return text.replace(self.old, self.new)


def faults() -> tuple[Fault, ...]:
    """Return the rows of the table."""
    return tuple(Fault(name, **row) for name, row in yaml.safe_load(TABLE.read_text()).items())
