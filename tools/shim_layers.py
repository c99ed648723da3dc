"""Check which folder of the shim includes which, against SHIM_LAYERS in shim.mk (lowest first). Prints violations.

A header declares only what its own folder defines: tests/shim/test_symbols.py checks that in the compiled objects.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

SHIM = Path(__file__).resolve().parents[1] / "shim"
BESIDE = {"nvml": ("include", "core")}  # a separate library


def layers() -> dict[str, tuple[str, ...]]:
    """Map each folder to the other folders that it may include."""
    found = re.search(r"^SHIM_LAYERS := (.*)", (SHIM / "shim.mk").read_text(), re.M)
    assert found
    names = ("include", *found[1].split())
    return {name: names[:at] for at, name in enumerate(names)} | BESIDE


def wrong() -> Iterator[str]:
    allowed = layers()
    for file in sorted(SHIM.rglob("*.[ch]")):
        folder = file.parent.name
        if folder not in allowed:
            yield f"{file.relative_to(SHIM.parent)}: {folder} is not in SHIM_LAYERS of shim/shim.mk"
            continue
        for number, line in enumerate(file.read_text().splitlines(), 1):
            included = re.match(r'\s*#\s*include "(?:\.\./)*([a-z]+)/', line)
            if included and included[1] not in (*allowed[folder], folder):
                yield f"{file.relative_to(SHIM.parent)}:{number}: {folder} stands below {included[1]}"


if __name__ == "__main__":
    found = list(wrong())
    print("\n".join(found))
    sys.exit(bool(found))
