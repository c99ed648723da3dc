"""Containers that publish false activity (spoof.c) beside honest ones.

The honest containers keep their shares, and the false activity gains nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from tests.limiter.cells import TREE, Ledger, Tenant, simulate

SPOOFS = ("busy", "idle", "garbage", "runs", "crowd", "future", "past", "negative", "slow", "careful")
CORPUS = sorted((TREE / "tests/fuzz/corpus/law").iterdir())
START_MS = 1500  # by then the limiter has detected exaggerated activity
POINTS = 3.0  # tolerance for an honest container
GAIN = 1.0  # tolerance for the container with false activity


class Company(NamedTuple):
    """The last container publishes false activity. `works`: it also has work, and could use a gain."""

    limits: tuple[float, ...]
    kernel: str = "50us"
    program: str = "stream"
    works: bool = True
    points: float = POINTS


COMPANIES = (
    Company((40, 40)),
    Company((40, 40), works=False),
    Company((40, 40), "5us"),
    Company((40, 40), "1ms"),
    Company((40, 40), "lognormal"),
    Company((40, 40), program="sync"),
    Company((50, 50)),
    Company((30, 5)),
    Company((40, 30, 20)),
    Company((40, 20, 20), works=False),
    Company((40, 30, 30), points=4.5),  # the limits add up to 100 %, so no launch finds the device idle
    Company((40, 40), "20ms"),  # a kernel lasts ten slices and more: only probe events show who used the device
    Company((40, 40), "20ms", works=False),
    Company((40, 40), "20ms", "graph"),
)


def run(company: Company, spoof: str, **world: Any) -> list[Ledger]:
    more = f"spoof={spoof}" + ("" if company.works else ",join=1000000")
    tenants = [Tenant(limit, company.kernel, company.program) for limit in company.limits]
    tenants[-1] = tenants[-1]._replace(more=more)
    return simulate(tenants, ms=4500, **world)


def hold(company: Company, ledgers: list[Ledger]) -> None:
    got = [round(ledger.share(START_MS), 1) for ledger in ledgers]
    for limit, share in list(zip(company.limits, got))[:-1]:
        assert share == pytest.approx(limit, abs=company.points), (company, got)
    assert got[-1] <= company.limits[-1] + GAIN, (company, got)
    assert company.works or got[-1] == 0


@pytest.mark.parametrize("spoof", SPOOFS)
@pytest.mark.parametrize("company", COMPANIES, ids=lambda company: "-".join(map(str, company)))
def test_false_activity_gains_and_gives_nothing(company: Company, spoof: str) -> None:
    hold(company, run(company, spoof))


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_false_activity_of_the_fuzzing_corpus_gains_nothing(path: str) -> None:
    for company in (COMPANIES[0], COMPANIES[1], COMPANIES[8]):
        hold(company, run(company, "corpus", corpus=str(path)))


def test_claimed_priority_does_not_stop_borrowing() -> None:
    high, _ = simulate(
        [Tenant(30, "50us", more="mode=soft,priority=1"), Tenant(30, "50us", more="spoof=crowd,join=1000000")], ms=3500
    )
    assert high.share(START_MS) >= 90
