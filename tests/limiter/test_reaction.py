"""How soon a changed limit is enforced, and how much throughput the rate limiter costs."""

from __future__ import annotations

import pytest

from tests.limiter import reaction
from tests.limiter.cells import Tenant, simulate


@pytest.mark.parametrize("change", reaction.changes(), ids=lambda change: change.name)
def test_changed_limit_settles_in_time(change: reaction.Change) -> None:
    """A change settles in 100 ms, or in the time of two launches at the limit."""
    assert reaction.settling_ms(change) <= change.bound_ms()


@pytest.mark.parametrize("tenant", reaction.LIMITED, ids=Tenant.word)
def test_limiter_costs_little_throughput(tenant: Tenant) -> None:
    assert reaction.throughput_ratio(tenant) >= 0.97


@pytest.mark.parametrize("tenant", reaction.UNLIMITED, ids=Tenant.word)
def test_unlimited_tenant_loses_next_to_nothing(tenant: Tenant) -> None:
    assert reaction.unlimited_loss(tenant) <= 0.1
    (ledger,) = simulate([tenant], ms=1000)
    assert ledger.marks > 0  # it does publish its activity
