"""docs/security.md: each row about what tenants write names tests that exist."""

from __future__ import annotations

import re

from tests.support.host import TREE

ROW = re.compile(r"`([a-z_]+/test_[a-z_0-9]+\.py)::(test_\w+)`")


def test_each_statement_of_a_tenant_has_a_test() -> None:
    page = (TREE / "docs/security.md").read_text()
    table = page.partition("## What gpushare reads from tenants")[2].partition("## Tolerances")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 8
    for row in rows:
        named = ROW.findall(row)
        assert named, row
        for path, name in named:
            assert f"def {name}(" in (TREE / "tests" / path).read_text(), f"{path}::{name}"
