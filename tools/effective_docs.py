"""The tables of effective handlers in docs/engines-reference.md, from tests/golden/configure/effective.json: a row of
generated.py.

tests/integration/test_effective_handlers.py compares the engines with the file, or writes it with GOLDEN_WRITE=1.
"""

from __future__ import annotations

import json
import os
from typing import Any

from tests.support.host import TREE

RECORD = TREE / "tests" / "golden" / "configure" / "effective.json"
PAGE = TREE / "docs" / "engines-reference.md"
BEGIN, END = "<!-- begin: make docs -->\n", "<!-- end: make docs -->\n"
_LONG = 2  # items of a list that the page shows

Handler = dict[str, Any]


def flat(table: Handler, before: str = "") -> Handler:
    """A table with dotted keys."""
    found: Handler = {}
    for key, value in table.items():
        found.update(flat(value, f"{before}{key}.") if isinstance(value, dict) else {f"{before}{key}": value})
    return found


def check(engine: str, before: Handler, after: Handler, ours: Handler) -> None:
    """Compare with the record, or write it."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    keys = sorted({*before, *after, *ours})
    found = {key: [_short(one.get(key)) for one in (before, after, ours)] for key in keys}
    if os.environ.get("GOLDEN_WRITE"):
        record[engine] = found
        RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n")
    assert record.get(engine, found) == found


def _short(value: Any) -> Any:
    """Paths of this machine's build, as those of an installation."""
    if isinstance(value, str) and value.rpartition("/")[2].startswith("gpushare-runtime"):
        return f"/usr/bin/{value.rpartition('/')[2]}"
    return value


def _cell(values: list[Any]) -> str:
    """The value before and after, and gpushare's if that is another one."""
    before, after, ours = ("not set" if one is None else _shown(one) for one in values)
    assert before == after, values
    return before if ours == before else f"{before} / {ours}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        rest = f" and {len(value) - _LONG} more" if len(value) > _LONG else ""
        return ", ".join(f"`{one}`" for one in value[:_LONG]) + rest if value else "none"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def table() -> str:
    """One table for each engine: a row for each key, a column for each version."""
    record: dict[str, dict[str, list[Any]]] = json.loads(RECORD.read_text())
    text = ""
    for engine in sorted({name.partition(" ")[0] for name in record}):
        versions = [name for name in record if name.partition(" ")[0] == engine]
        rows = [["key", *versions], ["---"] * (len(versions) + 1)]
        for key in sorted({key for name in versions for key in record[name]}):
            cells = [_cell(record[name][key]) if key in record[name] else "-" for name in versions]
            rows.append([f"`{key}`", *cells])
        text += "\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return f"{BEGIN}{text}\n{END}"


def page() -> str:
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    return head + table() + rest.partition(END)[2]
