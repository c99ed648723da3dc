"""The table of attacks: every fact and every known CVE has a row, and every named test exists."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.security import table
from tests.support.host import TREE

ROWS: list[Any] = [*table.ATTACKS, *table.RACES, *table.ELSEWHERE]


def test_facts_and_rows_match() -> None:
    named = {word for row in ROWS for word in row.facts}
    assert named == set(table.FACTS)


def test_every_cve_has_attack_or_race() -> None:
    assert {cve for row in ROWS if not isinstance(row, table.Elsewhere) for cve in row.cves} == set(table.CVES)
    assert len(table.CVES) == 16


def test_row_names_are_unique() -> None:
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("test", sorted({test for row in table.ELSEWHERE for test in row.tests}))
def test_named_test_exists(test: str) -> None:
    file, _, function = test.partition("::")
    assert re.search(rf"^(def {function}\(|{function} = )", (TREE / "tests" / file).read_text(), re.MULTILINE)


def test_crun_exceptions_name_existing_rows() -> None:
    assert {name for name, _ in table.CRUN} <= {row.name for row in table.ATTACKS}
    assert table.RUNC_ALONE.keys() <= {test for row in table.ELSEWHERE for test in row.tests}
    tried = {test for row in table.elsewhere("crun") for test in row.tests}
    assert tried == {test for row in table.ELSEWHERE for test in row.tests} - table.RUNC_ALONE.keys()
