"""How soon a limit is held, and what the law takes from the work."""

from __future__ import annotations

import pytest

from tests.limiter import reaction
from tests.limiter.cells import Tenant, simulate


@pytest.mark.parametrize("change", reaction.changes(), ids=lambda change: change.name)
def test_a_change_settles(change: reaction.Change) -> None:
    """In 100 ms, or in two launches at the limit."""
    assert reaction.settling_ms(change) <= change.bound_ms()


@pytest.mark.parametrize("tenant", reaction.LIMITED, ids=Tenant.word)
def test_no_work_is_lost_to_the_law(tenant: Tenant) -> None:
    assert reaction.throughput_ratio(tenant) >= 0.97


@pytest.mark.parametrize("tenant", reaction.UNLIMITED, ids=Tenant.word)
def test_an_unlimited_tenant_loses_next_to_nothing(tenant: Tenant) -> None:
    assert reaction.unlimited_loss(tenant) <= 0.1
    (ledger,) = simulate([tenant], ms=1000)
    assert ledger.marks > 0  # it does tell the others
