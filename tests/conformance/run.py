"""Run one check in a separate process:  python -m tests.conformance.run LIBCUDA CHECK"""

from __future__ import annotations

import sys

from tests.conformance.behaviours import BEHAVIOURS
from tests.conformance.driver import Driver


def main(library: str, name: str) -> int:
    found = [b for b in BEHAVIOURS if b.check.__name__ == name]
    if not found:
        print(f"run.py: no check is called {name!r}; see behaviours.py", file=sys.stderr)
        return 2
    found[0].check(Driver(library))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
