"""The short form of a run omits no test whose counterpart does not stay."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support import short
from tests.support.host import TREE

BOTH = [f"tests/x/test_x.py::test_{name}[{way}-{number}]"
        for name in "abcdef" for number in range(9) for way in ("hook", "runtime")]  # fmt: skip


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Costs of tests that do not exist."""
    rows = ("0.9 tests/x/test_x.py::test_cheap", "1 tests/x/test_x.py::test_some", "4 tests/x/test_x.py::test_dear",
            "1 tests/integration/test_x.py::test_some", "1 tests/integration/test_x.py::test_that_stays")  # fmt: skip
    file = tmp_path / "costs.txt"
    file.write_text(short.HEAD + "".join(f"{row}\n" for row in rows))
    monkeypatch.setattr(short, "COSTS", file)
    monkeypatch.setattr(short, "_STAYS", ("tests/integration/test_x.py::test_that_stays",))
    return file


def test_one_way_of_each_test_stays_and_each_way_stays_for_some() -> None:
    kept = sorted(set(BOTH) - short.omitted(BOTH))
    assert sorted(re.sub("hook|runtime", "", one) for one in kept) == sorted(
        {re.sub("hook|runtime", "", one) for one in BOTH}
    )
    ways = Counter("hook" if "hook" in one else "runtime" for one in kept)
    assert min(ways.values()) > len(kept) / 4


def test_way_of_an_engine_is_recognised() -> None:
    both = [f"tests/x/test_x.py::test_a[podman with crun, {way}]" for way in ("hook", "runtime")]
    assert len(short.omitted(both)) == 1


def test_test_with_one_way_only_stays() -> None:
    alone = [one for one in BOTH if "[hook-3]" in one and "test_a" in one]
    assert short.omitted(alone) == set()


@pytest.mark.parametrize(
    ("name", "stay"),
    [
        ("tests/x/test_x.py::test_cheap", 3),
        ("tests/x/test_x.py::test_some", 1),
        ("tests/x/test_x.py::test_dear", 0),
        ("tests/integration/test_x.py::test_cheap", 1),
        ("tests/integration/test_x.py::test_some", 0),
        ("tests/integration/test_x.py::test_that_stays", 1),
        ("tests/shim/test_compute.py::test_share", 1),
        ("tests/shim/test_compute_cost.py::test_share", 3),
    ],
)
def test_costs_decide_how_many_values_stay(costs: Path, name: str, stay: int) -> None:
    values = [f"{name}[{value}]" for value in "abc"]
    cheapest = f"{name.partition('::')[0]}::test_cheapest"
    assert len(set(values) - short.omitted([*values, cheapest])) == stay


def test_cheapest_test_of_a_file_stays(costs: Path) -> None:
    some, dear = "tests/integration/test_x.py::test_some", "tests/x/test_x.py::test_dear"
    assert short.omitted([f"{some}[{value}]" for value in "ab"] + [dear]) == {f"{some}[a]", dear}


def test_tests_of_planted_faults_stay(costs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, function = "tests/x/test_x.py::test_dear[b]", "tests/integration/test_x.py::test_some"
    monkeypatch.setattr(short, "_planted", lambda: {one, function})
    values = [f"{name}[{value}]" for name in (one.partition("[")[0], function) for value in "abc"]
    assert set(values) - short.omitted(values) == {one, *values[3:]}
    assert "tests/unit/test_policy.py::test_privileged_container_needs_entry[entries3-True]" in PLANTED


@pytest.mark.parametrize(
    ("name", "omitted"),
    [
        ("tests/shim/test_loader.py::test_x[535-a]", False),
        ("tests/shim/test_loader.py::test_x[550-a]", True),
        ("tests/integration/test_engines.py::test_exec[podman, hook]", False),
        ("tests/integration/test_engines.py::test_exec[newest podman, hook]", True),
        ("tests/integration/test_engines.py::test_limit_is_visible_reached_and_enforced[newest podman, hook]", False),
    ],
)
def test_other_branches_and_releases_are_omitted(name: str, omitted: bool) -> None:
    assert short.omitted([name]) == ({name} if omitted else set())


@pytest.mark.parametrize("file", short.STAYS)
def test_tests_that_stay_exist_and_are_costly(file: str) -> None:
    text, costs = (TREE / "tests" / file).read_text(), short.COSTS.read_text()
    for name in short.STAYS[file].split():
        assert re.search(rf"^def test_{name}", text, re.MULTILINE), name
        assert f" tests/{file}::test_{name}" in costs, f"{name} stays anyway"


def test_costs_of_a_run_replace_those_of_its_tests(costs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tests/x", "tests/integration"):
        (costs.parent / name).mkdir(parents=True)
    (costs.parent / "tests/x/test_x.py").touch()
    monkeypatch.setattr(short, "TESTS", costs.parent / "tests")
    plugin = short.CostsFile()
    plugin._spent = {"tests/x/test_x.py::test_some": 0.5, "tests/x/test_x.py::test_new": 7.25}
    plugin.pytest_sessionfinish()
    assert costs.read_text().splitlines()[1:] == [
        "4.0 tests/x/test_x.py::test_dear", "7.2 tests/x/test_x.py::test_new"
    ]  # fmt: skip


PLANTED = short._planted()
