"""Devices whose context switches cost more or less than expected."""

from __future__ import annotations

from typing import Any

import pytest

from tests.limiter.cells import Tenant, simulate
from tests.limiter.matrix import RUN_MS, Cell, targets

POINTS = 2.0
COSTS = [
    {"switch_us": 20},
    {"switch_us": 300},
    {"switch_us": 500},
    {"switch_us": 15, "preempt_us": 125},
    {"switch_us": 15, "preempt_us": 250, "slice_us": 1024},
]


@pytest.mark.parametrize("world", COSTS, ids=str)
@pytest.mark.parametrize("kernel", ["5us", "50us", "1ms", "lognormal", "bimodal"])
@pytest.mark.parametrize("program", ["stream", "sync"])
def test_both_switch_costs_are_learned(kernel: str, program: str, world: dict[str, Any]) -> None:
    """The configured cost is 125 us, and the configured slice 2 ms."""
    cell = Cell("", (Tenant(30, kernel, program), Tenant(70, kernel, program)), program == "sync", world)
    ledgers = simulate(cell.tenants, ms=RUN_MS, seed=1, **world)
    for target, ledger in zip(targets(cell, 1), ledgers):
        assert ledger.share() == pytest.approx(target, abs=POINTS)


@pytest.mark.parametrize("told_us", [20, 125, 400])
def test_configured_switch_cost_does_not_matter(told_us: int) -> None:
    tenants = [Tenant(30, "50us"), Tenant(50, "50us")]
    for ledger in simulate(tenants, ms=RUN_MS, switch_us=15, preempt_us=250, told_switch_us=told_us):
        assert ledger.charged_ns / 45e6 == pytest.approx(ledger.held_ns / 45e6, abs=1.3)
